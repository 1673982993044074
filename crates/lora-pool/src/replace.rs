//! Names that move on: a generation replaced by another, or taken from its name, while sequences use it.

use std::fmt;
use std::sync::Arc;

use lora_adapter::PreparedAdapter;
use lora_math::{AdapterId, SlotId};
use tracing::debug;

use crate::error::PoolError;
use crate::host::HostStream;
use crate::landing::Staged;
use crate::memory::DeviceMemory;
use crate::pool::LoraPool;
use crate::state::Existing;

impl From<Option<AdapterId>> for Existing {
    fn from(expected: Option<AdapterId>) -> Self {
        expected.map_or(Existing::Replace, Existing::ReplaceOnly)
    }
}

/// The outcome of a replacement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replaced {
    /// What the name points to now.
    pub id: AdapterId,
    /// What it pointed to before; none where it pointed to nothing, and equal to `id` where the contents were there already.
    pub previous: Option<AdapterId>,
}

/// A generation that no name points to any more, on its way out. Dropping this changes nothing: the generation leaves with
/// its last lease all the same.
#[must_use = "tells when the slot is free"]
pub struct Unloading<M: DeviceMemory> {
    pub(crate) pool: Arc<LoraPool<M>>,
    pub(crate) slot: SlotId,
    pub(crate) id: AdapterId,
}

impl<M: DeviceMemory> Unloading<M> {
    /// The generation.
    pub fn id(&self) -> AdapterId {
        self.id
    }

    /// Whether it has left its slot.
    pub fn is_done(&self) -> bool {
        !self.pool.state().holds(self.slot, self.id)
    }

    /// Waits until it has left its slot: until everyone who holds a lease on it has dropped it. Not for a thread that holds
    /// one itself.
    pub fn wait(&self) {
        self.pool.wait_gone(self.slot, self.id);
    }
}

impl<M: DeviceMemory> fmt::Debug for Unloading<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Unloading").field("slot", &self.slot).field("id", &self.id).finish_non_exhaustive()
    }
}

impl<M: DeviceMemory> LoraPool<M> {
    /// As [`stage`](Self::stage), for a name that may point to other contents already: once the landing is published, the
    /// name points to the new generation. Until then, and if the load fails, it points to the old one, which is never the
    /// victim for it. Sequences that hold the old generation keep it to their end.
    ///
    /// With `expected`, only that generation is replaced. The same contents again are [`Staged::Resident`].
    ///
    /// # Errors
    /// Those of [`stage`](Self::stage), without [`PoolError::NameTaken`]; [`PoolError::WrongGeneration`].
    pub fn stage_replace(
        self: &Arc<Self>,
        name: &str,
        prepared: &PreparedAdapter,
        expected: Option<AdapterId>,
    ) -> Result<Staged<M>, PoolError> {
        self.stage_as(name, prepared, expected.into())
    }

    /// Makes `name` point to these contents, whatever it pointed to before, or with `expected` only if it points to that
    /// generation: [`stage_replace`](Self::stage_replace), then a publication on `stream`. Waits while another thread runs a
    /// load of the name.
    ///
    /// The name is never without a generation, and a failure leaves it as it was. Sequences that hold the old generation keep
    /// it to their end, in its own slot: a replacement needs one more.
    ///
    /// # Errors
    /// Those of [`stage_replace`](Self::stage_replace).
    pub fn replace_on(
        self: &Arc<Self>,
        name: &str,
        prepared: &PreparedAdapter,
        expected: Option<AdapterId>,
        stream: &M::Stream,
    ) -> Result<Replaced, PoolError> {
        let (lease, previous) = self.load_as(name, prepared, expected.into(), stream)?;
        Ok(Replaced { id: lease.id(), previous })
    }

    /// Takes `name` from its generation: from now on nothing finds it, and the name is free. The generation leaves, and its
    /// slot with it, when the last lease on it is dropped: at once where there is none. [`evict`](Self::evict) refuses
    /// instead while there are leases.
    ///
    /// # Errors
    /// [`PoolError::NotFound`], [`PoolError::LoadUnderWay`] (retry), or [`PoolError::IsActive`].
    pub fn unload(self: &Arc<Self>, name: &str) -> Result<Unloading<M>, PoolError> {
        let (slot, id) = self.state().unload(name)?;
        self.count().unloaded();
        debug!(name, %slot, generation = id.generation.number(), "adapter unloaded");
        Ok(Unloading { pool: self.clone(), slot, id })
    }
}

impl<M: DeviceMemory<Stream = HostStream>> LoraPool<M> {
    /// [`replace_on`](Self::replace_on) the host's one stream.
    ///
    /// # Errors
    /// Those of [`replace_on`](Self::replace_on).
    pub fn replace(
        self: &Arc<Self>,
        name: &str,
        prepared: &PreparedAdapter,
        expected: Option<AdapterId>,
    ) -> Result<Replaced, PoolError> {
        self.replace_on(name, prepared, expected, &HostStream)
    }
}
