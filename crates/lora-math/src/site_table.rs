//! The slot table as the host keeps it: one [`SiteEntry`] for each slot and site.
//!
//! A pool sets a row here first, then writes [`SiteTable::row_bytes`] at [`SiteTable::row_offset`] of the table in
//! device memory. It may leave the row of an emptied slot there as it was, where its protocol keeps steps from reading it.
//! The scale table is this table's `scaling` column: nothing else holds scalings, so none is computed
//! twice. Where A and B stand is the pool's knowledge; this table only carries the addresses.

use thiserror::Error;

use crate::abi::SiteEntry;
use crate::site::SlotId;

/// A row that the table has not, or that it cannot take. Trying again will not help.
#[derive(Clone, Copy, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum SiteTableError {
    /// The slot's number is past the last slot.
    #[error("{slot} is out of range: the table has {num_slots} slots")]
    SlotOutOfRange {
        /// The slot.
        slot: SlotId,
        /// Slots of the table.
        num_slots: usize,
    },
    /// A row needs one entry for each site.
    #[error("{given} entries given for {slot}, which has {expected} sites")]
    RowLength {
        /// The slot.
        slot: SlotId,
        /// Sites of the table.
        expected: usize,
        /// Entries given.
        given: usize,
    },
    /// An entry's scaling is not a finite number.
    #[error("{slot}, site {site}: scaling is {scaling}")]
    BadScaling {
        /// The slot.
        slot: SlotId,
        /// Index of the site.
        site: usize,
        /// Its scaling.
        scaling: f32,
    },
    /// The table does not fit in the address space, or has more slots than kernels can number.
    #[error("a table of {num_slots} slots by {num_sites} sites is too large")]
    TooLarge {
        /// Slots asked for.
        num_slots: usize,
        /// Sites asked for.
        num_sites: usize,
    },
}

/// `[num_slots][num_sites]` entries. An empty slot is a row of [`SiteEntry::EMPTY`].
#[derive(Clone, Debug, PartialEq)]
pub struct SiteTable {
    num_slots: usize,
    num_sites: usize,
    entries: Vec<SiteEntry>,
}

impl SiteTable {
    /// A table whose slots are all empty. `num_sites` is [`SlotLayout::num_sites`](crate::SlotLayout::num_sites).
    pub fn new(num_slots: usize, num_sites: usize) -> Result<Self, SiteTableError> {
        Self::bytes_for(num_slots, num_sites)?;
        Ok(SiteTable { num_slots, num_sites, entries: vec![SiteEntry::EMPTY; num_slots * num_sites] })
    }

    /// Bytes in device memory of a table of this size, or why there cannot be one.
    pub fn bytes_for(num_slots: usize, num_sites: usize) -> Result<usize, SiteTableError> {
        let numbered = i32::try_from(num_slots).is_ok();
        let num_bytes = num_slots.checked_mul(num_sites).and_then(|entries| entries.checked_mul(SiteEntry::BYTES));
        num_bytes
            .filter(|&num_bytes| numbered && isize::try_from(num_bytes).is_ok())
            .ok_or(SiteTableError::TooLarge { num_slots, num_sites })
    }

    /// Slots of the table.
    pub fn num_slots(&self) -> usize {
        self.num_slots
    }

    /// Sites of each slot.
    pub fn num_sites(&self) -> usize {
        self.num_sites
    }

    /// Bytes of the whole table in device memory.
    pub fn table_bytes(&self) -> usize {
        self.entries.len() * SiteEntry::BYTES
    }

    /// The entries of `slot`, in layout order.
    pub fn row(&self, slot: SlotId) -> Result<&[SiteEntry], SiteTableError> {
        let start = self.row_start(slot)?;
        Ok(&self.entries[start..start + self.num_sites])
    }

    /// Replaces the row of `slot`, or leaves the table as it is and says why. An entry of rank 0 becomes
    /// [`SiteEntry::EMPTY`], whatever else it holds.
    pub fn set_row(&mut self, slot: SlotId, row: &[SiteEntry]) -> Result<(), SiteTableError> {
        let start = self.row_start(slot)?;
        if row.len() != self.num_sites {
            return Err(SiteTableError::RowLength { slot, expected: self.num_sites, given: row.len() });
        }
        if let Some(site) = row.iter().position(|entry| entry.rank != 0 && !entry.scaling.is_finite()) {
            return Err(SiteTableError::BadScaling { slot, site, scaling: row[site].scaling });
        }
        for (place, &entry) in self.entries[start..].iter_mut().zip(row) {
            *place = if entry.rank == 0 { SiteEntry::EMPTY } else { entry };
        }
        Ok(())
    }

    /// Empties `slot`.
    pub fn clear_row(&mut self, slot: SlotId) -> Result<(), SiteTableError> {
        let start = self.row_start(slot)?;
        self.entries[start..start + self.num_sites].fill(SiteEntry::EMPTY);
        Ok(())
    }

    /// The row of `slot` byte for byte as it stands in device memory.
    pub fn row_bytes(&self, slot: SlotId) -> Result<Vec<u8>, SiteTableError> {
        Ok(self.row(slot)?.iter().flat_map(|entry| entry.to_bytes()).collect())
    }

    /// Byte offset of the row of `slot` from the start of the table in device memory.
    pub fn row_offset(&self, slot: SlotId) -> Result<usize, SiteTableError> {
        Ok(self.row_start(slot)? * SiteEntry::BYTES)
    }

    /// The scaling of `slot` at the site with index `site`: 0 where the slot is empty, where its adapter does not touch
    /// the site, and outside of the table.
    pub fn scaling(&self, slot: SlotId, site: usize) -> f32 {
        self.row(slot).ok().and_then(|row| row.get(site)).map_or(0.0, |entry| entry.scaling)
    }

    /// The pair of `slot` at the site with index `site` (a layout's [`site_index`](crate::SlotLayout::site_index) of the
    /// layer and module); none where [`scaling`](Self::scaling) is 0 for lack of a pair.
    pub fn pair(&self, slot: SlotId, site: usize) -> Option<SiteEntry> {
        self.row(slot).ok()?.get(site).copied().filter(|entry| entry.rank != 0)
    }

    /// Index of the first entry of `slot`.
    fn row_start(&self, slot: SlotId) -> Result<usize, SiteTableError> {
        if slot.index() < self.num_slots {
            Ok(slot.index() * self.num_sites)
        } else {
            Err(SiteTableError::SlotOutOfRange { slot, num_slots: self.num_slots })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(rank: u32, scaling: f32) -> SiteEntry {
        SiteEntry { a: 0x1122_3344_5566_7788, b: 64, rank, scaling }
    }

    #[test]
    fn an_empty_table_scales_by_zero() -> Result<(), SiteTableError> {
        let table = SiteTable::new(3, 2)?;
        assert_eq!((table.table_bytes(), SiteTable::bytes_for(3, 2)), (3 * 2 * 24, Ok(3 * 2 * 24)));
        assert_eq!(table.row(SlotId::new(2))?, [SiteEntry::EMPTY; 2]);
        assert_eq!(table.scaling(SlotId::new(2), 1), 0.0);
        assert_eq!(table.scaling(SlotId::new(3), 0), 0.0);
        assert_eq!(table.scaling(SlotId::new(0), 2), 0.0);
        Ok(())
    }

    #[test]
    fn a_row_is_set_read_and_cleared_alone() -> Result<(), SiteTableError> {
        let mut table = SiteTable::new(3, 2)?;
        let slot = SlotId::new(1);
        table.set_row(slot, &[entry(4, 2.0), entry(0, f32::NAN)])?;
        assert_eq!((table.scaling(slot, 0), table.scaling(slot, 1)), (2.0, 0.0));
        assert_eq!(table.row(slot)?, [entry(4, 2.0), SiteEntry::EMPTY]);
        assert_eq!((table.pair(slot, 0), table.pair(slot, 1)), (Some(entry(4, 2.0)), None));
        assert_eq!((table.pair(slot, 2), table.pair(SlotId::new(9), 0)), (None, None));
        for other in [SlotId::new(0), SlotId::new(2)] {
            assert_eq!(table.row(other)?, [SiteEntry::EMPTY; 2]);
        }
        assert_eq!(table.row_offset(slot)?, 48);
        let bytes = table.row_bytes(slot)?;
        assert_eq!(bytes.len(), 48);
        assert_eq!(bytes[..8], [0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11]);
        assert_eq!(bytes[8..24], [64, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0x40]);
        assert_eq!(bytes[24..], [0; 24]);
        table.set_row(SlotId::new(2), &[entry(1, 1.0); 2])?;
        table.clear_row(slot)?;
        assert_eq!(table.row(SlotId::new(2))?, [entry(1, 1.0); 2]);
        table.clear_row(SlotId::new(2))?;
        assert_eq!(table, SiteTable::new(3, 2)?);
        Ok(())
    }

    #[test]
    fn a_bad_row_changes_nothing() -> Result<(), SiteTableError> {
        let mut table = SiteTable::new(2, 2)?;
        let slot = SlotId::new(0);
        table.set_row(slot, &[entry(4, 2.0), entry(8, 1.0)])?;
        let before = table.clone();
        assert_eq!(
            table.set_row(slot, &[entry(4, 2.0)]),
            Err(SiteTableError::RowLength { slot, expected: 2, given: 1 })
        );
        let bad = f32::INFINITY;
        assert_eq!(
            table.set_row(slot, &[entry(1, 1.0), entry(1, bad)]),
            Err(SiteTableError::BadScaling { slot, site: 1, scaling: bad })
        );
        let far = SlotId::new(2);
        let out_of_range = SiteTableError::SlotOutOfRange { slot: far, num_slots: 2 };
        assert_eq!(table.set_row(far, &[entry(1, 1.0); 2]), Err(out_of_range));
        assert_eq!(table.clear_row(far), Err(out_of_range));
        assert_eq!(table.row_bytes(far), Err(out_of_range));
        assert_eq!(table, before);
        assert!(matches!(SiteTable::new(usize::MAX, 2), Err(SiteTableError::TooLarge { .. })));
        assert!(matches!(SiteTable::new(1, usize::MAX / 24), Err(SiteTableError::TooLarge { .. })));
        assert!(matches!(SiteTable::new(1 << 31, 0), Err(SiteTableError::TooLarge { .. })));
        Ok(())
    }
}
