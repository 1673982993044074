//! `cargo xtask kernels`: builds the kernel image as the crate's build script does, takes it apart, and checks what is in it
//! against `kernels/rules.json`.

mod image;
mod rules;
mod toolkit;

use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;
use std::{env, fs};

use anyhow::{Context, Result, bail};
use clap::Args;

/// How nvcc is found and called: the build script's own file.
#[path = "../../../crates/lora-kernels/build/nvcc.rs"]
mod nvcc;

use toolkit::Toolkit;

/// What `cargo xtask kernels` takes.
#[derive(Args)]
pub(crate) struct KernelsArgs {
    /// Install nvcc and the disassembler from Python packages into target/cuda, unless they are there.
    #[arg(long)]
    fetch: bool,
}

/// Builds and checks the image; prints a report and where the image is.
pub(crate) fn run(args: &KernelsArgs) -> Result<()> {
    let toolkit = if args.fetch { Toolkit::fetch()? } else { Toolkit::find()? };
    println!("nvcc: {}", toolkit.nvcc.display());
    let start = Instant::now();
    let path = build(&toolkit)?;
    let bytes = fs::metadata(&path)?.len();
    println!("built for sm_{:?} in {:.1} s: {bytes} bytes", nvcc::ARCHITECTURES, start.elapsed().as_secs_f32());

    let text = toolkit.disassembly(&path)?;
    let usage = toolkit.resource_usage(&path)?;
    let kernels = image::kernels(&text, &usage)?;
    let rules = rules::Rules::read(&crate::root().join("kernels/rules.json"))?;
    println!("{}", rules::report(&kernels));
    let faults = rules.check(&kernels, &nvcc::ARCHITECTURES);
    if !faults.is_empty() {
        bail!("the image does not keep to kernels/rules.json:\n  {}", faults.join("\n  "));
    }
    println!("{} kernels keep to kernels/rules.json; image: {}", kernels.len(), path.display());
    check_package()
}

/// The crate that embeds the image ships the sources: whoever takes it from a registry builds the same.
fn check_package() -> Result<()> {
    let output = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["package", "--package", "lora-kernels", "--list", "--allow-dirty", "--locked"])
        .current_dir(crate::root())
        .output()
        .context("cargo package could not be run")?;
    if !output.status.success() {
        bail!("cargo package failed:\n{}", String::from_utf8_lossy(&output.stderr));
    }
    let listed = String::from_utf8(output.stdout)?;
    let listed: Vec<&str> = listed.lines().collect();
    let mut wanted = vec!["build.rs".to_owned(), "build/nvcc.rs".to_owned()];
    for entry in fs::read_dir(crate::root().join("kernels"))? {
        wanted.push(format!("kernels/{}", entry?.file_name().to_string_lossy()));
    }
    if let Some(missing) = wanted.iter().find(|name| !listed.contains(&name.as_str())) {
        bail!("the package of lora-kernels has no {missing}");
    }
    println!("the package of lora-kernels ships the sources");
    Ok(())
}

/// The image of all kernels, in target/kernels.
fn build(toolkit: &Toolkit) -> Result<PathBuf> {
    let folder = crate::root().join("target/kernels");
    fs::create_dir_all(&folder).with_context(|| format!("{}", folder.display()))?;
    let sources = nvcc::sources(&crate::root().join("kernels"))?;
    let (unit, image) = (folder.join("kernels.cu"), folder.join("kernels.fatbin"));
    fs::write(&unit, nvcc::unit(&sources))?;
    let output = nvcc::fat_binary(&toolkit.nvcc, &unit, &nvcc::ARCHITECTURES, &image).output();
    let output = output.with_context(|| format!("{} could not be run", toolkit.nvcc.display()))?;
    if !output.status.success() {
        bail!("nvcc ended with {}:\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(image)
}
