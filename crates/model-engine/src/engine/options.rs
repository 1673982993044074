//! What an engine and a sequence are made with.

use std::fmt;
use std::num::NonZero;
use std::sync::Arc;

use lora_kernels::{Cpu, LoraKernels};
use lora_math::AdapterSelection;

use crate::checkpoint::ModelConfig;
use crate::checkpoint::config::RopeScaling;

/// Sizes and back end of an engine.
#[derive(Clone)]
pub struct EngineOptions {
    /// Threads of a step; none takes as many as the machine runs at once.
    pub threads: Option<NonZero<usize>>,
    /// The most token rows of one step; activations are allocated for this many.
    pub max_step_rows: usize,
    /// Positions that the KV cache holds, over all sequences; rounded up to whole blocks.
    pub kv_tokens: usize,
    /// The longest sequence; none takes what the checkpoint declares. Never more than the KV cache holds.
    pub max_context: Option<usize>,
    /// The operations that apply adapters.
    pub kernels: Arc<dyn LoraKernels>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            threads: None,
            max_step_rows: 512,
            kv_tokens: 8192,
            max_context: None,
            kernels: Arc::new(Cpu::new()),
        }
    }
}

impl fmt::Debug for EngineOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineOptions")
            .field("threads", &self.threads)
            .field("max_step_rows", &self.max_step_rows)
            .field("kv_tokens", &self.kv_tokens)
            .field("max_context", &self.max_context)
            .finish_non_exhaustive()
    }
}

/// The context that a checkpoint declares; under dynamic rope scaling, what the factor stretches it to.
pub(super) fn default_context(config: &ModelConfig) -> usize {
    let declared = config.max_position_embeddings;
    match config.rope.scaling {
        RopeScaling::Dynamic { factor, .. } => (declared as f64 * factor.max(1.0)) as usize,
        _ => declared,
    }
}

/// What a sequence is added with.
#[derive(Clone, Debug, Default)]
pub struct SequenceOptions {
    /// The adapter, resolved once.
    pub selection: AdapterSelection,
    /// Length of the whole prompt, where it comes in several steps. Only dynamic rope scaling reads it: there the
    /// rotations of a prompt depend on its length. Without it every step's tokens are rotated for the length that the
    /// sequence has after that step.
    pub prompt_tokens: Option<usize>,
    /// Sequences with different salts share no blocks of the KV cache, whatever their tokens: for tenants who must not learn,
    /// by the time of an answer, what others have asked. Empty by default.
    pub salt: Vec<u8>,
}
