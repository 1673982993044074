//! Decode speed of a model, base rows beside rows of several adapters, and its share of the memory's read bandwidth.
//!
//! ```text
//! cargo run --release -p model-engine --example decode_speed -- MODEL f32|bf16 [ADAPTER_DIR]...
//! ```
//!
//! The cases take turns, one step each, so that whatever else the machine does falls on all of them alike; a sum over a
//! large buffer, on the same threads, takes its turn too and gives the bandwidth. Figures are medians over the turns.

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use lora_adapter::{Adapter, PrepareOptions, PreparedAdapter, prepare_with};
use lora_math::AdapterSelection;
use lora_pool::{LoraPool, PoolOptions};
use model_engine::checkpoint::{Checkpoint, LoadOptions, WeightDtype};
use model_engine::{Engine, EngineOptions, LogitsFor, SequenceId, StepInput, TransformerModel};
use rayon::prelude::*;

const PROMPT_TOKENS: usize = 64;
const TURNS: u32 = 64;
/// Far above every cache.
const PROBE_BYTES: usize = 1 << 30;

struct Case {
    name: String,
    sequences: Vec<SequenceId>,
    /// Bytes of A and B that one step reads.
    adapter_bytes: usize,
    seconds: Vec<f64>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(path), Some(dtype)) = (arguments.next(), arguments.next()) else {
        return Err("usage: decode_speed MODEL f32|bf16 [ADAPTER_DIR]...".into());
    };
    let weight_dtype = Some(if dtype == "bf16" { WeightDtype::Bf16 } else { WeightDtype::F32 });
    let checkpoint = Checkpoint::open(Path::new(&path), LoadOptions { weight_dtype, ..LoadOptions::default() })?;
    let model = TransformerModel::new(checkpoint.config, checkpoint.weights)?;
    let weight_bytes = model.weight_bytes();

    let adapters: Vec<PreparedAdapter> = arguments
        .map(|directory| Ok(prepare_with(Adapter::open(Path::new(&directory))?, &model, &PrepareOptions::default())?))
        .collect::<Result<_, Box<dyn Error>>>()?;
    let options = PoolOptions { num_slots: adapters.len().max(1), max_rank: 1, ..PoolOptions::default() };
    let options = options.covering(&adapters);
    let element_bytes = options.dtype.bytes();
    let pool = LoraPool::open(model.shape(), options)?;
    for (index, adapter) in adapters.iter().enumerate() {
        pool.load(&index.to_string(), adapter)?;
    }
    let mut engine = Engine::new(model, Some(pool), &EngineOptions::default())?;

    let mut cases = Vec::new();
    for (batch, num_adapters) in [(1, 0), (1, 1), (8, 0), (8, adapters.len())] {
        if num_adapters > adapters.len() {
            continue;
        }
        let select = |row: usize| match num_adapters {
            0 => AdapterSelection::Base,
            count => AdapterSelection::Named((row % count).to_string()),
        };
        let sequences: Vec<SequenceId> =
            (0..batch).map(|row| engine.add_sequence(&select(row))).collect::<Result<_, _>>()?;
        let parameters = |adapter: &PreparedAdapter| -> usize {
            adapter.pairs().map(|(_, pair)| pair.a().num_elements() + pair.b().num_elements()).sum()
        };
        let adapter_bytes = adapters.iter().take(num_adapters).map(parameters).sum::<usize>() * element_bytes;
        let prompt: Vec<u32> = (0..PROMPT_TOKENS as u32).map(|index| 100 + index * 7).collect();
        step(&mut engine, &sequences, &prompt)?;
        let name = format!("batch {batch}, {num_adapters} adapters");
        cases.push(Case { name, sequences, adapter_bytes, seconds: Vec::new() });
    }

    let probe = vec![1u64; PROBE_BYTES / 8];
    let threads = rayon::ThreadPoolBuilder::new().num_threads(engine.num_threads()).build()?;
    let mut probe_seconds = Vec::new();
    for turn in 0..TURNS {
        for case in &mut cases {
            case.seconds.push(step(&mut engine, &case.sequences, &[50 + turn * 31 % 4000])?);
        }
        let start = Instant::now();
        let sum: u64 = threads.install(|| probe.par_chunks(1 << 16).map(|part| part.iter().sum::<u64>()).sum());
        probe_seconds.push(start.elapsed().as_secs_f64());
        assert_eq!(sum, probe.len() as u64);
    }

    let bandwidth = PROBE_BYTES as f64 / median(&mut probe_seconds);
    println!("{} threads, read bandwidth {:.1} GB/s", engine.num_threads(), bandwidth / 1e9);
    println!("weights {dtype}, {:.0} MB", weight_bytes as f64 / 1e6);
    for case in &mut cases {
        let seconds = median(&mut case.seconds);
        let read = (weight_bytes + case.adapter_bytes) as f64 / seconds;
        println!(
            "{:<22} step {:6.2} ms, {:6.1} tokens/s, weights and adapters read at {:5.1} GB/s = {:3.0} % of bandwidth",
            case.name,
            1e3 * seconds,
            case.sequences.len() as f64 / seconds,
            read / 1e9,
            100.0 * read / bandwidth
        );
    }
    Ok(())
}

/// Feeds the same tokens to every sequence and gives the seconds that it took.
fn step(engine: &mut Engine, sequences: &[SequenceId], token_ids: &[u32]) -> Result<f64, Box<dyn Error>> {
    let input = |&sequence| StepInput { sequence, token_ids, logits: LogitsFor::Last };
    let inputs: Vec<StepInput<'_>> = sequences.iter().map(input).collect();
    let start = Instant::now();
    engine.step(&inputs)?;
    Ok(start.elapsed().as_secs_f64())
}

fn median(seconds: &mut [f64]) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}
