//! What an overlay is refused for. Each comes again for the same input.

use thiserror::Error;

use crate::error::KernelError;

/// An overlay that cannot be made or applied as asked; nothing was written.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum OverlayError {
    /// Tokens that do not ascend.
    #[error("row {row} is token {token}, the row before it is token {before}: tokens must ascend")]
    TokenOrder {
        /// The row of the overlay.
        row: usize,
        /// Its token.
        token: u32,
        /// That of the row before.
        before: u32,
    },
    /// A token past those that the vocabulary has room for.
    #[error("row {row} is token {token}: the vocabulary has {vocab_size} and room for {max_added} added ones")]
    TokenOutOfRange {
        /// The row of the overlay.
        row: usize,
        /// Its token.
        token: u32,
        /// Tokens of the base.
        vocab_size: usize,
        /// Added tokens that there is room for.
        max_added: usize,
    },
    /// More rows than there is room for.
    #[error("an overlay of {rows} rows does not fit: there is room for {max_rows}")]
    TooManyRows {
        /// Rows of the overlay.
        rows: usize,
        /// Rows that a block holds.
        max_rows: usize,
    },
    /// Values that are not one row for each token.
    #[error("{found} bytes of rows for {rows} tokens, expected {expected}")]
    RowBytes {
        /// Tokens.
        rows: usize,
        /// Bytes that they need.
        expected: usize,
        /// Bytes given.
        found: usize,
    },
    /// Memory of another size than a block.
    #[error("a block of {found} bytes, expected {expected}")]
    BlockSize {
        /// Bytes of a block.
        expected: usize,
        /// Bytes given.
        found: usize,
    },
    /// An address that wide loads do not take.
    #[error("a block at {address:#x} is not aligned to {alignment} bytes")]
    Misaligned {
        /// The address.
        address: u64,
        /// What is needed.
        alignment: u64,
    },
    /// Sizes that no block can have.
    #[error("overlays of {max_rows} rows × {row_bytes} bytes over {num_tokens} tokens do not fit in memory")]
    TooLarge {
        /// Tokens, added ones included.
        num_tokens: usize,
        /// Rows asked for.
        max_rows: usize,
        /// Bytes of a row.
        row_bytes: usize,
    },
    /// Two matrices of which not both are the same whole number of rows.
    #[error("{base} and {tuned} bytes are not as many rows of {row_bytes}")]
    RowPairs {
        /// Bytes of the base's matrix.
        base: usize,
        /// Bytes of the other.
        tuned: usize,
        /// Bytes of a row.
        row_bytes: usize,
    },
    /// Activations or slots that do not agree with the step.
    #[error(transparent)]
    Shape(#[from] KernelError),
}
