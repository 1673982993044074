//! Which slot a load takes: a free one, else the idle one that has waited longest, else none.
//!
//! The choice is a pure function of the slots' uses, so ranks of one tensor-parallel group that see the same uses take
//! the same slot. It evicts nothing; that is the pool's work.

use thiserror::Error;

use crate::site::SlotId;

/// How one cache slot stands at the moment of a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SlotUse {
    /// Holds nothing: never filled, or emptied since.
    Free,
    /// Holds an adapter that nobody uses.
    Idle {
        /// The pool's clock at its last use: grows with every use, and the smallest is the oldest.
        last_use: u64,
    },
    /// Leased, being filled, or still read by a step under way.
    Busy,
    /// Held in place by the operator, leased or not.
    Pinned,
}

/// No slot may be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("no slot is free or idle: of {num_slots} slots {num_busy} are in use and {num_pinned} are pinned")]
pub struct PoolFull {
    /// Slots of the pool.
    pub num_slots: usize,
    /// Slots in use.
    pub num_busy: usize,
    /// Slots that are pinned.
    pub num_pinned: usize,
}

impl PoolFull {
    /// Whether the same load can succeed later without anybody unpinning a slot: true while some slot is in use, since
    /// a slot in use falls idle when its last lease is dropped.
    pub fn is_retryable(&self) -> bool {
        self.num_busy > 0
    }
}

/// The slot that the next load takes, `slots[k]` being the use of slot k: the free slot with the lowest index, else the
/// idle slot with the oldest use (the lowest index among equals). Never a busy or a pinned one.
pub fn choose_victim(slots: &[SlotUse]) -> Result<SlotId, PoolFull> {
    let candidates = slots.iter().zip(0u32..).filter_map(|(slot, index)| match *slot {
        SlotUse::Free => Some((None, index)),
        SlotUse::Idle { last_use } => Some((Some(last_use), index)),
        SlotUse::Busy | SlotUse::Pinned => None,
    });
    // None sorts before every clock value, so a free slot wins.
    match candidates.min() {
        Some((_, index)) => Ok(SlotId::new(index)),
        None => {
            let count = |kind| slots.iter().filter(|slot| **slot == kind).count();
            Err(PoolFull { num_slots: slots.len(), num_busy: count(SlotUse::Busy), num_pinned: count(SlotUse::Pinned) })
        }
    }
}
