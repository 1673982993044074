//! The engine: a model, its KV cache, and sequences that each keep one adapter from first to last token.
//!
//! [`Engine::step`] is the only way forward. One step takes any number of sequences with any number of new tokens each,
//! so prefill, chunks of it, decode and mixtures are one code path. Choosing what to run next, sampling and text are not
//! the engine's: see [`generate`](crate::generate).

mod error;
mod options;
mod sequences;
mod step;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use lora_kernels::{LoraKernels, ShrinkBuffer, ShrinkCapacity};
use lora_math::StepRows;
use lora_math::rows::RowsCapacity;
use lora_pool::LoraPool;

pub use error::EngineError;
pub use options::{EngineOptions, SequenceOptions};
pub use step::{LogitsFor, LogitsRows, StepInput, StepOutput};

use crate::kv_cache::{BLOCK_TOKENS, KvCache, KvUsage};
use crate::model::TransformerModel;
use crate::model::lora::{LoraPlan, MAX_GROUP_SITES};
use crate::model::scratch::Scratch;
use crate::rope::RopeTable;
use sequences::Sequence;
use step::StepBuffers;

/// A sequence of one engine. Ids are never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(u64);

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sequence {}", self.0)
    }
}

/// A base model that serves sequences, each with its own adapter.
///
/// Threads belong to the engine; a step runs on them and returns when it is done.
pub struct Engine {
    model: TransformerModel,
    lora: Option<Lora>,
    cache: KvCache,
    rope: RopeTable,
    sequences: BTreeMap<SequenceId, Sequence>,
    next_sequence: u64,
    num_steps: u64,
    scratch: Scratch,
    buffers: StepBuffers,
    max_step_rows: usize,
    max_context: usize,
    threads: rayon::ThreadPool,
}

/// What serves adapters: the pool, and buffers made once for the largest step.
struct Lora {
    pool: Arc<LoraPool>,
    kernels: Arc<dyn LoraKernels>,
    plan: LoraPlan,
    rows: StepRows,
    /// Rows of the logits, where the pool covers the head.
    head_rows: Option<StepRows>,
    h: ShrinkBuffer,
}

impl Engine {
    /// An engine; with no pool it serves the base model only.
    ///
    /// All memory of the token path is allocated here, except logits, whose buffer grows to the most rows ever asked for
    /// in one step.
    ///
    /// # Errors
    /// [`EngineError::PoolShape`] for a pool of another model, [`EngineError::Option`], [`EngineError::Rope`],
    /// [`EngineError::Threads`].
    pub fn new(
        model: TransformerModel,
        pool: Option<Arc<LoraPool>>,
        options: &EngineOptions,
    ) -> Result<Self, EngineError> {
        let EngineOptions { max_step_rows, kv_tokens, .. } = *options;
        let max_context = options.max_context.unwrap_or_else(|| options::default_context(model.config()));
        for (option, value) in
            [("max_step_rows", max_step_rows), ("kv_tokens", kv_tokens), ("max_context", max_context)]
        {
            if value == 0 {
                return Err(EngineError::Option { option, value, expected: "at least 1" });
            }
        }
        let too_large = |option, value| EngineError::Option { option, value, expected: "a size that fits in memory" };
        let cache = KvCache::new(model.kv_shape(), KvCache::blocks_for(kv_tokens))
            .ok_or_else(|| too_large("kv_tokens", kv_tokens))?;
        let scratch =
            Scratch::new(model.config(), max_step_rows).ok_or_else(|| too_large("max_step_rows", max_step_rows))?;
        // No sequence is longer than the cache, whatever the context.
        let max_context = max_context.min(cache.usage().num_blocks * BLOCK_TOKENS);
        let rope = RopeTable::new(&model.config().rope, model.config().head_dim, max_context)?;
        let lora = match pool {
            Some(pool) => Some(Lora::new(&model, pool, options)?),
            None => None,
        };
        let num_threads = options.threads.map_or(0, std::num::NonZero::get);
        let threads = rayon::ThreadPoolBuilder::new()
            .num_threads(num_threads)
            .thread_name(|index| format!("engine-{index}"))
            .build()
            .map_err(|error| EngineError::Threads { num_threads, reason: error.to_string() })?;
        Ok(Engine {
            model,
            lora,
            cache,
            rope,
            sequences: BTreeMap::new(),
            next_sequence: 0,
            num_steps: 0,
            scratch,
            buffers: StepBuffers::default(),
            max_step_rows,
            max_context,
            threads,
        })
    }

    /// The model.
    #[must_use]
    pub fn model(&self) -> &TransformerModel {
        &self.model
    }

    /// The pool whose adapters are served.
    #[must_use]
    pub fn pool(&self) -> Option<&Arc<LoraPool>> {
        self.lora.as_ref().map(|lora| &lora.pool)
    }

    /// Threads that a step runs on.
    #[must_use]
    pub fn num_threads(&self) -> usize {
        self.threads.current_num_threads()
    }

    /// The most token rows of one step.
    #[must_use]
    pub fn max_step_rows(&self) -> usize {
        self.max_step_rows
    }

    /// The longest sequence, in tokens.
    #[must_use]
    pub fn max_context(&self) -> usize {
        self.max_context
    }

    /// How full the KV cache is.
    #[must_use]
    pub fn kv_usage(&self) -> KvUsage {
        self.cache.usage()
    }
}

impl Lora {
    fn new(model: &TransformerModel, pool: Arc<LoraPool>, options: &EngineOptions) -> Result<Self, EngineError> {
        let layout = pool.layout();
        let plan = LoraPlan::new(model.shape(), layout).map_err(|foreign| EngineError::PoolShape {
            site: foreign.site,
            expected: foreign.expected,
            found: foreign.found,
        })?;
        let max_rows = options.max_step_rows;
        // One adapter a row.
        let capacity = RowsCapacity { max_rows, max_entries: max_rows, num_slots: pool.num_slots() };
        let rows = StepRows::with_capacity(capacity);
        let head_rows = plan.covers_head().then(|| StepRows::with_capacity(capacity));
        let h = ShrinkBuffer::new(ShrinkCapacity {
            max_entries: max_rows,
            max_sites: MAX_GROUP_SITES,
            max_rank: layout.max_rank(),
        })?;
        Ok(Lora { kernels: options.kernels.clone(), plan, rows, head_rows, h, pool })
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("architecture", &self.model.config().architecture)
            .field("has_pool", &self.lora.is_some())
            .field("num_sequences", &self.sequences.len())
            .field("kv", &self.cache.usage())
            .field("num_threads", &self.num_threads())
            .finish_non_exhaustive()
    }
}
