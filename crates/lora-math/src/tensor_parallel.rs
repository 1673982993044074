//! How A and B of a site are cut over the ranks of a tensor-parallel group.
//!
//! The cut follows the base weight's (Megatron's; vLLM's default mode for LoRA), so that a delta needs no communication
//! of its own:
//!
//! | module | base weight | A `[rank, in_features]` | B `[out_features, rank]` | the ranks' deltas |
//! |---|---|---|---|---|
//! | q, k, v, gate, up | column-parallel: output cut | whole | a range of rows | stand side by side |
//! | o, down | row-parallel: input cut | a range of columns | whole | are summed, with the base's own sum |
//!
//! q, k, v and o are cut in whole heads. Where there are fewer KV heads than ranks, neighbouring ranks hold the same KV
//! head. Only index ranges are computed here; copying them is for the packer.

use std::ops::Range;

use thiserror::Error;

use crate::module::Module;
use crate::shape::Features;

/// One rank of a tensor-parallel group. (The rank of a LoRA pair is another thing.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorParallel {
    rank: usize,
    size: usize,
}

/// Heads of a layer's attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionHeads {
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
}

/// What a cut must keep whole, beyond single features.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub struct CutUnits {
    /// Heads of the layer's attention; none where it has none.
    pub attention: Option<AttentionHeads>,
}

impl CutUnits {
    /// The units of a layer with attention.
    pub fn with_attention(attention: AttentionHeads) -> Self {
        CutUnits { attention: Some(attention) }
    }
}

/// The part of a pair that one rank holds, as ranges of the whole pair's indices. B's columns and A's rows, both
/// of length the LoRA rank, are whole on every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PairCut {
    /// Columns of A, in this order.
    pub a_columns: Vec<Range<usize>>,
    /// Rows of B, in this order.
    pub b_rows: Vec<Range<usize>>,
}

impl PairCut {
    /// Features of the part: the columns of A and the rows of B that it has.
    pub fn features(&self) -> Features {
        Features {
            in_features: self.a_columns.iter().map(Range::len).sum(),
            out_features: self.b_rows.iter().map(Range::len).sum(),
        }
    }
}

/// A cut that cannot be made. Another group size may do; trying again will not help.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TensorParallelError {
    /// The rank is not below the group's size.
    #[error("rank {rank} is not in a group of {size}")]
    RankOutOfRange {
        /// The rank.
        rank: usize,
        /// The group's size.
        size: usize,
    },
    /// Features do not fall into whole units: heads that do not divide the width, or no heads at all.
    #[error("{module} has {features} features, which {units} heads do not divide")]
    UnevenUnits {
        /// The module.
        module: Module,
        /// The features to be cut.
        features: usize,
        /// Units in which they come.
        units: usize,
    },
    /// The units do not fall evenly on the ranks.
    #[error("{module}: {units} units cannot be cut evenly over {size} ranks")]
    Indivisible {
        /// The module.
        module: Module,
        /// Units to be cut: heads, or features of an MLP.
        units: usize,
        /// The group's size.
        size: usize,
    },
    /// KV heads can be neither cut nor replicated evenly.
    #[error("{module}: {num_kv_heads} KV heads neither divide by {size} ranks nor divide them")]
    UnevenReplicas {
        /// The module.
        module: Module,
        /// KV heads.
        num_kv_heads: usize,
        /// The group's size.
        size: usize,
    },
    /// An attention module was cut without the layer's heads.
    #[error("{module} is cut in whole heads, and the layer's heads are not given")]
    MissingHeads {
        /// The module.
        module: Module,
    },
    /// No cut is defined for this module.
    #[error("no tensor-parallel cut is defined for {module}")]
    NoRule {
        /// The module.
        module: Module,
    },
}

impl TensorParallel {
    /// No tensor parallelism: one rank that holds everything.
    pub const SINGLE: TensorParallel = TensorParallel { rank: 0, size: 1 };

    /// Rank `rank` of a group of `size` ranks.
    pub fn new(rank: usize, size: usize) -> Result<Self, TensorParallelError> {
        if rank < size {
            Ok(TensorParallel { rank, size })
        } else {
            Err(TensorParallelError::RankOutOfRange { rank, size })
        }
    }

    /// The rank, from 0.
    pub fn rank(self) -> usize {
        self.rank
    }

    /// Ranks of the group.
    pub fn size(self) -> usize {
        self.size
    }

    /// The part of the pair at `module`, whose whole features are `features`, that this rank holds.
    pub fn cut(self, module: Module, features: Features, units: CutUnits) -> Result<PairCut, TensorParallelError> {
        let Features { in_features, out_features } = features;
        if self.size == 1 {
            return Ok(pair_cut(0..in_features, 0..out_features));
        }
        let heads = || units.attention.ok_or(TensorParallelError::MissingHeads { module });
        match module {
            Module::QProj => {
                let rows = self.cut_units(Cut { module, features: out_features, units: heads()?.num_heads })?;
                Ok(pair_cut(0..in_features, rows))
            }
            Module::KProj | Module::VProj => {
                let rows = self.cut_kv(Cut { module, features: out_features, units: heads()?.num_kv_heads })?;
                Ok(pair_cut(0..in_features, rows))
            }
            Module::OProj => {
                let columns = self.cut_units(Cut { module, features: in_features, units: heads()?.num_heads })?;
                Ok(pair_cut(columns, 0..out_features))
            }
            Module::GateProj | Module::UpProj => {
                let rows = self.cut_units(Cut { module, features: out_features, units: out_features })?;
                Ok(pair_cut(0..in_features, rows))
            }
            Module::DownProj => {
                let columns = self.cut_units(Cut { module, features: in_features, units: in_features })?;
                Ok(pair_cut(columns, 0..out_features))
            }
            _ => Err(TensorParallelError::NoRule { module }),
        }
    }

    /// An equal share of the units for every rank.
    fn cut_units(self, cut: Cut) -> Result<Range<usize>, TensorParallelError> {
        let unit = cut.unit_features()?;
        let Cut { module, units, .. } = cut;
        if !units.is_multiple_of(self.size) {
            return Err(TensorParallelError::Indivisible { module, units, size: self.size });
        }
        let share = units / self.size * unit;
        Ok(self.rank * share..(self.rank + 1) * share)
    }

    /// An equal share of the KV heads, or, with fewer heads than ranks, one head for `size / heads` neighbouring ranks:
    /// the head that this rank's query heads attend to.
    fn cut_kv(self, cut: Cut) -> Result<Range<usize>, TensorParallelError> {
        let unit = cut.unit_features()?;
        let Cut { module, units: num_kv_heads, .. } = cut;
        if num_kv_heads.is_multiple_of(self.size) {
            return self.cut_units(cut);
        }
        if !self.size.is_multiple_of(num_kv_heads) {
            return Err(TensorParallelError::UnevenReplicas { module, num_kv_heads, size: self.size });
        }
        let head = self.rank / (self.size / num_kv_heads);
        Ok(head * unit..(head + 1) * unit)
    }
}

/// One dimension to be cut in units.
#[derive(Clone, Copy)]
struct Cut {
    module: Module,
    features: usize,
    units: usize,
}

impl Cut {
    /// Features of one unit.
    fn unit_features(self) -> Result<usize, TensorParallelError> {
        let Cut { module, features, units } = self;
        if units == 0 || !features.is_multiple_of(units) {
            return Err(TensorParallelError::UnevenUnits { module, features, units });
        }
        Ok(features / units)
    }
}

fn pair_cut(a_columns: Range<usize>, b_rows: Range<usize>) -> PairCut {
    PairCut { a_columns: vec![a_columns], b_rows: vec![b_rows] }
}
