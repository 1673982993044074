//! What has happened in a pool since it was opened.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::PoolError;
use crate::lease::Leased;
use crate::memory::DeviceMemory;
use crate::pool::LoraPool;

/// What has happened in a pool since it was opened: numbers that only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolCounters {
    /// Acquisitions that got a lease. Those of the base model count nowhere.
    pub hits: u64,
    /// Acquisitions that found nothing, or a load under way.
    pub misses: u64,
    /// Generations that became resident.
    pub loads: u64,
    /// Bytes of A and B that were copied for them.
    pub loaded_bytes: u64,
    /// Of those loads, the ones that took a name from another generation.
    pub replacements: u64,
    /// Loads that had taken a name and came to nothing.
    pub abandoned_loads: u64,
    /// Generations that left for a load that found no free slot.
    pub victims: u64,
    /// Calls of [`evict`](LoraPool::evict) that dropped a generation.
    pub evictions: u64,
    /// Calls of [`unload`](LoraPool::unload) that took a generation from its name.
    pub unloads: u64,
}

/// The numbers, each counted for itself: a snapshot in the middle of a load may have some of it.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    hits: AtomicU64,
    misses: AtomicU64,
    loads: AtomicU64,
    loaded_bytes: AtomicU64,
    replacements: AtomicU64,
    abandoned_loads: AtomicU64,
    victims: AtomicU64,
    evictions: AtomicU64,
    unloads: AtomicU64,
}

fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

impl Counters {
    pub(crate) fn acquired(&self, result: &Result<Option<Leased>, PoolError>) {
        match result {
            Ok(Some(_)) => add(&self.hits, 1),
            Ok(None) => {}
            Err(_) => add(&self.misses, 1),
        }
    }

    pub(crate) fn loaded(&self, num_bytes: usize, replaced: bool) {
        add(&self.loads, 1);
        add(&self.loaded_bytes, num_bytes as u64);
        add(&self.replacements, u64::from(replaced));
    }

    pub(crate) fn abandoned(&self) {
        add(&self.abandoned_loads, 1);
    }

    pub(crate) fn took_slot(&self, from_victim: bool) {
        add(&self.victims, u64::from(from_victim));
    }

    pub(crate) fn evicted(&self) {
        add(&self.evictions, 1);
    }

    pub(crate) fn unloaded(&self) {
        add(&self.unloads, 1);
    }
}

impl<M: DeviceMemory> LoraPool<M> {
    /// What has happened since the pool was opened.
    pub fn counters(&self) -> PoolCounters {
        let counters = self.count();
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        PoolCounters {
            hits: get(&counters.hits),
            misses: get(&counters.misses),
            loads: get(&counters.loads),
            loaded_bytes: get(&counters.loaded_bytes),
            replacements: get(&counters.replacements),
            abandoned_loads: get(&counters.abandoned_loads),
            victims: get(&counters.victims),
            evictions: get(&counters.evictions),
            unloads: get(&counters.unloads),
        }
    }
}
