//! A lease: the counted use of a resident generation by a request.

use std::fmt;
use std::sync::Arc;

use lora_adapter::AdapterVectors;
use lora_math::{AdapterId, Route, SlotId};

use crate::memory::DeviceMemory;
use crate::pool::LoraPool;

/// The use of one generation by one request. While any clone of it lives, the slot is not written, moved or
/// evicted, and the pool's memory stays; dropping the last clone is the release.
///
/// There is no other way to give a use back, so it cannot be lost, given back twice, or given back for another slot.
#[derive(Clone)]
#[must_use = "dropping the lease gives the adapter back"]
pub struct Lease {
    held: Arc<Held>,
}

/// One counted use; its drop is the release.
struct Held {
    owner: Arc<dyn LeaseOwner>,
    leased: Leased,
}

/// What a lease is on.
#[derive(Clone, Debug)]
pub(crate) struct Leased {
    pub(crate) slot: SlotId,
    pub(crate) id: AdapterId,
    pub(crate) name: Arc<str>,
    pub(crate) vectors: Arc<AdapterVectors>,
}

/// The pool, as a lease sees it: whatever its memory.
pub(crate) trait LeaseOwner: Send + Sync {
    /// Gives one use back.
    fn release(&self, leased: &Leased);
}

impl Drop for Held {
    fn drop(&mut self) {
        self.owner.release(&self.leased);
    }
}

impl Lease {
    /// Wraps a use that `owner` has counted already.
    pub(crate) fn new(owner: Arc<dyn LeaseOwner>, leased: Leased) -> Self {
        Lease { held: Arc::new(Held { owner, leased }) }
    }

    /// The slot in which the generation lives as long as the lease does.
    pub fn slot(&self) -> SlotId {
        self.held.leased.slot
    }

    /// The slot as a step's route.
    pub fn route(&self) -> Route {
        Route::Slot(self.slot())
    }

    /// The generation.
    pub fn id(&self) -> AdapterId {
        self.held.leased.id
    }

    /// The generation's gains, shifts and norms, which stand beside its pairs; none where it has none.
    pub fn vectors(&self) -> Option<&Arc<AdapterVectors>> {
        Some(&self.held.leased.vectors).filter(|vectors| !vectors.is_empty())
    }

    /// The name that pointed to the generation when the lease was acquired.
    pub fn name(&self) -> &str {
        &self.held.leased.name
    }

    /// Whether the lease is on a slot of `pool`: slots of other pools have the same numbers.
    pub fn belongs_to<M: DeviceMemory>(&self, pool: &LoraPool<M>) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.held.owner), pool)
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Leased { slot, id, name, .. } = &self.held.leased;
        f.debug_struct("Lease").field("name", name).field("slot", slot).field("id", id).finish()
    }
}
