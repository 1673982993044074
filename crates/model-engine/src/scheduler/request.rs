//! A request on its way through the scheduler, and what is told of it.

use std::fmt;

use lora_math::{AdapterId, AdapterSelection};

use super::blocks_of;
use crate::engine::{Engine, EngineError, SequenceId};
use crate::generate::{FinishReason, Request, Sampler, token_limit};

/// A request of one scheduler. Ids are never used again, and grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub(super) u64);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request {}", self.0)
    }
}

/// What a step gives.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The next token of a request.
    Token {
        /// The request.
        request: RequestId,
        /// The token.
        token_id: u32,
    },
    /// The end of a request.
    Finished {
        /// The request.
        request: RequestId,
        /// How it ended.
        result: Result<Finished, RequestError>,
    },
}

/// A request that ran to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finished {
    /// Why it ended.
    pub reason: FinishReason,
    /// The generation that it used from first to last token; none is the base model.
    pub adapter: Option<AdapterId>,
    /// Tokens of its prompt.
    pub prompt_tokens: usize,
    /// Tokens of the prompt whose keys and values earlier requests had left in the cache.
    pub cached_tokens: usize,
    /// Tokens that it gave.
    pub new_tokens: usize,
    /// Steps from its submission to its admission.
    pub steps_waited: u64,
    /// Younger requests that were admitted before it, of those that competed with it.
    pub bypasses: usize,
}

/// Why a request came to nothing.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// Somebody cancelled it.
    #[error("cancelled")]
    Cancelled,
    /// Its adapter does not load.
    #[error("adapter {adapter:?}: {reason}")]
    Load {
        /// The adapter's name.
        adapter: String,
        /// What the loader said.
        reason: String,
    },
    /// The engine does not take it.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// Why a request cannot run, whenever.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// A prompt without tokens.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// A prompt that leaves no room for a token.
    #[error("a prompt of {prompt_tokens} tokens does not fit into a context of {max_context}")]
    PromptTooLong {
        /// Its length.
        prompt_tokens: usize,
        /// The longest sequence.
        max_context: usize,
    },
    /// A token that the model has no embedding for.
    #[error("token {token_id} at index {index} of the prompt, the vocabulary has {vocab_size}")]
    TokenOutOfRange {
        /// Index in the prompt.
        index: usize,
        /// The token.
        token_id: u32,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// A temperature below 0, or none at all.
    #[error("temperature {temperature} is not a finite number of at least 0")]
    Temperature {
        /// What was asked for.
        temperature: f32,
    },
    /// More room in the KV cache than there is, even for the request alone.
    #[error("{needed_blocks} blocks of the KV cache are needed, there are {num_blocks}")]
    KvTooSmall {
        /// Blocks that the request needs to its end.
        needed_blocks: usize,
        /// Blocks in all.
        num_blocks: usize,
    },
}

/// What a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blocked {
    /// Its turn.
    Turn,
    /// A slot with its adapter.
    Slot,
    /// Room in the KV cache.
    Kv,
}

/// A request that is not admitted yet.
pub(super) struct Waiting {
    pub(super) id: RequestId,
    pub(super) request: Request,
    /// The most tokens that it gives, and why it ends there.
    pub(super) limit: (usize, FinishReason),
    pub(super) num_blocks: usize,
    pub(super) since: u64,
    pub(super) blocked: Blocked,
    pub(super) bypasses: usize,
}

impl Waiting {
    pub(super) fn new(engine: &Engine, id: RequestId, request: Request, since: u64) -> Result<Self, SubmitError> {
        let (prompt_tokens, max_context) = (request.prompt.len(), engine.max_context());
        let temperature = request.temperature;
        if prompt_tokens == 0 {
            return Err(SubmitError::EmptyPrompt);
        }
        if prompt_tokens > max_context {
            return Err(SubmitError::PromptTooLong { prompt_tokens, max_context });
        }
        if !temperature.is_finite() || temperature < 0.0 {
            return Err(SubmitError::Temperature { temperature });
        }
        let vocab_size = engine.model().config().vocab_size;
        if let Some(index) = request.prompt.iter().position(|token| *token as usize >= vocab_size) {
            return Err(SubmitError::TokenOutOfRange { index, token_id: request.prompt[index], vocab_size });
        }
        let limit = token_limit(prompt_tokens, request.max_new_tokens, max_context);
        let (needed_blocks, num_blocks) = (blocks_of(prompt_tokens, limit.0), engine.kv_usage().num_blocks);
        if needed_blocks > num_blocks {
            return Err(SubmitError::KvTooSmall { needed_blocks, num_blocks });
        }
        Ok(Waiting { id, request, limit, num_blocks: needed_blocks, since, blocked: Blocked::Turn, bypasses: 0 })
    }

    /// Whether it competes for slots.
    pub(super) fn uses_adapter(&self) -> bool {
        self.request.selection != AdapterSelection::Base
    }
}

/// An admitted request.
pub(super) struct Running {
    pub(super) id: RequestId,
    pub(super) request: Request,
    pub(super) sequence: SequenceId,
    pub(super) adapter: Option<AdapterId>,
    pub(super) sampler: Sampler,
    pub(super) end_tokens: Vec<u32>,
    pub(super) limit: (usize, FinishReason),
    pub(super) num_blocks: usize,
    /// Tokens of the prompt that were in the cache.
    pub(super) cached: usize,
    /// Tokens of the prompt that have been fed, or need not be.
    pub(super) fed: usize,
    /// The last token, which is fed next.
    pub(super) pending: Option<u32>,
    pub(super) num_new: usize,
    pub(super) steps_waited: u64,
    pub(super) bypasses: usize,
}

impl Running {
    pub(super) fn finished(&self, reason: FinishReason) -> Finished {
        Finished {
            reason,
            adapter: self.adapter,
            prompt_tokens: self.request.prompt.len(),
            cached_tokens: self.cached,
            new_tokens: self.num_new,
            steps_waited: self.steps_waited,
            bypasses: self.bypasses,
        }
    }
}
