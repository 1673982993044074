//! Builds the plain stand-in library from the emulation, the driver and the project's kernels.
//! The sanitizers' variants are built when a test asks for one (`src/compile.rs`), not here.

use std::path::{Path, PathBuf};
use std::{env, fs};

// Public as the library's own module is.
#[allow(unreachable_pub, dead_code)]
#[path = "src/compile.rs"]
mod compile;

use compile::{Compiler, Variant};

fn main() {
    let package = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    for folder in ["simt", "driver", "checks", "faults", "src/compile.rs"] {
        println!("cargo::rerun-if-changed={}", package.join(folder).display());
    }
    let kernels = package.join("../kernels");
    println!("cargo::rerun-if-changed={}", kernels.display());

    let tool = cc::Build::new().cpp(true).get_compiler();
    let path = tool.path().to_owned();
    println!("cargo::rustc-env=STANDIN_CXX={}", path.display());
    let compiler = Compiler { path, package, cache: out.join("objects") };
    let library = out.join("plain");
    if let Err(error) = compiler.library(Variant::Plain, &sources(&kernels), &library) {
        println!("cargo::error={}", error.to_string().replace('\n', "\ncargo::error="));
    }
}

/// The `.cu` files of a folder, in the order of their names.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).map(|entries| entries.filter_map(|entry| Some(entry.ok()?.path())).collect());
    let mut found: Vec<PathBuf> = entries.unwrap_or_default();
    found.retain(|path| path.extension().is_some_and(|extension| extension == "cu"));
    found.sort();
    found
}
