//! What a pool holds at one moment, for logs, metrics and tests. A snapshot is a copy: it holds nothing in place.

use lora_math::{AdapterId, SlotId};

/// A pool at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolSnapshot {
    /// Slots of the pool.
    pub num_slots: usize,
    /// Bytes of one slot.
    pub slot_bytes: usize,
    /// Slots that hold nothing and are not being filled.
    pub num_free: usize,
    /// The resident generations, by ascending slot.
    pub residents: Vec<ResidentSnapshot>,
    /// Names of loads under way, ascending.
    pub loading: Vec<String>,
}

/// One resident generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResidentSnapshot {
    /// The name that points to it, or did before it was retired.
    pub name: String,
    /// Where it lives.
    pub slot: SlotId,
    /// Which generation it is.
    pub id: AdapterId,
    /// Bytes of A and B that it really has, alignment included.
    pub image_bytes: usize,
    /// Bytes of its gains, shifts and norms, in host memory of their own.
    pub vector_bytes: usize,
    /// Its largest rank.
    pub max_rank: usize,
    /// Number of sites that it adapts.
    pub num_sites: usize,
    /// Leases on it; clones of one lease count once.
    pub num_leases: usize,
    /// The pool's clock at its last use: grows with every load, acquire and release, and the smallest is the oldest.
    pub last_use: u64,
    /// Whether it is never a victim.
    pub pinned: bool,
    /// Whether it is the active adapter.
    pub active: bool,
    /// Whether no name points to it any more: replaced or unloaded, and still in use.
    pub retired: bool,
}

impl PoolSnapshot {
    /// The generation that `name` points to.
    pub fn resident(&self, name: &str) -> Option<&ResidentSnapshot> {
        self.residents.iter().find(|resident| resident.name == name && !resident.retired)
    }

    /// Bytes of A and B that the residents really have.
    pub fn image_bytes(&self) -> usize {
        self.residents.iter().map(|resident| resident.image_bytes).sum()
    }

    /// Leases on all residents.
    pub fn num_leases(&self) -> usize {
        self.residents.iter().map(|resident| resident.num_leases).sum()
    }
}
