//! `multilora convert`: an adapter whose training changed the base weights first, as a plain one that loads at once anywhere.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;

use multilora::adapter::{PrepareOptions, WriteError, prepare_with, write_plain};
use multilora::engine::checkpoint::CheckpointInfo;

use super::adapters;
use super::setup::{WeightDtypeArg, load_model, loading_refused, refused};

/// Options of `multilora convert`.
#[derive(Args)]
pub(crate) struct ConvertArgs {
    /// Directory or GGUF file of the base model that the adapter was trained on, best in the precision of its training.
    #[arg(long, value_name = "PATH")]
    model: PathBuf,
    /// The adapter's directory, or its GGUF file.
    #[arg(long, value_name = "DIR")]
    adapter: PathBuf,
    /// Where the plain adapter is written; nothing may stand there yet.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Precision of the base model's matrices; the file's own unless given.
    #[arg(long, value_enum)]
    weight_dtype: Option<WeightDtypeArg>,
}

/// Converts and says what was written.
pub(crate) fn run(args: &ConvertArgs) -> Result<ExitCode> {
    let from = || format!("adapter from {}", args.adapter.display());
    if args.out.symlink_metadata().is_ok() {
        return Err(WriteError::Exists { path: args.out.clone() }.into());
    }
    let info = CheckpointInfo::open(&args.model)?;
    let adapter = adapters::open(&args.adapter)
        .and_then(|adapter| adapters::for_model(adapter, &info.config))
        .map_err(|error| loading_refused(&error, &args.adapter))
        .with_context(from)?;
    for note in adapter.notes() {
        eprintln!("note: {note}");
    }
    let (model, _) = load_model(&args.model, args.weight_dtype.map(Into::into))?;
    let begin = Instant::now();
    // Whoever converts has asked for the time that it takes.
    let options = PrepareOptions { max_decomposition: Duration::MAX };
    let prepared = prepare_with(adapter, &model, &options)
        .map_err(|refusal| refused(&refusal, &args.adapter))
        .with_context(from)?;
    let seconds = begin.elapsed().as_secs_f64();
    write_plain(&prepared, &args.out)?;
    let mut out = std::io::stdout().lock();
    let (num_pairs, max_rank) = (prepared.pairs().len(), prepared.max_rank());
    let path = args.out.display();
    writeln!(out, "{path}: {num_pairs} pairs, largest rank {max_rank}, prepared in {seconds:.1} s")?;
    Ok(ExitCode::SUCCESS)
}
