//! From the command line to an engine: the base model, its pool of adapters, and what both must agree on.
//!
//! Everything small is checked before anything large is read: adapters are opened and compared with the model's shape
//! before its weights are loaded. What needs the weights is prepared with them.

use std::collections::BTreeSet;
use std::io::{IsTerminal, Write};
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, ValueEnum};

use multilora::adapter::{
    Adapter, LoadError, Misfit, PrepareOptions, PreparedAdapter, Refusal, exact_slot_dtype, prepare, prepare_with,
};
use multilora::engine::checkpoint::{Checkpoint, CheckpointInfo, LoadOptions, WeightDtype};
use multilora::engine::model::config_shape;
use multilora::engine::tokenizer::{Tokenizer, TokenizerError};
use multilora::engine::{Engine, EngineOptions, TransformerModel};
use multilora::math::{AdapterSelection, SlotDtype};
use multilora::pool::{LoraPool, PoolOptions};

use super::adapters;

/// The word that selects the base model; no adapter may be called so.
pub(crate) const BASE: &str = "base";

/// Options of every command that runs a model.
#[derive(Args)]
pub(crate) struct EngineArgs {
    /// Directory or GGUF file of the base model.
    #[arg(long, value_name = "PATH")]
    pub(crate) model: PathBuf,
    /// An adapter directory or GGUF file, under the name by which it is used. May be given several times.
    #[arg(long = "adapter", value_name = "NAME=DIR")]
    adapters: Vec<NamedAdapter>,
    /// Threads of the engine; all cores unless given.
    #[arg(long, value_name = "N")]
    threads: Option<NonZero<usize>>,
    /// Precision of the base model's matrices; the file's own unless given.
    #[arg(long, value_enum)]
    weight_dtype: Option<WeightDtypeArg>,
    /// Element type of A and B in the pool; the narrowest that holds every adapter exactly unless given.
    #[arg(long, value_enum)]
    slot_dtype: Option<SlotDtypeArg>,
    #[command(flatten)]
    preparing: PrepareArgs,
}

/// How much preparing an adapter may take.
#[derive(Args)]
pub(crate) struct PrepareArgs {
    /// Seconds that decompositions of base weights may take, by estimate, where an adapter needs them (PiSSA, KaSA).
    #[arg(long, value_name = "N", default_value_t = 30)]
    max_prepare_seconds: u64,
}

impl PrepareArgs {
    pub(crate) fn options(&self) -> PrepareOptions {
        PrepareOptions { max_decomposition: Duration::from_secs(self.max_prepare_seconds) }
    }
}

/// `NAME=DIR`.
#[derive(Clone, Debug)]
struct NamedAdapter {
    name: String,
    directory: PathBuf,
}

impl FromStr for NamedAdapter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, directory) = text.split_once('=').ok_or("expected NAME=DIR")?;
        if name.is_empty() || directory.is_empty() {
            return Err("expected NAME=DIR, neither empty".to_owned());
        }
        if name == BASE {
            return Err(format!("{BASE:?} is the base model; call the adapter something else"));
        }
        Ok(NamedAdapter { name: name.to_owned(), directory: directory.into() })
    }
}

/// [`WeightDtype`] on the command line.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum WeightDtypeArg {
    F32,
    Bf16,
}

impl From<WeightDtypeArg> for WeightDtype {
    fn from(dtype: WeightDtypeArg) -> Self {
        match dtype {
            WeightDtypeArg::F32 => WeightDtype::F32,
            WeightDtypeArg::Bf16 => WeightDtype::Bf16,
        }
    }
}

/// [`SlotDtype`] on the command line.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum SlotDtypeArg {
    F32,
    F16,
    Bf16,
}

impl From<SlotDtypeArg> for SlotDtype {
    fn from(dtype: SlotDtypeArg) -> Self {
        match dtype {
            SlotDtypeArg::F32 => SlotDtype::F32,
            SlotDtypeArg::F16 => SlotDtype::F16,
            SlotDtypeArg::Bf16 => SlotDtype::Bf16,
        }
    }
}

/// How large an engine the requests need.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EngineSize {
    /// Positions that the KV cache holds.
    pub(crate) kv_tokens: usize,
    /// The most sequences of one step.
    pub(crate) num_sequences: usize,
}

/// Token rows of one step unless more sequences than that run at once.
const STEP_ROWS: usize = 512;

/// The adapters of a command, compared with its model, before the model's weights are read.
pub(crate) struct Opened<'a> {
    args: &'a EngineArgs,
    adapters: Vec<(&'a NamedAdapter, Adapter)>,
}

impl EngineArgs {
    /// Opens every adapter and compares it with the model's shape.
    pub(crate) fn open(&self) -> Result<Opened<'_>> {
        #[cfg(feature = "cuda")]
        super::device::tell();
        let info = CheckpointInfo::open(&self.model)?;
        let shape = config_shape(&info.config)?;
        let mut names = BTreeSet::new();
        let mut adapters = Vec::new();
        for named in &self.adapters {
            let NamedAdapter { name, directory } = named;
            if !names.insert(name.as_str()) {
                bail!("two adapters are called {name:?}");
            }
            let adapter = adapters::open(directory)
                .and_then(|adapter| adapters::for_model(adapter, &info.config))
                .map_err(|error| loading_refused(&error, directory))
                .with_context(|| named.context())?;
            for note in adapter.notes() {
                eprintln!("note: adapter {name:?}: {note}");
            }
            let refusal = prepare(adapter.clone(), &shape).err().and_then(beyond_weights);
            if let Some(refusal) = refusal {
                return Err(refused(&refusal, directory)).with_context(|| named.context());
            }
            adapters.push((named, adapter));
        }
        Ok(Opened { args: self, adapters })
    }
}

impl NamedAdapter {
    fn context(&self) -> String {
        format!("adapter {:?} from {}", self.name, self.directory.display())
    }
}

/// What a refusal says beside that the base weights are needed; none where they are all that is missing.
pub(crate) fn beyond_weights(refusal: Refusal) -> Option<Refusal> {
    let needs_weights =
        |reason: &Misfit| matches!(reason, Misfit::NeedsBase { .. } | Misfit::NeedsInit { .. } | Misfit::NeedsTying);
    let reasons: Vec<Misfit> = refusal.reasons.into_iter().filter(|reason| !needs_weights(reason)).collect();
    (!reasons.is_empty()).then_some(Refusal { reasons })
}

/// The first reason for which an adapter's files are refused.
pub(crate) fn loading_refused(error: &LoadError, path: &Path) -> anyhow::Error {
    let reasons: Vec<String> = error.located().iter().map(ToString::to_string).collect();
    brief(&reasons, error.num_omitted(), path)
}

/// The first reason for which an adapter does not fit its model.
pub(crate) fn refused(refusal: &Refusal, directory: &Path) -> anyhow::Error {
    let reasons: Vec<String> = refusal.reasons.iter().map(ToString::to_string).collect();
    brief(&reasons, 0, directory)
}

impl Opened<'_> {
    /// What a name on the command line or in a request selects.
    pub(crate) fn selection(&self, name: &str) -> Result<AdapterSelection> {
        if name == BASE {
            return Ok(AdapterSelection::Base);
        }
        if self.adapters.iter().any(|(known, _)| known.name == name) {
            return Ok(AdapterSelection::Named(name.to_owned()));
        }
        let known: Vec<&str> =
            std::iter::once(BASE).chain(self.adapters.iter().map(|(named, _)| named.name.as_str())).collect();
        bail!("no adapter is called {name:?}; there are {}", known.join(", "))
    }

    /// Reads the model.
    pub(crate) fn load_model(&self) -> Result<(TransformerModel, Result<Tokenizer, TokenizerError>)> {
        load_model(&self.args.model, self.args.weight_dtype.map(WeightDtype::from))
    }

    /// Prepares every adapter with the model's weights, opens a pool in which all of them are resident, and an engine
    /// on it.
    pub(crate) fn engine(&self, model: TransformerModel, size: EngineSize) -> Result<Engine> {
        let pool = if self.adapters.is_empty() { None } else { Some(self.pool(&model)?) };
        let options = EngineOptions {
            threads: self.args.threads,
            max_step_rows: size.num_sequences.max(STEP_ROWS),
            kv_tokens: size.kv_tokens,
            ..EngineOptions::default()
        };
        Ok(Engine::new(model, pool, &options)?)
    }

    fn pool(&self, model: &TransformerModel) -> Result<Arc<LoraPool>> {
        let options = self.args.preparing.options();
        let prepare = |(named, adapter): &(&NamedAdapter, Adapter)| {
            prepare_with(adapter.clone(), model, &options)
                .map_err(|refusal| refused(&refusal, &named.directory))
                .with_context(|| named.context())
        };
        let adapters: Vec<PreparedAdapter> = self.adapters.iter().map(prepare).collect::<Result<_>>()?;
        let dtype = self.args.slot_dtype.map_or_else(|| exact_dtype(&adapters).0, SlotDtype::from);
        let options = PoolOptions { num_slots: adapters.len(), max_rank: 1, dtype, ..PoolOptions::default() };
        let pool = LoraPool::open(model.shape(), options.covering(&adapters))?;
        for ((NamedAdapter { name, .. }, _), adapter) in self.adapters.iter().zip(&adapters) {
            pool.load(name, adapter).with_context(|| format!("adapter {name:?}"))?;
        }
        Ok(pool)
    }
}

/// Reads a model, with a progress line where a person watches.
pub(crate) fn load_model(
    path: &Path,
    weight_dtype: Option<WeightDtype>,
) -> Result<(TransformerModel, Result<Tokenizer, TokenizerError>)> {
    let watched = std::io::stderr().is_terminal();
    let mut shown = usize::MAX;
    let mut progress = |at: multilora::engine::checkpoint::LoadProgress| {
        let percent = 100 * at.tensors_done / at.tensors_total.max(1);
        if watched && percent != shown {
            shown = percent;
            eprint!("\rloading {}: {percent} %", path.display());
            let _ = std::io::stderr().flush();
        }
    };
    let options = LoadOptions { weight_dtype, progress: Some(&mut progress) };
    let checkpoint = Checkpoint::open(path, options);
    if watched {
        // Erases the progress line.
        eprint!("\r\x1b[K");
    }
    let checkpoint = checkpoint?;
    let model = TransformerModel::new(checkpoint.config, checkpoint.weights)?;
    Ok((model, checkpoint.tokenizer))
}

/// The narrowest element type that holds these adapters exactly, and whether there is one; float64 comes to f32.
pub(crate) fn exact_dtype<'a>(adapters: impl IntoIterator<Item = &'a PreparedAdapter>) -> (SlotDtype, bool) {
    match exact_slot_dtype(adapters.into_iter().flat_map(PreparedAdapter::dtypes)) {
        Some(dtype) => (dtype, true),
        None => (SlotDtype::F32, false),
    }
}

/// The first of several reasons, and how to see the others.
fn brief(reasons: &[String], num_omitted: usize, directory: &Path) -> anyhow::Error {
    let first = reasons.first().map(String::as_str).unwrap_or_default();
    match reasons.len() + num_omitted {
        0 | 1 => anyhow!("refused: {first}"),
        count => anyhow!(
            "refused for {count} reasons, all shown by `multilora inspect {}`; the first: {first}",
            directory.display()
        ),
    }
}
