//! `cargo xtask conformance`: the suite of `tests/src/kernels` on this processor's back ends and on the stand-in device.

use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::Args;

/// What `cargo xtask conformance` takes.
#[derive(Args)]
pub(crate) struct ConformanceArgs {
    /// The whole grid of sizes in place of its pairwise cover: hours.
    #[arg(long)]
    full: bool,
    /// With --full one case in so many.
    #[arg(long, default_value_t = 1, requires = "full", value_parser = clap::value_parser!(u32).range(1..))]
    stride: u32,
}

/// Runs it, with optimisation.
pub(crate) fn run(args: &ConformanceArgs) -> Result<()> {
    for package in ["conformance", "conformance-cuda"] {
        let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command.args(["test", "--release", "--locked", "--package", package, "--test", "kernels", "--"]);
        if args.full {
            command.args(["--exact", "operations_match_the_oracle"]).env("CONFORMANCE_STRIDE", args.stride.to_string());
        }
        // A device that the environment names would take the place of the stand-in.
        command.env_remove("MULTILORA_CUDA_DEVICE");
        let status = command.current_dir(crate::root()).status().context("cargo could not be run")?;
        if !status.success() {
            bail!("{package} ended with {status}");
        }
    }
    Ok(())
}
