//! The pool: slots in one memory, and the protocol by which adapters come and go in them.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use lora_adapter::PreparedAdapter;
use lora_math::{AdapterId, AdapterSelection, ContentDigest, LayoutOptions, ModelShape, SiteTable, SlotId, SlotLayout};
use tracing::{debug, debug_span, info};

use crate::counters::Counters;
use crate::error::PoolError;
use crate::host::{HostMemory, HostStream};
use crate::host_tier::{HostImage, HostTier};
use crate::image::packed_layout;
use crate::landing::{Reservation, Staged};
use crate::lease::{Lease, LeaseOwner, Leased};
use crate::memory::{DeviceMemory, MemoryError};
use crate::options::PoolOptions;
use crate::placement::FixedStride;
use crate::snapshot::PoolSnapshot;
use crate::state::{Existing, Installed, Loading, PoolState, Reserved};
use crate::steps::Steps;
use crate::table::TableRef;

/// Longest name of an adapter, in bytes.
pub const MAX_NAME_BYTES: usize = 256;

/// Slots for resident adapters, in one block of memory at a fixed address.
///
/// All calls may be made from any thread. The mutex of the state is held for lookups and changes of state only, never while
/// an adapter is packed or copied or a fence is made, so [`acquire`](Self::acquire) never waits for a load.
pub struct LoraPool<M: DeviceMemory = HostMemory> {
    memory: M,
    placement: FixedStride,
    state: Mutex<PoolState>,
    /// Notified when a load ends, well or not.
    load_ended: Condvar,
    /// Notified when a retired generation leaves its slot.
    slot_freed: Condvar,
    /// The last step that the engine told of. Locked before `state` where both are.
    steps: Mutex<Steps<M>>,
    host_tier: HostTier<M>,
    counters: Counters,
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
        let PoolOptions { num_slots, max_rank, modules, dtype, host_bytes } = options;
        let layout = SlotLayout::new(shape, LayoutOptions { modules, max_rank, dtype })?;
        let placement = FixedStride::new(layout, num_slots)?;
        let table = SiteTable::new(placement.num_slots(), placement.layout().num_sites())?;
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
            host_bytes,
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
            slot_freed: Condvar::new(),
            steps: Mutex::new(Steps::new()),
            host_tier: HostTier::new(host_bytes),
            counters: Counters::default(),
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

    /// Packs an adapter and starts copying it into a slot, evicting a victim where no slot is free. It becomes
    /// resident under `name` by [`Landing::publish`](crate::Landing::publish): this call is for a loader
    /// thread, that one for the step thread.
    ///
    /// A name points to one generation: the same contents again are [`Staged::Resident`], and nothing is packed
    /// or copied. Names are compared byte by byte.
    ///
    /// # Errors
    /// Nothing is evicted before the image is packed, and nothing is ever half installed.
    /// - worth a retry: [`PoolError::Full`] (unless all slots are pinned), [`PoolError::LoadUnderWay`],
    ///   [`PoolError::StepUnfenced`];
    /// - the name: [`PoolError::EmptyName`], [`PoolError::NameTooLong`], [`PoolError::NameTaken`];
    /// - the adapter: [`PoolError::UncoveredSites`], [`PoolError::TooLarge`], [`PoolError::FeatureMismatch`],
    ///   [`PoolError::Narrowing`];
    /// - the device: [`PoolError::Memory`].
    pub fn stage(self: &Arc<Self>, name: &str, prepared: &PreparedAdapter) -> Result<Staged<M>, PoolError> {
        self.stage_as(name, prepared, Existing::Keep)
    }

    /// Stages, and does with a name that points to other contents as `existing` says.
    pub(crate) fn stage_as(
        self: &Arc<Self>,
        name: &str,
        prepared: &PreparedAdapter,
        existing: Existing,
    ) -> Result<Staged<M>, PoolError> {
        let _span = debug_span!("stage adapter", name, ?existing).entered();
        let name = checked_name(name)?;
        let packed = packed_layout(prepared, self.layout())?;
        let reserved = self.state().reserve(&name, prepared.content(), Loading::Staged, existing)?;
        self.land(name, reserved, existing, || self.image_of(prepared, packed))
    }

    /// Loads an adapter under `name`: [`stage`](Self::stage), then [`publish`](crate::Landing::publish) on
    /// `stream`. Waits while another thread runs a load of the name. It may be evicted as soon as this returns: a caller
    /// that uses it takes [`load_leased_on`](Self::load_leased_on).
    ///
    /// # Errors
    /// Those of [`stage`](Self::stage). [`PoolError::LoadUnderWay`] only where the name belongs to a staged
    /// [`Landing`](crate::Landing): when that ends is its holder's to say, so this does not wait for it.
    pub fn load_on(
        self: &Arc<Self>,
        name: &str,
        prepared: &PreparedAdapter,
        stream: &M::Stream,
    ) -> Result<AdapterId, PoolError> {
        Ok(self.load_leased_on(name, prepared, stream)?.id())
    }

    /// [`load_on`](Self::load_on), and takes a lease in the same step: nobody can evict it in between.
    ///
    /// # Errors
    /// Those of [`load_on`](Self::load_on).
    pub fn load_leased_on(
        self: &Arc<Self>,
        name: &str,
        prepared: &PreparedAdapter,
        stream: &M::Stream,
    ) -> Result<Lease, PoolError> {
        let (lease, _) = self.load_as(name, prepared, Existing::Keep, stream)?;
        Ok(lease)
    }

    /// Loads with a lease, and does with a name that points to other contents as `existing` says. Gives what the name
    /// pointed to before too.
    pub(crate) fn load_as(
        self: &Arc<Self>,
        name: &str,
        prepared: &PreparedAdapter,
        existing: Existing,
        stream: &M::Stream,
    ) -> Result<(Lease, Option<AdapterId>), PoolError> {
        let _span = debug_span!("load adapter", name, ?existing).entered();
        let name = checked_name(name)?;
        let packed = packed_layout(prepared, self.layout())?;
        let reserved = self.reserve_waiting(&name, prepared.content(), existing)?;
        match self.land(name, reserved, existing, || self.image_of(prepared, packed))? {
            Staged::Resident(lease) => {
                let id = lease.id();
                Ok((lease, Some(id)))
            }
            Staged::Landing(landing) => {
                let Installed { leased, replaced } = landing.install(stream)?;
                Ok((Lease::new(self.clone(), leased), replaced))
            }
        }
    }

    fn reserve_waiting(
        &self,
        name: &Arc<str>,
        content: ContentDigest,
        existing: Existing,
    ) -> Result<Reserved, PoolError> {
        let mut state = self.state();
        loop {
            match state.reserve(name, content, Loading::Running, existing)? {
                Reserved::UnderWay(Loading::Running) => {
                    state = self.load_ended.wait(state).unwrap_or_else(PoisonError::into_inner)
                }
                reserved => return Ok(reserved),
            }
        }
    }

    /// Goes on with a name as it was reserved; `image` is asked for only if there is something to copy.
    pub(crate) fn land(
        self: &Arc<Self>,
        name: Arc<str>,
        reserved: Reserved,
        existing: Existing,
        image: impl FnOnce() -> Result<Arc<HostImage<M>>, PoolError>,
    ) -> Result<Staged<M>, PoolError> {
        match reserved {
            Reserved::Resident(leased) => Ok(Staged::Resident(Lease::new(self.clone(), leased))),
            Reserved::UnderWay(_) => Err(PoolError::LoadUnderWay { name: name.to_string() }),
            Reserved::New => {
                let reservation = Reservation::new(self.clone(), name, existing);
                // A load that would find no slot anyway is refused before it packs.
                self.steps().fence()?;
                self.state().choose_slot()?;
                Ok(Staged::Landing(reservation.land(&*image()?)?))
            }
        }
    }

    /// Resolves a selection and takes a lease on what it names, in one step; none is the base model. Never
    /// waits for a load.
    ///
    /// # Errors
    /// [`PoolError::Selection`] for a name or slot that holds nothing; [`PoolError::LoadUnderWay`] (retry) for a name
    /// that is being loaded.
    pub fn acquire(self: &Arc<Self>, selection: &AdapterSelection) -> Result<Option<Lease>, PoolError> {
        let leased = self.state().acquire(selection);
        self.counters.acquired(&leased);
        Ok(leased?.map(|leased| Lease::new(self.clone(), leased)))
    }

    /// Drops the generation that `name` points to, which frees its slot and the name.
    ///
    /// # Errors
    /// [`PoolError::NotFound`], [`PoolError::InUse`] (retry), [`PoolError::LoadUnderWay`] (retry), or
    /// [`PoolError::IsActive`]. A pinned adapter is evicted: the pin only keeps it from being a victim.
    pub fn evict(&self, name: &str) -> Result<(), PoolError> {
        let slot = self.state().evict(name)?;
        self.counters.evicted();
        debug!(name, %slot, "adapter evicted");
        Ok(())
    }

    /// Makes `name` what [`AdapterSelection::Active`] means from now on. Leases already taken stay where they
    /// are. The active adapter is never a victim.
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
        self.state().active_adapter()
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

    /// Tells the pool that a step has been launched on `stream`: call it behind every launch, before the leases
    /// of the step are dropped. A slot that falls free later is not written before this step is done.
    ///
    /// All steps of a pool run on one stream. On host memory, where a step is done when its call returns, this does
    /// nothing and may be left out.
    ///
    /// # Errors
    /// [`PoolError::Memory`]: nothing stands behind the step, so until a later call succeeds no slot is written, and
    /// loads are refused with [`PoolError::StepUnfenced`]. Leases may be dropped all the same.
    pub fn step_launched(&self, stream: &M::Stream) -> Result<(), PoolError> {
        Ok(self.steps().launched(&self.memory, stream)?)
    }

    /// What has happened so far.
    pub(crate) fn count(&self) -> &Counters {
        &self.counters
    }

    /// The images in host memory.
    pub(crate) fn host_tier(&self) -> &HostTier<M> {
        &self.host_tier
    }

    /// The memory of slots and table.
    pub(crate) fn memory(&self) -> &M {
        &self.memory
    }

    /// Where slots and table stand in it.
    pub(crate) fn placement(&self) -> &FixedStride {
        &self.placement
    }

    /// Takes a slot for a landing, with the fence behind every step that may still read it, and the victim's name if
    /// there was one.
    pub(crate) fn take_slot(&self) -> Result<TakenSlot<M>, PoolError> {
        // Held while the slot is taken: whoever used the slot last told of that step before giving its lease back, so
        // before this; and a fence that fails from now on is of a step that cannot read the slot.
        let steps = self.steps();
        let fence = steps.fence()?;
        let (slot, victim) = self.state().take_slot()?;
        self.counters.took_slot(victim.is_some());
        Ok(TakenSlot { slot, victim, fence })
    }

    fn steps(&self) -> MutexGuard<'_, Steps<M>> {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until this generation has left its slot.
    pub(crate) fn wait_gone(&self, slot: SlotId, id: AdapterId) {
        let mut state = self.state();
        while state.holds(slot, id) {
            state = self.slot_freed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Wakes those who wait for a load of a name.
    pub(crate) fn notify_load_ended(&self) {
        self.load_ended.notify_all();
    }

    /// The state. No step of the protocol can leave it half changed, so a panic elsewhere does not spoil it.
    pub(crate) fn state(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<M: DeviceMemory<Stream = HostStream>> LoraPool<M> {
    /// [`load_on`](Self::load_on) the host's one stream.
    ///
    /// # Errors
    /// Those of [`load_on`](Self::load_on).
    pub fn load(self: &Arc<Self>, name: &str, prepared: &PreparedAdapter) -> Result<AdapterId, PoolError> {
        self.load_on(name, prepared, &HostStream)
    }

    /// [`load_leased_on`](Self::load_leased_on) the host's one stream.
    ///
    /// # Errors
    /// Those of [`load_on`](Self::load_on).
    pub fn load_leased(self: &Arc<Self>, name: &str, prepared: &PreparedAdapter) -> Result<Lease, PoolError> {
        self.load_leased_on(name, prepared, &HostStream)
    }
}

/// A slot that a landing has just taken.
pub(crate) struct TakenSlot<M: DeviceMemory> {
    pub(crate) slot: SlotId,
    /// Name of the victim that left for it.
    pub(crate) victim: Option<Arc<str>>,
    /// Behind the last step.
    pub(crate) fence: Option<Arc<M::StepFence>>,
}

/// The name, if it can be one.
pub(crate) fn checked_name(name: &str) -> Result<Arc<str>, PoolError> {
    match name.len() {
        0 => Err(PoolError::EmptyName),
        num_bytes if num_bytes > MAX_NAME_BYTES => Err(PoolError::NameTooLong { num_bytes, limit: MAX_NAME_BYTES }),
        _ => Ok(name.into()),
    }
}

impl<M: DeviceMemory> fmt::Debug for LoraPool<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoraPool").field("table", &self.table()).field("snapshot", &self.snapshot()).finish()
    }
}

impl<M: DeviceMemory> LeaseOwner for LoraPool<M> {
    fn release(&self, leased: &Leased) {
        let freed = self.state().release(leased);
        if freed {
            debug!(name = &*leased.name, slot = %leased.slot, "retired adapter gone");
            self.slot_freed.notify_all();
        }
    }
}
