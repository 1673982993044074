//! Compiles the emulation, the driver and kernels with the C++ compiler of the machine; shared by `build.rs` and the
//! library, which builds the sanitizers' variants on demand. Objects are kept by the hash of all that went into them.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::{fs, io};

/// What a build of the stand-in looks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Variant {
    /// Optimised; finds what the emulation itself reports: barriers, lanes, alignment, garbage that is read.
    Plain,
    /// Address and undefined-behaviour sanitizers: what leaves its array, and vectors that are not aligned.
    Address,
    /// Thread sanitizer with one of its fibers a CUDA thread: races between threads, and between blocks.
    Thread,
}

/// A build that failed, with the compiler's own words.
#[derive(Debug)]
#[non_exhaustive]
pub enum BuildError {
    /// A file could not be read, written or run.
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The compiler or the linker refused.
    Compiler {
        /// What was to be built.
        what: PathBuf,
        /// What the compiler wrote.
        text: String,
    },
}

impl std::fmt::Display for BuildError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            BuildError::Io { path, source } => write!(f, "{}: {source}", path.display()),
            BuildError::Compiler { what, text } => write!(f, "{} does not compile:\n{text}", what.display()),
        }
    }
}

impl std::error::Error for BuildError {}

/// Where things are: the compiler, this package's sources, and a folder for objects.
pub(crate) struct Compiler {
    pub(crate) path: PathBuf,
    pub(crate) package: PathBuf,
    pub(crate) cache: PathBuf,
}

const RUNTIME: [&str; 3] = ["simt/simt.cpp", "simt/fiber.cpp", "simt/collectives.cpp"];
const DRIVER: [&str; 3] = ["driver/device.cpp", "driver/memory.cpp", "driver/stream.cpp"];

impl Compiler {
    /// Builds `libcuda.so.1` (and `libcuda.so`, which is the name that cudarc asks for first) in `folder`.
    pub(crate) fn library(&self, variant: Variant, sources: &[PathBuf], folder: &Path) -> Result<(), BuildError> {
        let _alone = self.lock()?;
        let objects = self.objects(variant, sources, &DRIVER)?;
        for name in ["libcuda.so.1", "libcuda.so"] {
            let shared = ["-shared", "-Wl,-soname,libcuda.so.1"];
            self.link(variant, &objects, &shared, &folder.join(name))?;
        }
        Ok(())
    }

    /// Builds a program of the sources and the emulation, without the driver.
    pub(crate) fn program(&self, variant: Variant, sources: &[PathBuf], path: &Path) -> Result<(), BuildError> {
        let _alone = self.lock()?;
        let objects = self.objects(variant, sources, &[])?;
        self.link(variant, &objects, &[], path)
    }

    /// One build at a time, among threads and processes: several tests may ask for the same one.
    fn lock(&self) -> Result<fs::File, BuildError> {
        let path = self.cache.join("lock");
        let opened = fs::create_dir_all(&self.cache).and_then(|()| fs::File::create(&path));
        let locked = opened.and_then(|file| file.lock().map(|()| file));
        locked.map_err(|source| BuildError::Io { path, source })
    }

    /// Nothing where the same objects were linked before: what others have open is left alone.
    fn link(&self, variant: Variant, objects: &[PathBuf], flags: &[&str], path: &Path) -> Result<(), BuildError> {
        let stamp = path.with_extension("objects");
        let wanted = format!("{objects:?}");
        if path.exists() && fs::read_to_string(&stamp).is_ok_and(|text| text == wanted) {
            return Ok(());
        }
        let folder = path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder).map_err(|source| BuildError::Io { path: folder.to_owned(), source })?;
        let mut command = Command::new(&self.path);
        command.args(flags).args(objects).args(link_flags(variant));
        self.run(command, path)?;
        fs::write(&stamp, wanted).map_err(|source| BuildError::Io { path: stamp, source })
    }

    /// Runs the compiler; what it makes is in place only when it is whole.
    fn run(&self, mut command: Command, path: &Path) -> Result<(), BuildError> {
        let temporary = path.with_extension("part");
        command.arg("-o").arg(&temporary);
        let output = command.output().map_err(|source| BuildError::Io { path: self.path.clone(), source })?;
        check(path, &output)?;
        fs::rename(&temporary, path).map_err(|source| BuildError::Io { path: path.to_owned(), source })
    }

    fn objects(&self, variant: Variant, sources: &[PathBuf], more: &[&str]) -> Result<Vec<PathBuf>, BuildError> {
        let own = RUNTIME.iter().chain(more).map(|name| (self.package.join(name), false));
        let all: Vec<(PathBuf, bool)> = own.chain(sources.iter().map(|path| (path.clone(), true))).collect();
        let headers = self.headers(sources)?;
        let threads = std::thread::available_parallelism().map_or(1, usize::from).clamp(1, 8);
        let next = std::sync::atomic::AtomicUsize::new(0);
        let built: std::sync::Mutex<Vec<Option<Result<PathBuf, BuildError>>>> =
            std::sync::Mutex::new(all.iter().map(|_| None).collect());
        std::thread::scope(|scope| {
            for _ in 0..threads.min(all.len()) {
                scope.spawn(|| {
                    loop {
                        let index = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        let Some((source, is_kernel)) = all.get(index) else { break };
                        let result = self.object(variant, source, *is_kernel, &headers);
                        built.lock().expect("no builder panics")[index] = Some(result);
                    }
                });
            }
        });
        built.into_inner().expect("no builder panics").into_iter().flatten().collect()
    }

    fn object(&self, variant: Variant, source: &Path, is_kernel: bool, headers: &[u8]) -> Result<PathBuf, BuildError> {
        let text = read(source)?;
        let mut flags = self.compile_flags(variant, is_kernel);
        if let Some(folder) = source.parent() {
            flags.push(format!("-I{}", folder.display()));
        }
        let mut hasher = DefaultHasher::new();
        (&flags, &text, headers, &self.path, source).hash(&mut hasher);
        let stem = source.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        let object = self.cache.join(format!("{stem}-{:016x}.o", hasher.finish()));
        if object.exists() {
            return Ok(object);
        }
        let mut compile = Command::new(&self.path);
        compile.args(&flags).args(["-x", "c++", "-c"]).arg(source);
        self.run(compile, &object)?;
        Ok(object)
    }

    fn compile_flags(&self, variant: Variant, is_kernel: bool) -> Vec<String> {
        let mut flags = vec![
            "-std=c++17".into(),
            "-DSIMT_HOST=1".into(),
            format!("-I{}", self.package.join("simt").display()),
            format!("-I{}", self.package.join("../kernels").display()),
            "-fPIC".into(),
            "-fvisibility=hidden".into(),
            "-fno-strict-aliasing".into(),
            // What is contracted on the device is written as fmaf where its bits matter.
            "-ffp-contract=off".into(),
            "-Wall".into(),
            "-Wno-unknown-pragmas".into(),
        ];
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("fma") && std::arch::is_x86_feature_detected!("avx2") {
            // Without it fmaf is a call into the C library: right, and slow.
            flags.extend(["-mavx2".into(), "-mfma".into()]);
        }
        match variant {
            Variant::Plain => flags.push("-O2".into()),
            Variant::Address => {
                flags.extend(["-O1", "-g", "-fsanitize=address,undefined"].map(String::from));
                flags.push("-fno-sanitize-recover=undefined".into());
                if self.is_gcc() {
                    flags.push("-fsanitize-sections=simt_shared".into());
                }
            }
            Variant::Thread => {
                flags.extend(["-O1", "-g", "-DSIMT_TSAN"].map(String::from));
                if is_kernel {
                    flags.push("-fsanitize=thread".into());
                }
            }
        }
        flags
    }

    fn is_gcc(&self) -> bool {
        let output = Command::new(&self.path).arg("--version").output();
        output.is_ok_and(|output| !String::from_utf8_lossy(&output.stdout).contains("clang"))
    }

    /// All headers that a source could include, as one run of bytes.
    fn headers(&self, sources: &[PathBuf]) -> Result<Vec<u8>, BuildError> {
        let mut folders: Vec<PathBuf> =
            ["simt", "driver", "../kernels"].iter().map(|name| self.package.join(name)).collect();
        folders.extend(sources.iter().filter_map(|source| source.parent().map(Path::to_path_buf)));
        folders.sort();
        folders.dedup();
        let mut bytes = Vec::new();
        for folder in folders {
            let Ok(entries) = fs::read_dir(&folder) else { continue };
            let mut paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
            paths.retain(|path| path.extension().is_some_and(|extension| extension == "h" || extension == "cuh"));
            paths.sort();
            for path in paths {
                bytes.extend(read(&path)?);
            }
        }
        Ok(bytes)
    }
}

fn link_flags(variant: Variant) -> &'static [&'static str] {
    match variant {
        Variant::Plain => &[],
        Variant::Address => &["-fsanitize=address,undefined"],
        Variant::Thread => &["-fsanitize=thread"],
    }
}

fn read(path: &Path) -> Result<Vec<u8>, BuildError> {
    fs::read(path).map_err(|source| BuildError::Io { path: path.to_owned(), source })
}

fn check(what: &Path, output: &Output) -> Result<(), BuildError> {
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(BuildError::Compiler { what: what.to_owned(), text })
}
