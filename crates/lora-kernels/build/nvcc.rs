//! How nvcc makes the kernel image: where it is looked for, for which devices and with which flags it compiles. Shared by
//! `build.rs` and the repository's task that checks the images, so that both make the same.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

/// Compute capabilities that the image has machine code for: A100; RTX 30; RTX 40 and L40S; H100 and H200; B200; RTX 50;
/// GB10. Other devices take the PTX of the first, which has all that the kernels use.
pub(crate) const ARCHITECTURES: [u32; 7] = [80, 86, 89, 90, 100, 120, 121];

/// Flags of every compilation. A spill is an error: these kernels are made to fit their registers.
pub(crate) const FLAGS: [&str; 8] =
    ["-std=c++17", "-O3", "-Xptxas", "--warn-on-spills,-Werror", "-Xfatbin", "-compress-all", "--threads", "0"];

/// nvcc, where the environment or the usual places have it: NVCC, then `bin/nvcc` of CUDA_HOME and CUDA_PATH, then PATH,
/// then /usr/local/cuda. Never a symlink: nvcc finds its parts from the path by which it was called.
pub(crate) fn find() -> Option<PathBuf> {
    let program = if cfg!(windows) { "nvcc.exe" } else { "nvcc" };
    if let Some(path) = env::var_os("NVCC").filter(|path| !path.is_empty()) {
        return Some(PathBuf::from(path));
    }
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env::var_os).map(|home| Path::new(&home).join("bin"));
    let path = env::var_os("PATH").unwrap_or_default();
    let path: Vec<PathBuf> = env::split_paths(&path).collect();
    let usual = [PathBuf::from("/usr/local/cuda/bin")];
    let found = homes.chain(path).chain(usual).map(|folder| folder.join(program)).find(|path| path.is_file())?;
    Some(fs::canonicalize(&found).unwrap_or(found))
}

/// The `.cu` files of a folder, in the order of their names.
pub(crate) fn sources(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "cu") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// A source that is all of the sources: the driver loads one image at a time, and nvcc makes one of one source.
pub(crate) fn unit(sources: &[PathBuf]) -> String {
    sources.iter().map(|source| format!("#include \"{}\"\n", source.display())).collect()
}

/// The command that compiles a source into a fat binary with machine code for `architectures` and the PTX of the first.
pub(crate) fn fat_binary(nvcc: &Path, source: &Path, architectures: &[u32], out: &Path) -> Command {
    let mut command = Command::new(nvcc);
    command.args(FLAGS);
    for architecture in architectures {
        command.arg("-gencode").arg(format!("arch=compute_{architecture},code=sm_{architecture}"));
    }
    if let Some(first) = architectures.first() {
        command.arg("-gencode").arg(format!("arch=compute_{first},code=compute_{first}"));
    }
    command.arg("-fatbin").arg(source).arg("-o").arg(out);
    command
}
