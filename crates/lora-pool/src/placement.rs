//! Where slots and table stand in the pool's memory: slots at fixed stride from offset 0, then the table.
//!
//! ```text
//!   0              slot_bytes                num_slots · slot_bytes
//!   ├── slot 0 ────┼── slot 1 ────┼─ ··· ────┼── SiteEntry[num_slots][num_sites] ──┤
//! ```
//!
//! Slot 0 at 0 and a stride that only the layout decides let a peer compute every address from a slot's number. Where a
//! row stands in the table is [`SiteTable`]'s to say.

use lora_math::{SiteTable, SlotId, SlotLayout};

use crate::error::PoolError;

/// Slots at fixed stride, each large enough for every site at the layout's `max_rank`, and their table: what a pool takes,
/// known before any memory is allocated.
#[derive(Clone, Debug)]
pub struct FixedStride {
    layout: SlotLayout,
    num_slots: usize,
    table_offset: usize,
    table_bytes: usize,
    memory_bytes: usize,
}

impl FixedStride {
    /// Places `num_slots` slots of `layout`, at least one.
    ///
    /// # Errors
    /// [`PoolError::NoSlots`], [`PoolError::TooManySlots`].
    pub fn new(layout: SlotLayout, num_slots: usize) -> Result<Self, PoolError> {
        let slot_bytes = layout.slot_bytes();
        let too_many = PoolError::TooManySlots { num_slots, slot_bytes };
        if num_slots == 0 {
            return Err(PoolError::NoSlots);
        }
        let table_bytes = SiteTable::bytes_for(num_slots, layout.num_sites()).ok();
        let table_offset = num_slots.checked_mul(slot_bytes);
        let (Some(table_bytes), Some(table_offset)) = (table_bytes, table_offset) else {
            return Err(too_many);
        };
        let memory_bytes = table_offset.checked_add(table_bytes).filter(|&bytes| isize::try_from(bytes).is_ok());
        let memory_bytes = memory_bytes.ok_or(too_many)?;
        Ok(FixedStride { layout, num_slots, table_offset, table_bytes, memory_bytes })
    }

    /// The layout of every slot.
    pub fn layout(&self) -> &SlotLayout {
        &self.layout
    }

    /// Number of slots.
    pub fn num_slots(&self) -> usize {
        self.num_slots
    }

    /// Bytes of slots and table together.
    pub fn memory_bytes(&self) -> usize {
        self.memory_bytes
    }

    /// Byte offset of the table.
    pub(crate) fn table_offset(&self) -> usize {
        self.table_offset
    }

    /// Bytes of the table.
    pub fn table_bytes(&self) -> usize {
        self.table_bytes
    }

    /// Bytes that one slot takes with its row of the table: [`memory_bytes`](Self::memory_bytes) is this times the slots.
    pub fn bytes_per_slot(&self) -> usize {
        self.memory_bytes / self.num_slots
    }

    /// Byte offset of the image in `slot`.
    pub(crate) fn slot_offset(&self, slot: SlotId) -> Result<usize, PoolError> {
        Ok(self.layout.slot_base_offset(slot)?)
    }
}
