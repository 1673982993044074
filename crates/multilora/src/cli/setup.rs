//! From the command line to an engine: the base model, its pool of adapters, and what both must agree on.
//!
//! Everything small is checked before anything large is read: adapters are opened and fitted to the model's shape
//! before its weights are loaded.

use std::collections::BTreeSet;
use std::io::{IsTerminal, Write};
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, ValueEnum};

use multilora::adapter::{PreparedAdapter, exact_slot_dtype, prepare};
use multilora::engine::checkpoint::{Checkpoint, CheckpointInfo, LoadOptions, WeightDtype};
use multilora::engine::model::config_shape;
use multilora::engine::tokenizer::{Tokenizer, TokenizerError};
use multilora::engine::{Engine, EngineOptions, TransformerModel};
use multilora::math::{AdapterSelection, ModuleSet, SlotDtype};
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

/// The adapters of a command, fitted to its model, before the model's weights are read.
pub(crate) struct Prepared<'a> {
    args: &'a EngineArgs,
    adapters: Vec<(&'a str, PreparedAdapter)>,
}

impl EngineArgs {
    /// Opens every adapter and fits it to the model's shape.
    pub(crate) fn prepare(&self) -> Result<Prepared<'_>> {
        let info = CheckpointInfo::open(&self.model)?;
        let shape = config_shape(&info.config)?;
        let mut names = BTreeSet::new();
        let mut adapters = Vec::new();
        for NamedAdapter { name, directory } in &self.adapters {
            if !names.insert(name.as_str()) {
                bail!("two adapters are called {name:?}");
            }
            let refused = || format!("adapter {name:?} from {}", directory.display());
            let adapter = adapters::open(directory)
                .and_then(|adapter| adapters::for_model(adapter, &info.config))
                .map_err(|error| {
                    let reasons: Vec<String> = error.located().iter().map(ToString::to_string).collect();
                    brief(&reasons, error.num_omitted(), directory)
                })
                .with_context(refused)?;
            for note in adapter.notes() {
                eprintln!("note: adapter {name:?}: {note}");
            }
            let prepared = prepare(adapter, &shape)
                .map_err(|refusal| {
                    let reasons: Vec<String> = refusal.reasons.iter().map(ToString::to_string).collect();
                    brief(&reasons, 0, directory)
                })
                .with_context(refused)?;
            adapters.push((name.as_str(), prepared));
        }
        Ok(Prepared { args: self, adapters })
    }
}

impl Prepared<'_> {
    /// What a name on the command line or in a request selects.
    pub(crate) fn selection(&self, name: &str) -> Result<AdapterSelection> {
        if name == BASE {
            return Ok(AdapterSelection::Base);
        }
        if self.adapters.iter().any(|(known, _)| *known == name) {
            return Ok(AdapterSelection::Named(name.to_owned()));
        }
        let known: Vec<&str> = std::iter::once(BASE).chain(self.adapters.iter().map(|(name, _)| *name)).collect();
        bail!("no adapter is called {name:?}; there are {}", known.join(", "))
    }

    /// Reads the model, with a progress line where a person watches.
    pub(crate) fn load_model(&self) -> Result<(TransformerModel, Result<Tokenizer, TokenizerError>)> {
        let watched = std::io::stderr().is_terminal();
        let mut shown = usize::MAX;
        let mut progress = |at: multilora::engine::checkpoint::LoadProgress| {
            let percent = 100 * at.tensors_done / at.tensors_total.max(1);
            if watched && percent != shown {
                shown = percent;
                eprint!("\rloading {}: {percent} %", self.args.model.display());
                let _ = std::io::stderr().flush();
            }
        };
        let options =
            LoadOptions { weight_dtype: self.args.weight_dtype.map(WeightDtype::from), progress: Some(&mut progress) };
        let checkpoint = Checkpoint::open(&self.args.model, options);
        if watched {
            // Erases the progress line.
            eprint!("\r\x1b[K");
        }
        let checkpoint = checkpoint?;
        let model = TransformerModel::new(checkpoint.config, checkpoint.weights)?;
        Ok((model, checkpoint.tokenizer))
    }

    /// Opens a pool with every adapter resident, and an engine on it.
    pub(crate) fn engine(&self, model: TransformerModel, size: EngineSize) -> Result<Engine> {
        let pool = match self.adapters.len() {
            0 => None,
            num_slots => {
                let max_rank = self.adapters.iter().map(|(_, adapter)| adapter.max_rank()).max().unwrap_or(1);
                let exact = exact_dtype(self.adapters.iter().map(|(_, adapter)| adapter)).0;
                let dtype = self.args.slot_dtype.map_or(exact, SlotDtype::from);
                let options = PoolOptions { num_slots, max_rank, modules: ModuleSet::DENSE, dtype };
                let pool = LoraPool::open(model.shape(), options)?;
                for (name, adapter) in &self.adapters {
                    pool.load(name, adapter).with_context(|| format!("adapter {name:?}"))?;
                }
                Some(pool)
            }
        };
        let options = EngineOptions {
            threads: self.args.threads,
            max_step_rows: size.num_sequences.max(STEP_ROWS),
            kv_tokens: size.kv_tokens,
            ..EngineOptions::default()
        };
        Ok(Engine::new(model, pool, &options)?)
    }
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
