#![doc = include_str!("../README.md")]

mod compile;

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use compile::Compiler;
pub use compile::{BuildError, Variant};

/// How a test runs on the stand-in device: which build of it, and with which settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode {
    /// The build.
    pub variant: Variant,
    /// Blocks and threads in an order drawn from this seed; in their own order without one.
    pub seed: Option<u64>,
    /// Blocks of a launch that are unordered for the thread sanitizer, 1 where each comes after the one before.
    pub unordered_blocks: u32,
    /// Streams run at the call, as few devices ever do; without it at the first wait that needs them.
    pub eager: bool,
}

impl Mode {
    /// Streams that run late, blocks and threads in order, no sanitizer.
    pub const PLAIN: Mode = Mode { variant: Variant::Plain, seed: None, unordered_blocks: 1, eager: false };
    /// Address and undefined-behaviour sanitizers.
    pub const ADDRESS: Mode = Mode { variant: Variant::Address, ..Mode::PLAIN };
    /// Thread sanitizer; blocks come one after another.
    pub const THREAD: Mode = Mode { variant: Variant::Thread, ..Mode::PLAIN };
    /// Thread sanitizer; nothing orders four blocks that follow each other. Static shared arrays must be named `*_s`.
    pub const BLOCKS: Mode = Mode { unordered_blocks: 4, ..Mode::THREAD };

    /// Plain, with blocks and threads in an order drawn from a seed.
    pub const fn shuffled(seed: u64) -> Mode {
        Mode { seed: Some(seed), ..Mode::PLAIN }
    }

    /// The environment that the sanitizers and the emulation read.
    pub fn set_up(&self, command: &mut Command) {
        for name in ["SIMT_SEED", "STANDIN_EAGER", "STANDIN_NO_DEVICE", "STANDIN_MEMORY"] {
            command.env_remove(name);
        }
        if let Some(seed) = self.seed {
            command.env("SIMT_SEED", seed.to_string());
        }
        if self.eager {
            command.env("STANDIN_EAGER", "1");
        }
        command.env("SIMT_TSAN_BLOCKS", self.unordered_blocks.to_string());
        // Leaks are the process's own: a driver's globals live until its end.
        command.env("ASAN_OPTIONS", "exitcode=66:detect_leaks=0:detect_stack_use_after_return=0");
        command.env("UBSAN_OPTIONS", "print_stacktrace=1");
        let suppressions = package().join("simt/unordered-blocks.supp");
        let unordered = self.unordered_blocks > 1;
        // Blocks have the same addresses for static shared memory; between unordered ones that is no race.
        let extra = if unordered { format!(":suppressions={}", suppressions.display()) } else { String::new() };
        // A Rust program orders its threads in ways that the sanitizer does not see: only what was built for it counts.
        let options = "exitcode=66:report_thread_leaks=0:ignore_noninstrumented_modules=1";
        command.env("TSAN_OPTIONS", format!("{options}{extra}"));
    }
}

/// The folder with the plain `libcuda.so.1` of the project's kernels, for `LD_LIBRARY_PATH`.
pub fn library_folder() -> PathBuf {
    out().join("plain")
}

/// Builds a library of these `.cu` files in a variant and returns its folder; quick when nothing changed.
///
/// # Errors
///
/// [`BuildError`] with the compiler's words.
pub fn build_library(variant: Variant, name: &str, sources: &[PathBuf]) -> Result<PathBuf, BuildError> {
    let folder = out().join(format!("{name}-{variant:?}"));
    compiler().library(variant, sources, &folder)?;
    Ok(folder)
}

/// Builds a program of these sources and the emulation, without the driver, and returns its path.
///
/// # Errors
///
/// [`BuildError`] with the compiler's words.
pub fn build_program(variant: Variant, name: &str, sources: &[PathBuf]) -> Result<PathBuf, BuildError> {
    let path = out().join(format!("{name}-{variant:?}")).join(name);
    compiler().program(variant, sources, &path)?;
    Ok(path)
}

/// The files of a folder with one of these extensions, in the order of their names.
pub fn sources_in(folder: &Path, extensions: &[&str]) -> Vec<PathBuf> {
    let entries =
        std::fs::read_dir(folder).map(|entries| entries.filter_map(|entry| Some(entry.ok()?.path())).collect());
    let mut found: Vec<PathBuf> = entries.unwrap_or_default();
    found.retain(|path| path.extension().is_some_and(|extension| extensions.iter().any(|wanted| extension == *wanted)));
    found.sort();
    found
}

/// The folder of the project's kernels.
pub fn kernels_folder() -> PathBuf {
    package().join("../kernels")
}

/// A name in the environment of a child that [`on_device`] started.
const INSIDE: &str = "STANDIN_INSIDE";

/// Runs `body` in a child process that has the stand-in as its CUDA driver, once for each mode.
///
/// The child is this test program again, with `test` as its only test (its full name, as `--exact` takes it), so
/// that the loader finds the library before anything of CUDA is called. `sources` are the kernels.
///
/// # Panics
///
/// When the library does not build, or a child fails; its output is in the message.
pub fn on_device(test: &str, library: &str, sources: &[PathBuf], modes: &[Mode], body: impl FnOnce()) {
    if env::var_os(INSIDE).is_some() {
        println!("on the stand-in: {test}");
        return body();
    }
    for mode in modes {
        let (status, text) = child(test, library, sources, *mode);
        assert!(status.success(), "{test} in {mode:?}: {status}\n{text}");
    }
}

/// As [`on_device`] in one mode, for a body that the mode must stop: how the child ended and what it wrote; nothing in
/// the child itself.
///
/// # Panics
///
/// When the library does not build.
pub fn outcome_on_device(
    test: &str,
    library: &str,
    sources: &[PathBuf],
    mode: Mode,
    body: impl FnOnce(),
) -> Option<(ExitStatus, String)> {
    if env::var_os(INSIDE).is_some() {
        println!("on the stand-in: {test}");
        body();
        return None;
    }
    Some(child(test, library, sources, mode))
}

fn child(test: &str, library: &str, sources: &[PathBuf], mode: Mode) -> (ExitStatus, String) {
    let program = env::current_exe().expect("the test program has a path");
    let folder = build_library(mode.variant, library, sources).unwrap_or_else(|error| panic!("{error}"));
    let mut child = Command::new(program);
    child.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(INSIDE, "1");
    child.env("LD_LIBRARY_PATH", &folder);
    mode.set_up(&mut child);
    if let Some(library) = sanitizer_library(mode.variant) {
        child.env("LD_PRELOAD", library);
    }
    let output = child.output().expect("the test program runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    // A name that no test has would run nothing and pass.
    assert!(text.contains(&format!("on the stand-in: {test}")), "no test of this program is called {test}\n{text}");
    (output.status, text)
}

/// The sanitizer's runtime, which must be in the process first when a library and not the program has it.
fn sanitizer_library(variant: Variant) -> Option<PathBuf> {
    let name = match variant {
        Variant::Plain => return None,
        Variant::Address => "libasan.so",
        Variant::Thread => "libtsan.so",
    };
    let output = Command::new(env!("STANDIN_CXX")).arg(format!("-print-file-name={name}")).output().ok()?;
    Some(PathBuf::from(String::from_utf8(output.stdout).ok()?.trim()))
}

fn compiler() -> Compiler {
    Compiler { path: env!("STANDIN_CXX").into(), package: package().to_owned(), cache: out().join("objects") }
}

fn package() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn out() -> &'static Path {
    Path::new(env!("OUT_DIR"))
}
