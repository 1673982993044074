//! Builds the CUDA kernel image where the feature `cuda` asks for it; else does nothing.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs};

#[path = "build/nvcc.rs"]
mod nvcc;

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=build/nvcc.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return ExitCode::SUCCESS;
    }
    for variable in ["NVCC", "CUDA_HOME", "CUDA_PATH", "PATH", "KERNELS_FATBIN", "KERNELS_REQUIRED"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    match image() {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            println!("cargo::error={why}");
            ExitCode::FAILURE
        }
    }
}

/// Writes `kernels.fatbin`: a ready one, or nvcc's, or an empty file, which is an error when it is used.
fn image() -> Result<(), String> {
    let folder = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    let image = folder.join("kernels.fatbin");
    if let Some(ready) = env::var_os("KERNELS_FATBIN").filter(|path| !path.is_empty()) {
        let ready = Path::new(&ready);
        println!("cargo::rerun-if-changed={}", ready.display());
        let bytes = fs::read(ready).map_err(|error| format!("KERNELS_FATBIN={}: {error}", ready.display()))?;
        if bytes.is_empty() {
            return Err(format!("KERNELS_FATBIN={} is empty", ready.display()));
        }
        return fs::write(&image, bytes).map_err(|error| format!("{}: {error}", image.display()));
    }
    // A file that is added changes the folder, one that is edited itself.
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    println!("cargo::rerun-if-changed={}", kernels.display());
    for entry in fs::read_dir(&kernels).into_iter().flatten().flatten() {
        println!("cargo::rerun-if-changed={}", entry.path().display());
    }
    let Some(nvcc) = nvcc::find() else {
        let ways = "set NVCC or CUDA_HOME, or KERNELS_FATBIN to a ready image";
        if env::var_os("KERNELS_REQUIRED").is_some_and(|value| value == "1") {
            return Err(format!("KERNELS_REQUIRED=1, and there is no nvcc: {ways}"));
        }
        println!("cargo::warning=no nvcc: this build has no CUDA kernels and says so when they are loaded; {ways}");
        return fs::write(&image, []).map_err(|error| format!("{}: {error}", image.display()));
    };
    let sources = nvcc::sources(&kernels).map_err(|error| format!("{}: {error}", kernels.display()))?;
    let unit = folder.join("kernels.cu");
    fs::write(&unit, nvcc::unit(&sources)).map_err(|error| format!("{}: {error}", unit.display()))?;
    let output = nvcc::fat_binary(&nvcc, &unit, &nvcc::ARCHITECTURES, &image).output();
    let output = output.map_err(|error| format!("{}: {error}", nvcc.display()))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr).replace('\n', " | ");
        return Err(format!("{} ended with {}: {text}", nvcc.display(), output.status));
    }
    Ok(())
}
