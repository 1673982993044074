//! What loads add to the steps of a running decode: eight rows on the base model, in windows with loads and without, in turns.
//!
//! ```text
//! cargo run --release -p model-engine --example load_stall -- MODEL ADAPTER_DIR...
//! ```
//!
//! In a window with loads a loader brings the adapters one after the other into a pool of one slot, so that each drives out
//! the one before; from their files, or from the host tier. Each pair of windows gives a ratio of their medians.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use lora_adapter::{Adapter, PrepareOptions, PreparedAdapter, prepare};
use lora_math::{AdapterSelection, ModelShape};
use lora_pool::{AdapterSource, HostMemory, HostStream, Loader, LoaderOptions, LoraPool, PoolOptions, SourceError};
use model_engine::checkpoint::{Checkpoint, LoadOptions, WeightDtype};
use model_engine::{Engine, EngineOptions, LogitsFor, SequenceId, StepInput, TransformerModel};

const ROWS: usize = 8;
const PAIRS: usize = 20;
const STEPS: usize = 12;

/// Directories by their number.
struct Directories(Vec<PathBuf>, ModelShape);

impl AdapterSource for Directories {
    fn load(&self, name: &str) -> Result<PreparedAdapter, SourceError> {
        let number: usize = name.parse()?;
        Ok(prepare(Adapter::open(&self.0[number])?, &self.1)?)
    }

    fn num_bytes(&self, _name: &str) -> usize {
        1
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("usage: load_stall MODEL ADAPTER_DIR...")?;
    let directories: Vec<PathBuf> = arguments.map(PathBuf::from).collect();
    if directories.len() < 2 {
        return Err("two adapters at least: one slot, and each drives out another".into());
    }
    let model = load(&path)?;
    let shape = model.shape().clone();
    let known: Vec<PreparedAdapter> = directories
        .iter()
        .map(|directory| Ok(lora_adapter::prepare_with(Adapter::open(directory)?, &model, &PrepareOptions::default())?))
        .collect::<Result<_, Box<dyn Error>>>()?;

    for (host_bytes, what) in [(0, "files"), (1 << 30, "host tier")] {
        let options = PoolOptions { num_slots: 1, max_rank: 1, host_bytes, ..PoolOptions::default() }.covering(&known);
        let pool = LoraPool::open(&shape, options)?;
        let source = Arc::new(Directories(directories.clone(), shape.clone()));
        let loader = Loader::new(pool.clone(), source, LoaderOptions { num_threads: 1, ..LoaderOptions::default() })?;
        let mut engine = Engine::new(load(&path)?, Some(pool), &EngineOptions::default())?;
        let sequences: Vec<SequenceId> =
            (0..ROWS).map(|_| engine.add_sequence(&AdapterSelection::Base)).collect::<Result<_, _>>()?;
        step(&mut engine, &sequences, &[100; 32])?;

        let (mut quiet, mut busy, mut ratios, mut loads) = (Vec::new(), Vec::new(), Vec::new(), 0);
        let mut next = 0;
        for _ in 0..PAIRS {
            let mut without = window(&mut engine, &sequences, None, &mut next, &mut 0)?;
            let names = Some((&loader, directories.len()));
            let mut with = window(&mut engine, &sequences, names, &mut next, &mut loads)?;
            ratios.push(quantile(&mut with, 0.5) / quantile(&mut without, 0.5));
            quiet.append(&mut without);
            busy.append(&mut with);
        }
        let [low, middle, high] = [0.25, 0.5, 0.75].map(|share| quantile(&mut ratios, share));
        println!("loads from {what}: {loads} in {PAIRS} windows of {STEPS} steps, {ROWS} rows");
        for (name, times) in [("without", &mut quiet), ("with", &mut busy)] {
            let [p50, p99] = [0.5, 0.99].map(|share| 1e3 * quantile(times, share));
            println!("  steps {name:<8} p50 {p50:.1} ms, p99 {p99:.1} ms");
        }
        println!("  median with over median without: {middle:.3} ({low:.3} to {high:.3})");
    }
    Ok(())
}

fn load(path: &str) -> Result<TransformerModel, Box<dyn Error>> {
    let options = LoadOptions { weight_dtype: Some(WeightDtype::Bf16), ..LoadOptions::default() };
    let checkpoint = Checkpoint::open(Path::new(path), options)?;
    Ok(TransformerModel::new(checkpoint.config, checkpoint.weights)?)
}

/// The times of some steps; with a loader, while it always has one load to do.
fn window(
    engine: &mut Engine,
    sequences: &[SequenceId],
    loader: Option<(&Loader<HostMemory>, usize)>,
    next: &mut usize,
    loads: &mut usize,
) -> Result<Vec<f64>, Box<dyn Error>> {
    let mut times = Vec::new();
    for _ in 0..STEPS {
        let start = Instant::now();
        if let Some((loader, names)) = loader {
            for loaded in loader.publish_arrived(&HostStream) {
                loaded.result?;
                *loads += 1;
            }
            if loader.num_under_way() == 0 {
                loader.prefetch(&(*next % names).to_string());
                *next += 1;
            }
        }
        step(engine, sequences, &[7])?;
        times.push(start.elapsed().as_secs_f64());
    }
    // The next window starts without a load under way.
    if let Some((loader, _)) = loader {
        while loader.num_under_way() > 0 {
            loader.wait(std::time::Duration::from_secs(1));
            for loaded in loader.publish_arrived(&HostStream) {
                loaded.result?;
            }
        }
    }
    Ok(times)
}

fn step(engine: &mut Engine, sequences: &[SequenceId], token_ids: &[u32]) -> Result<(), Box<dyn Error>> {
    let inputs: Vec<StepInput<'_>> =
        sequences.iter().map(|&sequence| StepInput { sequence, token_ids, logits: LogitsFor::Last }).collect();
    engine.step(&inputs)?;
    Ok(())
}

fn quantile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * share).round() as usize]
}
