//! The `multilora` command: argument parsing and dispatch.
//!
//! Bad input ends with exit code 2 and one line on standard error; nothing is written to standard output before the
//! input has been checked.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod cli;

/// Serve many LoRA adapters on one base model, each row of a batch with its own.
#[derive(Parser)]
#[command(name = "multilora", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Answer prompts, all in one batch, each with its own adapter or with the base model.
    Generate(cli::generate::GenerateArgs),
    /// Print the logits of token sequences, all in one mixed batch.
    Score(cli::score::ScoreArgs),
    /// Say what is in an adapter directory and whether it loads.
    Inspect(cli::inspect::InspectArgs),
    /// Write an adapter that needs the base weights (PiSSA, OLoRA, KaSA) as a plain one.
    Convert(cli::convert::ConvertArgs),
    /// Say how many bytes a pool of slots takes on a model.
    Plan(cli::plan::PlanArgs),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_env("MULTILORA_LOG"))
        .with_writer(std::io::stderr)
        .init();
    let result = match &cli.command {
        Command::Generate(args) => cli::generate::run(args),
        Command::Score(args) => cli::score::run(args),
        Command::Inspect(args) => cli::inspect::run(args),
        Command::Convert(args) => cli::convert::run(args),
        Command::Plan(args) => cli::plan::run(args),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            // A reader that went away (`multilora ... | head`) is no fault of the input.
            let broken_pipe = error
                .chain()
                .filter_map(|cause| cause.downcast_ref::<std::io::Error>())
                .any(|cause| cause.kind() == std::io::ErrorKind::BrokenPipe);
            if broken_pipe {
                return ExitCode::SUCCESS;
            }
            eprintln!("error: {}", cli::one_line(&error));
            ExitCode::from(2)
        }
    }
}
