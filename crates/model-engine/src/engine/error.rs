//! Why the engine refused, with the numbers, and whether the same call may succeed later.

use lora_kernels::KernelError;
use lora_math::rows::RowsError;
use lora_math::selection::SelectionError;
use lora_math::{Features, Site};
use lora_pool::PoolError;

use super::SequenceId;
use crate::model::vectors::ForeignVector;
use crate::rope::RopeError;

/// Why the engine refused. A refused call has changed nothing, unless the variant says otherwise.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The engine has no such sequence: it was finished, or is another engine's.
    #[error("{sequence} is not running in this engine")]
    UnknownSequence {
        /// The sequence asked for.
        sequence: SequenceId,
    },
    /// A sequence that holds tokens already, where an empty one is needed.
    #[error("{sequence} holds {length} tokens already")]
    NotEmpty {
        /// The sequence.
        sequence: SequenceId,
        /// Tokens that it holds.
        length: usize,
    },
    /// A sequence stands twice in one step.
    #[error("{sequence} stands twice in one step")]
    DuplicateSequence {
        /// The sequence.
        sequence: SequenceId,
    },
    /// A step without inputs.
    #[error("a step needs at least one input")]
    EmptyStep,
    /// An input without tokens.
    #[error("the input of {sequence} has no tokens")]
    EmptyInput {
        /// The sequence.
        sequence: SequenceId,
    },
    /// A token that the model has no embedding for.
    #[error("{sequence}: token {token_id} at index {index} of its input, the vocabulary has {vocab_size}")]
    TokenOutOfRange {
        /// The sequence.
        sequence: SequenceId,
        /// Index in the input's tokens.
        index: usize,
        /// The token.
        token_id: u32,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// More token rows than a step may have. Split the step.
    #[error("a step of {rows} token rows does not fit, {max_rows} do")]
    TooManyRows {
        /// Token rows of the step.
        rows: usize,
        /// The most that fit.
        max_rows: usize,
    },
    /// The sequence would grow past the context.
    #[error("{sequence} holds {length} tokens and {added} more do not fit into a context of {max_context}")]
    ContextFull {
        /// The sequence.
        sequence: SequenceId,
        /// Tokens that it holds.
        length: usize,
        /// Tokens of the input.
        added: usize,
        /// The longest sequence.
        max_context: usize,
    },
    /// Not enough free blocks for the new tokens. Retry when other sequences are finished.
    #[error("the KV cache is full: {needed_blocks} blocks are needed, {free_blocks} of {num_blocks} are free")]
    KvFull {
        /// Blocks that the call needs in addition.
        needed_blocks: usize,
        /// Blocks that are free.
        free_blocks: usize,
        /// Blocks in all.
        num_blocks: usize,
    },
    /// The selection names nothing that could be served. Without a pool only base and active can.
    #[error(transparent)]
    Selection(#[from] SelectionError),
    /// The pool refused; [`PoolError::is_retryable`] says whether to retry.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The pool was opened for another model.
    #[error("the pool is not for this model: {site} has {found:?} there and {expected:?} in the model")]
    PoolShape {
        /// The site.
        site: Site,
        /// Features in the model; none where it has no such site.
        expected: Option<Features>,
        /// Features in the pool's layout.
        found: Features,
    },
    /// A gain, a shift or norm weights of the adapter are for a place that the model lacks, or of another length: the
    /// adapter was prepared for another model.
    #[error("the adapter is not for this model: a vector of {found} at {place}, the model has {}", length(.expected))]
    VectorPlace {
        /// The site or the norm, in words.
        place: String,
        /// Length in the model; none where it has no such place.
        expected: Option<usize>,
        /// Length of the adapter's vector.
        found: usize,
    },
    /// An option is 0 or too large for this machine's address space.
    #[error("option {option} is {value}: {expected}")]
    Option {
        /// Which option.
        option: &'static str,
        /// Its value.
        value: usize,
        /// What is accepted.
        expected: &'static str,
    },
    /// The rope configuration has no tables.
    #[error(transparent)]
    Rope(#[from] RopeError),
    /// The threads could not be started. Retrying may help.
    #[error("{num_threads} threads cannot be started: {reason}")]
    Threads {
        /// Threads asked for.
        num_threads: usize,
        /// What the thread pool said.
        reason: String,
    },
    /// The row metadata of a step was refused: a fault of the engine, since the step was checked before.
    #[error(transparent)]
    Rows(#[from] RowsError),
    /// A kernel refused: a fault of the engine or of the kernels. The sequences of the step keep their lengths, and the
    /// step may be run again.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

impl EngineError {
    /// Whether the same call may succeed later, when other sequences or loads are done.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            EngineError::KvFull { needed_blocks, num_blocks, .. } => needed_blocks <= num_blocks,
            EngineError::Threads { .. } => true,
            EngineError::Pool(error) => error.is_retryable(),
            _ => false,
        }
    }
}

impl From<ForeignVector> for EngineError {
    fn from(ForeignVector { place, expected, found }: ForeignVector) -> Self {
        EngineError::VectorPlace { place, expected, found }
    }
}

fn length(expected: &Option<usize>) -> String {
    expected.map_or_else(|| "none there".to_owned(), |length| length.to_string())
}
