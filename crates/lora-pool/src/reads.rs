//! What a pool tells of a slot to those who hold a lease on it, and to reports.

use lora_math::{Site, SiteEntry, SlotId};

use crate::error::PoolError;
use crate::lease::Lease;
use crate::memory::DeviceMemory;
use crate::pool::LoraPool;

impl<M: DeviceMemory> LoraPool<M> {
    /// The entries of the leased slot, in layout order, as they stand in the slot table.
    ///
    /// # Errors
    /// [`PoolError::ForeignLease`].
    pub fn entries(&self, lease: &Lease) -> Result<Vec<SiteEntry>, PoolError> {
        self.check_lease(lease)?;
        Ok(self.state().table().row(lease.slot())?.to_vec())
    }

    /// The scaling in `slot` at `site`, at this moment: 0 where nothing is resident, where the resident adapter
    /// lacks the site, and outside of the pool. For reports; a step reads the table.
    pub fn scaling(&self, slot: SlotId, site: Site) -> f32 {
        let index = self.layout().site_index(site);
        index.map_or(0.0, |index| self.state().scaling(slot, index))
    }

    /// The bytes of the leased slot, padding included, read back from the memory. Bytes outside of A and B at
    /// their real ranks mean nothing. Blocks until they are there: not for the step thread.
    ///
    /// # Errors
    /// [`PoolError::ForeignLease`], [`PoolError::Memory`].
    pub fn read_slot(&self, lease: &Lease) -> Result<Vec<u8>, PoolError> {
        self.check_lease(lease)?;
        let mut bytes = vec![0; self.layout().slot_bytes()];
        // SAFETY: a leased slot is not written, and it became resident after its bytes were copied.
        unsafe { self.memory().read(self.placement().slot_offset(lease.slot())?, &mut bytes) }?;
        Ok(bytes)
    }

    fn check_lease(&self, lease: &Lease) -> Result<(), PoolError> {
        match lease.belongs_to(self) {
            true => Ok(()),
            false => Err(PoolError::ForeignLease { name: lease.name().to_owned() }),
        }
    }
}
