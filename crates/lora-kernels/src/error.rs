//! What a kernel refuses, with the numbers that did not agree.
//!
//! Every check runs before anything is written, so an error leaves all buffers as they were. All of these are mistakes
//! of the caller: retrying the same call fails again.

use std::fmt;

use thiserror::Error;

/// Which activations a size belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operand {
    /// The input of a projection.
    Input,
    /// The output of a projection.
    Output,
}

impl fmt::Display for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Operand::Input => "input",
            Operand::Output => "output",
        })
    }
}

/// An operation that cannot run as asked.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum KernelError {
    /// A flat slice that is not a whole number of rows, or rows of no width.
    #[error("{values} values are not whole rows of width {width}")]
    RaggedRows {
        /// Values given.
        values: usize,
        /// Width asked for.
        width: usize,
    },
    /// A weight whose number of values is not `out_features` × `in_features`.
    #[error("a weight [{out_features}, {in_features}] needs out × in values: {values} given")]
    WeightSize {
        /// Output features.
        out_features: usize,
        /// Input features.
        in_features: usize,
        /// Values given.
        values: usize,
    },
    /// A bias whose length is not `out_features`.
    #[error("a bias of {values} values for {out_features} output features")]
    BiasSize {
        /// Output features.
        out_features: usize,
        /// Values given.
        values: usize,
    },
    /// Activations with another number of rows than the step or the other operand.
    #[error("the {operand} has {found} rows, expected {expected}")]
    RowCount {
        /// Which activations.
        operand: Operand,
        /// Rows expected.
        expected: usize,
        /// Rows found.
        found: usize,
    },
    /// Activations of another width than the weight or site.
    #[error("the {operand} has width {found}, expected {expected}")]
    Width {
        /// Which activations.
        operand: Operand,
        /// Width expected.
        expected: usize,
        /// Width found.
        found: usize,
    },
    /// A token past the vocabulary of an embedding.
    #[error("row {row}: token {token_id} is out of range: the embedding has {vocab_size} rows")]
    TokenOutOfRange {
        /// The row.
        row: usize,
        /// The token.
        token_id: u32,
        /// Rows of A.
        vocab_size: usize,
    },
    /// One output for each site is needed.
    #[error("{outputs} outputs given for {sites} sites")]
    OutputCount {
        /// Sites of the call.
        sites: usize,
        /// Outputs given.
        outputs: usize,
    },
    /// A run of rows that lies outside of the activations.
    #[error("rows {start}..{end} lie outside of {num_rows} rows")]
    RunOutOfRange {
        /// First row of the run.
        start: usize,
        /// End of the run.
        end: usize,
        /// Rows of the activations.
        num_rows: usize,
    },
    /// A site whose index is past the last column of the slot table.
    #[error("site {site} is out of range: the slot table has {num_sites} sites")]
    SiteOutOfRange {
        /// The site's index.
        site: usize,
        /// Columns of the table.
        num_sites: usize,
    },
    /// A slot past the last row of the slot table.
    #[error("slot {slot} is out of range: the slot table has {num_slots} slots")]
    SlotOutOfRange {
        /// The slot.
        slot: u32,
        /// Rows of the table.
        num_slots: usize,
    },
    /// A table entry with a rank but without an address.
    #[error("slot {slot}, site {site}: rank {rank} with a null address of A or B")]
    NullAddress {
        /// The slot.
        slot: u32,
        /// The site's index.
        site: usize,
        /// The entry's rank.
        rank: usize,
    },
    /// A rank larger than the shrink buffer has room for.
    #[error("slot {slot}, site {site}: rank {rank} is larger than the shrink buffer's {max_rank}")]
    RankTooLarge {
        /// The slot.
        slot: u32,
        /// The site's index.
        site: usize,
        /// The entry's rank.
        rank: usize,
        /// Ranks that the buffer holds.
        max_rank: usize,
    },
    /// More entries or sites than the shrink buffer has room for.
    #[error(
        "{entries} entries × {sites} sites do not fit in a shrink buffer of {max_entries} entries × {max_sites} sites"
    )]
    ShrinkTooLarge {
        /// Entries of the step.
        entries: usize,
        /// Sites of the call.
        sites: usize,
        /// Entries that the buffer holds.
        max_entries: usize,
        /// Sites that the buffer holds.
        max_sites: usize,
    },
    /// A shrink buffer that does not fit in memory.
    #[error("a shrink buffer of {max_entries} entries × {max_sites} sites × rank {max_rank} does not fit in memory")]
    ShrinkBufferSize {
        /// Entries asked for.
        max_entries: usize,
        /// Sites asked for.
        max_sites: usize,
        /// Rank asked for.
        max_rank: usize,
    },
    /// An expand of other entries or sites than the last shrink into the buffer.
    #[error(
        "expand of {entries} entries × {sites} sites, but the buffer holds a shrink of {held_entries} × {held_sites}"
    )]
    ShrinkMismatch {
        /// Entries of the step.
        entries: usize,
        /// Sites of the call.
        sites: usize,
        /// Entries of the last shrink.
        held_entries: usize,
        /// Sites of the last shrink.
        held_sites: usize,
    },
    /// An instruction set that this machine lacks.
    #[error("this machine has no {isa}")]
    MissingIsa {
        /// The instruction set.
        isa: &'static str,
    },
}
