//! Where slots and table stand in the pool's memory: slots at fixed stride from offset 0, then the table.
//!
//! ```text
//!   0              slot_bytes                num_slots · slot_bytes
//!   ├── slot 0 ────┼── slot 1 ────┼─ ··· ────┼── SiteEntry[num_slots][num_sites] ──┤
//! ```
//!
//! Slot 0 at 0 and a stride that only the layout decides let a peer compute every address from a slot's number.

use lora_math::{SiteEntry, SlotId, SlotLayout};

use crate::error::PoolError;

/// Slots at fixed stride, each large enough for every site at the layout's `max_rank`.
#[derive(Debug)]
pub(crate) struct FixedStride {
    layout: SlotLayout,
    num_slots: usize,
    table_offset: usize,
    memory_bytes: usize,
}

impl FixedStride {
    /// Places `num_slots` slots of `layout`, at least one.
    pub(crate) fn new(layout: SlotLayout, num_slots: usize) -> Result<Self, PoolError> {
        let slot_bytes = layout.slot_bytes();
        let too_many = PoolError::TooManySlots { num_slots, slot_bytes };
        if num_slots == 0 {
            return Err(PoolError::NoSlots);
        }
        // A kernel's row slot is an i32.
        if i32::try_from(num_slots).is_err() {
            return Err(too_many);
        }
        let table_bytes = num_slots.checked_mul(layout.num_sites()).and_then(|n| n.checked_mul(SiteEntry::BYTES));
        let table_offset = num_slots.checked_mul(slot_bytes);
        let (Some(table_bytes), Some(table_offset)) = (table_bytes, table_offset) else {
            return Err(too_many);
        };
        let memory_bytes = table_offset.checked_add(table_bytes).filter(|&bytes| isize::try_from(bytes).is_ok());
        let memory_bytes = memory_bytes.ok_or(too_many)?;
        Ok(FixedStride { layout, num_slots, table_offset, memory_bytes })
    }

    pub(crate) fn layout(&self) -> &SlotLayout {
        &self.layout
    }

    pub(crate) fn num_slots(&self) -> usize {
        self.num_slots
    }

    /// Bytes of slots and table together.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.memory_bytes
    }

    /// Byte offset of the table.
    pub(crate) fn table_offset(&self) -> usize {
        self.table_offset
    }

    /// Byte offset of the row of `slot`.
    pub(crate) fn row_offset(&self, slot: SlotId) -> usize {
        self.table_offset + slot.index() * self.layout.num_sites() * SiteEntry::BYTES
    }

    /// Byte offset of the image in `slot`.
    pub(crate) fn slot_offset(&self, slot: SlotId) -> Result<usize, PoolError> {
        Ok(self.layout.slot_base_offset(slot)?)
    }
}
