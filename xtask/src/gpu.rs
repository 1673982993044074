//! Tests and bench on a real GPU: a folder of programs that carry the kernels, and the script that runs them, so that the
//! machine with the GPU needs neither a toolchain nor a network.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// Runs in the bundle's folder.
const SCRIPT: &str = include_str!("gpu.sh");

/// Makes the bundle in target/gpu.
pub(crate) fn bundle() -> Result<PathBuf> {
    let root = crate::root();
    let folder = root.join("target/gpu");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(folder.join("tests")).with_context(|| format!("{}", folder.display()))?;
    let tests = executables(&["test", "--no-run", "--tests"], "test")?;
    let bench = executables(&["build", "--example", "gpu_bench"], "example")?;
    for (name, path) in &tests {
        fs::copy(path, folder.join("tests").join(name))?;
    }
    let [(name, path)] = &bench[..] else { bail!("{} programs for one bench", bench.len()) };
    fs::copy(path, folder.join(name))?;
    fs::write(folder.join("run.sh"), SCRIPT)?;
    Ok(folder)
}

/// Makes the bundle and runs a part of its script here.
pub(crate) fn run(part: &str) -> Result<()> {
    let folder = bundle()?;
    let status = Command::new("bash").arg(folder.join("run.sh")).arg(part).status().context("bash could not be run")?;
    if !status.success() {
        bail!("{} {part} ended with {status}", folder.join("run.sh").display());
    }
    Ok(())
}

/// Builds the CUDA tests' package and gives names and paths of its programs of a kind. Without kernels in them the build
/// fails.
fn executables(arguments: &[&str], kind: &str) -> Result<Vec<(String, PathBuf)>> {
    let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(arguments)
        .args([
            "--package",
            "conformance-cuda",
            "--profile",
            "bundle",
            "--locked",
            "--message-format",
            "json-render-diagnostics",
        ])
        .env("KERNELS_REQUIRED", "1")
        .current_dir(crate::root())
        .stderr(Stdio::inherit())
        .output()
        .context("cargo could not be run")?;
    if !output.status.success() {
        bail!("cargo {} ended with {}", arguments.join(" "), output.status);
    }
    let mut found = Vec::new();
    for line in String::from_utf8(output.stdout)?.lines() {
        let message: Value = serde_json::from_str(line)?;
        let is_kind = message["target"]["kind"].as_array().is_some_and(|kinds| kinds.iter().any(|k| k == kind));
        if let (true, Some(path), Some(name)) =
            (is_kind, message["executable"].as_str(), message["target"]["name"].as_str())
        {
            found.push((name.to_owned(), PathBuf::from(path)));
        }
    }
    if found.is_empty() {
        bail!("cargo {} made no programs", arguments.join(" "));
    }
    Ok(found)
}
