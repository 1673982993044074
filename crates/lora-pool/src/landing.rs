//! A load on its way: from a reserved name over a taken slot to a resident generation.
//!
//! Whatever stops it on the way (an error, a panic, a drop), the slot is free again, the name stands for what it did before
//! (nothing, or the generation that was to be replaced), and what was copied so far is unreachable.

use std::fmt;
use std::sync::Arc;

use lora_adapter::AdapterVectors;
use lora_math::{AdapterId, ContentDigest, SiteEntry, SlotId};
use tracing::debug;

use crate::error::PoolError;
use crate::host_tier::HostImage;
use crate::image::ImageSize;
use crate::lease::Lease;
use crate::memory::DeviceMemory;
use crate::pool::{LoraPool, TakenSlot};
use crate::state::{Existing, Installed};

/// The outcome of [`LoraPool::stage`].
#[derive(Debug)]
#[must_use = "a landing that is dropped is given up"]
pub enum Staged<M: DeviceMemory> {
    /// The same contents are resident under that name already; the lease keeps them there.
    Resident(Lease),
    /// The image is on its way into a slot.
    Landing(Landing<M>),
}

/// An adapter whose image is on its way into a slot. It is not resident until [`publish`](Self::publish); dropping it
/// gives the load up.
#[must_use = "a landing that is dropped is given up"]
pub struct Landing<M: DeviceMemory> {
    reservation: Reservation<M>,
    slot: SlotId,
    arrived: M::CopyToken,
    row: Vec<SiteEntry>,
    content: ContentDigest,
    size: ImageSize,
    vectors: Arc<AdapterVectors>,
}

/// A name, and soon a slot, that are one load's alone. Its drop ends the load.
pub(crate) struct Reservation<M: DeviceMemory> {
    pool: Arc<LoraPool<M>>,
    name: Arc<str>,
    existing: Existing,
    slot: Option<SlotId>,
    installed: bool,
}

impl<M: DeviceMemory> Reservation<M> {
    /// Takes charge of a name that the caller has just reserved.
    pub(crate) fn new(pool: Arc<LoraPool<M>>, name: Arc<str>, existing: Existing) -> Self {
        Reservation { pool, name, existing, slot: None, installed: false }
    }

    /// Takes a slot and starts the copy of an image.
    pub(crate) fn land(mut self, host_image: &HostImage<M>) -> Result<Landing<M>, PoolError> {
        let pool = self.pool.clone();
        let layout = pool.layout();
        let HostImage { image, content, vectors } = host_image;
        let TakenSlot { slot, victim, fence } = pool.take_slot()?;
        self.slot = Some(slot);
        if let Some(victim) = victim {
            debug!(victim = &*victim, %slot, "victim evicted");
        }
        let slot_offset = pool.placement().slot_offset(slot)?;
        let runs = image.copy_runs(layout, slot_offset);
        // SAFETY: the slot is landing and this reservation owns it, so no lease on it exists, no step launched
        // from now on reads it, and no other load writes it. Steps launched before that read it stand before `fence`, if
        // the engine keeps `TableRef`'s contract: on a memory whose steps outlive their calls, it tells of each step by
        // `step_launched` before it drops the leases. Where that call failed, `take_slot` gave no slot.
        let arrived = unsafe { pool.memory().copy(image.bytes().clone(), &runs, fence.as_deref()) }?;
        let row = image.table_row(layout, pool.memory().address() + slot_offset as u64);
        let (content, vectors, size) = (*content, vectors.clone(), image.size());
        Ok(Landing { reservation: self, slot, arrived, row, content, size, vectors })
    }
}

impl<M: DeviceMemory> Drop for Reservation<M> {
    fn drop(&mut self) {
        if !self.installed {
            self.pool.count().abandoned();
            self.pool.state().abandon(&self.name, self.slot);
        }
        self.pool.notify_load_ended();
    }
}

impl<M: DeviceMemory> Landing<M> {
    /// The name under which it will be resident.
    pub fn name(&self) -> &str {
        &self.reservation.name
    }

    /// The slot into which it is copied.
    pub fn slot(&self) -> SlotId {
        self.slot
    }

    /// Whether the copy has arrived: a publication before that makes the engine's stream wait for it, one after does not.
    ///
    /// # Errors
    /// [`PoolError::Memory`].
    pub fn has_arrived(&self) -> Result<bool, PoolError> {
        Ok(self.reservation.pool.memory().has_arrived(&self.arrived)?)
    }

    /// Makes it resident: `stream` waits for the copy and then writes the slot's row of the table. Call it between
    /// steps; the work does not grow with the size of the adapter. Where it replaces a generation, the name points to the new
    /// one from now on; the old one leaves with its last lease.
    ///
    /// It may be evicted as soon as this returns: a caller that uses it takes
    /// [`publish_leased`](Self::publish_leased).
    ///
    /// # Errors
    /// [`PoolError::Memory`]: the load is given up.
    pub fn publish(self, stream: &M::Stream) -> Result<AdapterId, PoolError> {
        Ok(self.publish_leased(stream)?.id())
    }

    /// [`publish`](Self::publish), and takes a lease in the same step: nobody can evict it in between.
    ///
    /// # Errors
    /// Those of [`publish`](Self::publish).
    pub fn publish_leased(self, stream: &M::Stream) -> Result<Lease, PoolError> {
        let pool = self.reservation.pool.clone();
        Ok(Lease::new(pool, self.install(stream)?.leased))
    }

    /// [`publish`](Self::publish), and says what the name pointed to before.
    pub(crate) fn install(mut self, stream: &M::Stream) -> Result<Installed, PoolError> {
        let pool = self.reservation.pool.clone();
        let (row_offset, row_bytes) = pool.state().write_row(self.slot, &self.row)?;
        let row_offset = pool.placement().table_offset() + row_offset;
        // SAFETY: the slot is landing and owned here, so no step launched later reads its row before it is
        // resident, and steps launched before stand ahead of this write on the same stream.
        unsafe { pool.memory().publish(stream, &self.arrived, row_offset, &row_bytes) }?;
        let name = self.reservation.name.clone();
        let beside = (self.size, self.vectors.clone());
        let installed = pool.state().install((self.slot, &name), self.content, beside, self.reservation.existing)?;
        self.reservation.installed = true;
        let Installed { leased, replaced } = &installed;
        pool.count().loaded(self.size.image_bytes, replaced.is_some());
        debug!(
            name = &*name,
            slot = %self.slot,
            generation = leased.id.generation.number(),
            content = %leased.id.content,
            image_bytes = self.size.image_bytes,
            max_rank = self.size.max_rank,
            replaced = replaced.map(|id| id.generation.number()),
            "adapter resident"
        );
        Ok(installed)
    }
}

impl<M: DeviceMemory> fmt::Debug for Landing<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let id = &self.content;
        f.debug_struct("Landing").field("name", &self.name()).field("slot", &self.slot).field("content", id).finish()
    }
}
