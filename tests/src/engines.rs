//! Engines over golden models and adapters.

use std::num::NonZero;
use std::path::Path;
use std::sync::Arc;

use lora_adapter::{Adapter, PrepareOptions, PreparedAdapter, prepare_with};
use lora_kernels::{Cpu, LoraKernels, Reference};
use lora_math::{AdapterSelection, ModelShape, SlotDtype};
use lora_pool::{LoraPool, PoolOptions};
use model_engine::checkpoint::{Checkpoint, LoadOptions};
use model_engine::{Engine, EngineOptions, LogitsFor, SequenceId, StepInput, TransformerModel};

use crate::golden::{adapter_dir, golden_dir, model_dir};

/// The back ends that apply adapters, by name.
#[must_use]
pub fn back_ends() -> [(&'static str, Arc<dyn LoraKernels>); 2] {
    [("reference", Arc::new(Reference)), ("cpu", Arc::new(Cpu::new()))]
}

/// The model at `path`, in the precision of its file.
#[must_use]
pub fn load_model(path: &Path) -> TransformerModel {
    let checkpoint =
        Checkpoint::open(path, LoadOptions::default()).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    TransformerModel::new(checkpoint.config, checkpoint.weights).expect("weights of the model's sizes")
}

/// A golden adapter prepared with the weights of its model, or the text of what refused it.
pub fn load_prepared(kind: &str, case: &str, model: &TransformerModel) -> Result<PreparedAdapter, String> {
    prepared_in(&adapter_dir(kind, case), model)
}

fn prepared_in(directory: &Path, model: &TransformerModel) -> Result<PreparedAdapter, String> {
    let adapter = Adapter::open(directory).map_err(|error| error.to_string())?;
    prepare_with(adapter, model, &PrepareOptions::default()).map_err(|error| error.to_string())
}

/// A golden adapter for a model of this shape, or the text of what refused it.
pub fn load_adapter(kind: &str, case: &str, shape: &ModelShape) -> Result<PreparedAdapter, String> {
    let adapter = Adapter::open(&adapter_dir(kind, case)).map_err(|error| error.to_string())?;
    lora_adapter::prepare(adapter, shape).map_err(|error| error.to_string())
}

/// Options of a small engine on this many threads.
#[must_use]
pub fn small_options(num_threads: usize, kernels: Arc<dyn LoraKernels>) -> EngineOptions {
    EngineOptions {
        threads: NonZero::new(num_threads),
        max_step_rows: 512,
        kv_tokens: 1024,
        max_context: None,
        kernels,
    }
}

/// A pool with a slot for each of these adapters, in f32.
#[must_use]
pub fn open_pool(shape: &ModelShape, adapters: &[(String, PreparedAdapter)]) -> Arc<LoraPool> {
    let options =
        PoolOptions { num_slots: adapters.len().max(1), max_rank: 16, dtype: SlotDtype::F32, ..PoolOptions::default() };
    let options = options.covering(adapters.iter().map(|(_, adapter)| adapter));
    let pool = LoraPool::open(shape, options).expect("a pool");
    for (name, adapter) in adapters {
        pool.load(name, adapter).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    pool
}

/// An engine over a golden model and these of its adapters.
#[must_use]
pub fn golden_engine(kind: &str, cases: &[&str], options: &EngineOptions) -> Engine {
    directory_engine(kind, &golden_dir().join("adapters").join(kind), cases, options)
}

/// An engine over a golden model and the adapters in these folders of a directory.
#[must_use]
pub fn directory_engine(kind: &str, directory: &Path, cases: &[&str], options: &EngineOptions) -> Engine {
    let model = load_model(&model_dir(kind));
    let adapters: Vec<(String, PreparedAdapter)> = cases
        .iter()
        .map(|case| {
            let adapter = prepared_in(&directory.join(case), &model);
            ((*case).to_owned(), adapter.unwrap_or_else(|error| panic!("{kind} {case}: {error}")))
        })
        .collect();
    let pool = (!adapters.is_empty()).then(|| open_pool(model.shape(), &adapters));
    Engine::new(model, pool, options).expect("an engine")
}

/// The adapter with this name.
#[must_use]
pub fn named(name: &str) -> AdapterSelection {
    AdapterSelection::Named(name.to_owned())
}

/// Runs tokens of one sequence in chunks of `chunk` tokens; the logits of every position.
pub fn run_in_chunks(engine: &mut Engine, sequence: SequenceId, token_ids: &[u32], chunk: usize) -> Vec<Vec<f32>> {
    let mut logits = Vec::new();
    for token_ids in token_ids.chunks(chunk) {
        let input = StepInput { sequence, token_ids, logits: LogitsFor::All };
        let output = engine.step(&[input]).expect("a step");
        logits.extend(output.logits(0).rows().map(<[f32]>::to_vec));
    }
    logits
}

/// The bits of logits, for comparisons that must be exact.
#[must_use]
pub fn bits(logits: &[Vec<f32>]) -> Vec<Vec<u32>> {
    logits.iter().map(|row| row.iter().map(|logit| logit.to_bits()).collect()).collect()
}
