//! Tasks of the repository: `cargo xtask <task>`. One file a task; this one only dispatches.
//!
//! Nothing here is needed to build or use the crates.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod conformance;
mod demo;
mod deps;
mod fetch;
mod gpu;
mod kernels;
mod tidy;

/// Tasks of the multilora repository.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Ask one question of the base model and of the demo adapters, all in one batch.
    Demo(demo::DemoArgs),
    /// Download the demo's base model into target/demo/models.
    FetchModel,
    /// Build the CUDA kernels for every architecture and check the machine code.
    Kernels(kernels::KernelsArgs),
    /// Put what runs on a machine with a GPU, and needs nothing else there, into target/gpu.
    GpuBundle,
    /// Run the CUDA tests on this machine's GPU, then under compute-sanitizer where it is installed.
    GpuTest,
    /// Time the LoRA launches of decode steps on this machine's GPU.
    GpuBench,
    /// Run the suite of the LoRA operations on every back end of this machine.
    Conformance(conformance::ConformanceArgs),
    /// Check which crate may depend on which.
    Deps,
    /// Check what no compiler checks: heads of files, lengths, words that must not stand in the tree.
    Tidy,
}

fn main() -> ExitCode {
    let result = match Cli::parse().task {
        Task::Demo(args) => demo::run(&args),
        Task::FetchModel => fetch::model(false).map(|path| println!("{}", path.display())),
        Task::Kernels(args) => kernels::run(&args),
        Task::GpuBundle => gpu::bundle().map(|folder| println!("{}", folder.display())),
        Task::GpuTest => gpu::run("test"),
        Task::GpuBench => gpu::run("bench"),
        Task::Conformance(args) => conformance::run(&args),
        Task::Deps => deps::run(),
        Task::Tidy => tidy::run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The root of the repository.
fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the repository").to_path_buf()
}
