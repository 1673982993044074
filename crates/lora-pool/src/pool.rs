//! The pool: slots in one memory, and the protocol by which adapters come and go in them.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use lora_math::{AdapterId, AdapterSelection, LayoutOptions, ModelShape, SiteEntry, SiteTable, SlotLayout};
use tracing::{debug, info};

use crate::error::PoolError;
use crate::host::HostMemory;
use crate::lease::{Lease, LeaseOwner, Leased};
use crate::memory::{DeviceMemory, MemoryError};
use crate::options::PoolOptions;
use crate::placement::FixedStride;
use crate::snapshot::PoolSnapshot;
use crate::state::PoolState;
use crate::table::TableRef;

/// Slots for resident adapters, in one block of memory at a fixed address.
///
/// All calls may be made from any thread. The one mutex is held for lookups and changes of state only, never while an
/// adapter is packed or copied, so [`acquire`](Self::acquire) never waits for a load.
#[derive(Debug)]
pub struct LoraPool<M: DeviceMemory = HostMemory> {
    memory: M,
    placement: FixedStride,
    state: Mutex<PoolState>,
    /// Notified when a load ends, well or not.
    load_ended: Condvar,
    /// Behind the last step that the engine told of.
    last_step: Mutex<Option<Arc<M::StepFence>>>,
}

impl LoraPool<HostMemory> {
    /// A pool in host memory for a model of this shape. All memory is allocated here.
    pub fn open(shape: &ModelShape, options: PoolOptions) -> Result<Arc<Self>, PoolError> {
        Self::open_in(shape, options, HostMemory::allocate)
    }
}

impl<M: DeviceMemory> LoraPool<M> {
    /// A pool in the memory that `allocate` gives, which gets the number of bytes.
    pub fn open_in(
        shape: &ModelShape,
        options: PoolOptions,
        allocate: impl FnOnce(usize) -> Result<M, MemoryError>,
    ) -> Result<Arc<Self>, PoolError> {
        let PoolOptions { num_slots, max_rank, modules, dtype } = options;
        let layout = SlotLayout::new(shape, LayoutOptions { modules, max_rank, dtype })?;
        let placement = FixedStride::new(layout, num_slots)?;
        let table = SiteTable::new(num_slots, placement.layout().num_sites())?;
        let num_bytes = placement.memory_bytes();
        let memory = allocate(num_bytes)?;
        if memory.len_bytes() < num_bytes {
            return Err(MemoryError::OutOfBounds { offset: 0, num_bytes, len_bytes: memory.len_bytes() }.into());
        }
        info!(
            num_slots,
            max_rank,
            slot_bytes = placement.layout().slot_bytes(),
            num_bytes,
            dtype = dtype.name(),
            ?modules,
            num_sites = placement.layout().num_sites(),
            "adapter pool open"
        );
        Ok(Arc::new(LoraPool {
            memory,
            placement,
            state: Mutex::new(PoolState::new(table)),
            load_ended: Condvar::new(),
            last_step: Mutex::new(None),
        }))
    }

    /// Number of slots.
    pub fn num_slots(&self) -> usize {
        self.placement.num_slots()
    }

    /// The layout of every slot.
    pub fn layout(&self) -> &SlotLayout {
        self.placement.layout()
    }

    /// Where the slot table is, and who may read it.
    pub fn table(&self) -> TableRef {
        TableRef {
            address: self.memory.address() + self.placement.table_offset() as u64,
            num_slots: self.num_slots(),
            num_sites: self.layout().num_sites(),
            dtype: self.layout().dtype(),
        }
    }

    /// Resolves a selection and takes a lease on what it names, in one step; none is the base model. Never waits for a
    /// load.
    ///
    /// # Errors
    /// [`PoolError::Selection`] for a name or slot that holds nothing; [`PoolError::LoadUnderWay`] (retry) for a name
    /// that is being loaded.
    pub fn acquire(self: &Arc<Self>, selection: &AdapterSelection) -> Result<Option<Lease>, PoolError> {
        let leased = self.state().acquire(selection)?;
        Ok(leased.map(|leased| Lease::new(self.clone(), leased)))
    }

    /// Drops the generation that `name` points to, which frees its slot and the name.
    ///
    /// # Errors
    /// [`PoolError::NotFound`], [`PoolError::InUse`] (retry), [`PoolError::LoadUnderWay`] (retry), or
    /// [`PoolError::IsActive`]. A pinned adapter is evicted: the pin only keeps it from being a victim.
    pub fn evict(&self, name: &str) -> Result<(), PoolError> {
        let slot = self.state().evict(name)?;
        debug!(name, %slot, "adapter evicted");
        Ok(())
    }

    /// Makes `name` what [`AdapterSelection::Active`] means from now on. Leases already taken stay where they are. The
    /// active adapter is never a victim.
    ///
    /// # Errors
    /// [`PoolError::NotFound`], or [`PoolError::LoadUnderWay`] (retry).
    pub fn set_active(&self, name: &str) -> Result<AdapterId, PoolError> {
        let id = self.state().set_active(name)?;
        debug!(name, %id.generation, "adapter made active");
        Ok(id)
    }

    /// Makes [`AdapterSelection::Active`] mean the base model from now on.
    pub fn clear_active(&self) {
        self.state().clear_active();
    }

    /// Name and generation of the active adapter.
    pub fn active(&self) -> Option<(Arc<str>, AdapterId)> {
        self.state().active()
    }

    /// Keeps `name` from ever being a victim.
    ///
    /// # Errors
    /// [`PoolError::NotFound`], or [`PoolError::LoadUnderWay`] (retry).
    pub fn pin(&self, name: &str) -> Result<(), PoolError> {
        self.state().set_pinned(name, true)
    }

    /// Takes back a [`pin`](Self::pin).
    ///
    /// # Errors
    /// [`PoolError::NotFound`], or [`PoolError::LoadUnderWay`] (retry).
    pub fn unpin(&self, name: &str) -> Result<(), PoolError> {
        self.state().set_pinned(name, false)
    }

    /// What is resident now.
    pub fn snapshot(&self) -> PoolSnapshot {
        self.state().snapshot(self.layout().slot_bytes())
    }

    /// Tells the pool that a step has been launched on `stream`: call it behind every launch, before the leases of the
    /// step are dropped. A slot that falls free later is not written before this step is done.
    ///
    /// All steps of a pool run on one stream. On host memory, where a step is done when its call returns, this does
    /// nothing and may be left out.
    pub fn step_launched(&self, stream: &M::Stream) -> Result<(), PoolError> {
        let fence = Arc::new(self.memory.fence(stream)?);
        *self.last_step.lock().unwrap_or_else(PoisonError::into_inner) = Some(fence);
        Ok(())
    }

    /// The entries of the leased slot, in layout order, as they stand in the slot table.
    ///
    /// # Errors
    /// [`PoolError::ForeignLease`].
    pub fn entries(&self, lease: &Lease) -> Result<Vec<SiteEntry>, PoolError> {
        self.check_lease(lease)?;
        Ok(self.state().table().row(lease.slot())?.to_vec())
    }

    /// The bytes of the leased slot, padding included, read back from the memory. Bytes outside of A and B at their real
    /// ranks mean nothing. Blocks until they are there: not for the step thread.
    ///
    /// # Errors
    /// [`PoolError::ForeignLease`], [`PoolError::Memory`].
    pub fn read_slot(&self, lease: &Lease) -> Result<Vec<u8>, PoolError> {
        self.check_lease(lease)?;
        let mut bytes = vec![0; self.layout().slot_bytes()];
        // SAFETY: a leased slot is not written, and it became resident after its bytes were copied.
        unsafe { self.memory.read(self.placement.slot_offset(lease.slot())?, &mut bytes) }?;
        Ok(bytes)
    }

    fn check_lease(&self, lease: &Lease) -> Result<(), PoolError> {
        match lease.belongs_to(self) {
            true => Ok(()),
            false => Err(PoolError::ForeignLease { name: lease.name().to_owned() }),
        }
    }

    /// The state. No step of the protocol can leave it half changed, so a panic elsewhere does not spoil it.
    fn state(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<M: DeviceMemory> LeaseOwner for LoraPool<M> {
    fn release(&self, leased: &Leased) {
        self.state().release(leased);
    }
}
