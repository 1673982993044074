//! The row metadata of a step: which slot each token row uses, grouped so that every adapter is read once.
//!
//! A worked example with two slots, four rows `[slot 1, base, slot 0, slot 1]` padded to 5 rows:
//!
//! ```text
//! row_slots    [1, -1, 0, 1, -1]
//! entries      [{row 2}, {row 0}, {row 3}]            sorted by (slot, row)
//! groups       [{slot 0, first 0, count 1}, {slot 1, first 1, count 2}]
//! row_offsets  [0, 1, 1, 2, 3, 3]                     row r owns row_entries[row_offsets[r]..row_offsets[r + 1]]
//! row_entries  [1, 0, 2]                              indices into entries, in the request's order
//! ```

use std::ops::Range;

use thiserror::Error;

use crate::abi::{MAX_GROUP_ROWS, RowEntry, RowGroup, row_slot};
use crate::selection::Route;
use crate::site::SlotId;
use crate::tiles::StepTiles;

/// One adapter of one row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowAdapter {
    /// The slot in which the adapter lives.
    pub slot: SlotId,
    /// The request's own scale, 1 unless it says otherwise.
    pub scale: f32,
}

/// A step that cannot be stamped. Nothing of the step before is kept: stamp again before use.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum RowsError {
    /// More rows than the buffers were made for.
    #[error("a step of {rows} rows does not fit: the buffers hold {max_rows}")]
    TooManyRows {
        /// Rows asked for, padding included.
        rows: usize,
        /// Rows that the buffers hold.
        max_rows: usize,
    },
    /// More uses of adapters than the buffers were made for.
    #[error("a step with {entries} adapter uses does not fit: the buffers hold {max_entries}")]
    TooManyEntries {
        /// Uses asked for.
        entries: usize,
        /// Uses that the buffers hold.
        max_entries: usize,
    },
    /// A padded row count below the number of real rows.
    #[error("{rows} rows cannot be padded to {padded_rows}")]
    PaddedTooSmall {
        /// Real rows.
        rows: usize,
        /// Rows asked for, padding included.
        padded_rows: usize,
    },
    /// A row names a slot past the last one.
    #[error("row {row} names {slot}: the pool has {num_slots} slots")]
    SlotOutOfRange {
        /// The row.
        row: usize,
        /// The slot that it names.
        slot: SlotId,
        /// Slots of the pool.
        num_slots: usize,
    },
    /// A row's scale is not a finite number.
    #[error("row {row} names {slot} with scale {scale}")]
    BadScale {
        /// The row.
        row: usize,
        /// The slot that it names.
        slot: SlotId,
        /// Its scale.
        scale: f32,
    },
    /// Tiles that were made of another number of rows.
    #[error("the tiles are of a step of {tiled_rows} rows, not of {rows}")]
    TilesOfOtherRows {
        /// Rows of the step.
        rows: usize,
        /// Rows that the tiles were made of.
        tiled_rows: usize,
    },
}

/// Sizes of the buffers of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowsCapacity {
    /// Token rows, padding included.
    pub max_rows: usize,
    /// Uses of adapters: one a row, or more when requests name several adapters.
    pub max_entries: usize,
    /// Slots of the pool.
    pub num_slots: usize,
}

impl RowsCapacity {
    /// Checks rows against the sizes.
    pub(crate) fn check<R: AsRef<[RowAdapter]>>(self, rows: &[R], padded_rows: usize) -> Result<(), RowsError> {
        let RowsCapacity { max_rows, max_entries, num_slots } = self;
        if padded_rows < rows.len() {
            return Err(RowsError::PaddedTooSmall { rows: rows.len(), padded_rows });
        }
        if padded_rows > max_rows {
            return Err(RowsError::TooManyRows { rows: padded_rows, max_rows });
        }
        let entries = rows.iter().map(|adapters| adapters.as_ref().len()).sum();
        if entries > max_entries {
            return Err(RowsError::TooManyEntries { entries, max_entries });
        }
        for (row, adapters) in rows.iter().enumerate() {
            for &RowAdapter { slot, scale } in adapters.as_ref() {
                if slot.index() >= num_slots {
                    return Err(RowsError::SlotOutOfRange { row, slot, num_slots });
                }
                if !scale.is_finite() {
                    return Err(RowsError::BadScale { row, slot, scale });
                }
            }
        }
        Ok(())
    }
}

/// The row metadata of one step. Buffers are made once at their largest size and refilled each step.
#[derive(Clone, Debug)]
pub struct StepRows {
    capacity: RowsCapacity,
    num_rows: usize,
    row_slots: Vec<i32>,
    entries: Vec<RowEntry>,
    groups: Vec<RowGroup>,
    row_offsets: Vec<u32>,
    row_entries: Vec<u32>,
    /// Scratch: entries of each slot, then the next free place of each slot.
    slot_places: Vec<u32>,
}

impl StepRows {
    /// Buffers of this size; nothing is allocated after this.
    pub fn with_capacity(capacity: RowsCapacity) -> Self {
        StepRows {
            capacity,
            num_rows: 0,
            row_slots: Vec::with_capacity(capacity.max_rows),
            entries: Vec::with_capacity(capacity.max_entries),
            groups: Vec::with_capacity(capacity.max_entries),
            row_offsets: Vec::with_capacity(capacity.max_rows + 1),
            row_entries: Vec::with_capacity(capacity.max_entries),
            slot_places: vec![0; capacity.num_slots],
        }
    }

    /// Fills the metadata of a step whose row `i` uses the adapters `rows[i]` in that order; an empty list is a base
    /// row. The rows after `rows.len()`, up to `padded_rows`, are padding.
    ///
    /// Time is proportional to rows + uses + slots; nothing is allocated.
    pub fn stamp<R: AsRef<[RowAdapter]>>(&mut self, rows: &[R], padded_rows: usize) -> Result<(), RowsError> {
        self.clear();
        self.capacity.check(rows, padded_rows)?;
        self.fill(rows, padded_rows, |_| false);
        Ok(())
    }

    /// As [`stamp`](Self::stamp), but rows that stand in a tile get no entries: what is left for groups where long runs
    /// are worked through as tiles. Their [`row_slots`](Self::row_slots) are the same as without tiles.
    pub fn stamp_beside<R: AsRef<[RowAdapter]>>(
        &mut self,
        rows: &[R],
        padded_rows: usize,
        tiles: &StepTiles,
    ) -> Result<(), RowsError> {
        self.clear();
        self.capacity.check(rows, padded_rows)?;
        if tiles.num_rows() != rows.len() {
            return Err(RowsError::TilesOfOtherRows { rows: rows.len(), tiled_rows: tiles.num_rows() });
        }
        self.fill(rows, padded_rows, |row| tiles.is_tiled(row));
        Ok(())
    }

    fn fill<R: AsRef<[RowAdapter]>>(&mut self, rows: &[R], padded_rows: usize, is_tiled: impl Fn(usize) -> bool) {
        let grouped = |row: usize| if is_tiled(row) { &[][..] } else { rows[row].as_ref() };
        for adapter in (0..rows.len()).flat_map(grouped) {
            self.slot_places[adapter.slot.index()] += 1;
        }
        let mut first = 0u32;
        for (slot, place) in self.slot_places.iter_mut().enumerate() {
            let end = first + *place;
            for first_entry in (first..end).step_by(MAX_GROUP_ROWS) {
                let count = (end - first_entry).min(MAX_GROUP_ROWS as u32);
                self.groups.push(RowGroup { slot: slot as u32, first_entry, count });
            }
            *place = first;
            first = end;
        }

        self.entries.resize(first as usize, RowEntry { row: 0, scale: 0.0 });
        self.row_offsets.push(0);
        for (row, adapters) in rows.iter().enumerate() {
            for adapter in grouped(row) {
                let place = &mut self.slot_places[adapter.slot.index()];
                self.entries[*place as usize] = RowEntry { row: row as u32, scale: adapter.scale };
                self.row_entries.push(*place);
                *place += 1;
            }
            self.row_offsets.push(self.row_entries.len() as u32);
            let route = adapters.as_ref().first().map_or(Route::Base, |adapter| Route::Slot(adapter.slot));
            self.row_slots.push(row_slot(route));
        }
        self.row_slots.resize(padded_rows, row_slot(Route::Base));
        self.row_offsets.resize(padded_rows + 1, first);
        self.num_rows = rows.len();
    }

    fn clear(&mut self) {
        self.num_rows = 0;
        self.row_slots.clear();
        self.entries.clear();
        self.groups.clear();
        self.row_offsets.clear();
        self.row_entries.clear();
        self.slot_places.fill(0);
    }

    /// Sizes of the buffers.
    pub fn capacity(&self) -> RowsCapacity {
        self.capacity
    }

    /// Real rows of the step, without padding.
    pub fn num_rows(&self) -> usize {
        self.num_rows
    }

    /// For each row, padding included: its first slot as kernels read it, −1 = base or padding.
    pub fn row_slots(&self) -> &[i32] {
        &self.row_slots
    }

    /// Uses of adapters, sorted by (slot, row).
    pub fn entries(&self) -> &[RowEntry] {
        &self.entries
    }

    /// Runs of at most [`MAX_GROUP_ROWS`] entries of one slot, covering all entries in order.
    pub fn groups(&self) -> &[RowGroup] {
        &self.groups
    }

    /// For each row, padding included, where its part of [`all_row_entries`](Self::all_row_entries) starts; one more
    /// than rows, the last is the end.
    pub fn row_offsets(&self) -> &[u32] {
        &self.row_offsets
    }

    /// Indices into [`entries`](Self::entries), row after row, within a row in the request's order.
    pub fn all_row_entries(&self) -> &[u32] {
        &self.row_entries
    }

    /// Indices into [`entries`](Self::entries) of one row, in the request's order.
    ///
    /// # Panics
    /// If `row` is not below the padded row count.
    pub fn row_entries(&self, row: usize) -> &[u32] {
        &self.row_entries[self.row_offsets[row] as usize..self.row_offsets[row + 1] as usize]
    }
}

/// A run of consecutive rows that use one slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowRun {
    /// The slot.
    pub slot: SlotId,
    /// The rows.
    pub rows: Range<usize>,
}

/// The runs of a prefill that need another pair than the active one: maximal runs of rows with one and the same slot,
/// base rows and rows of `active` left out. An engine that applies the active pair to the whole prefill in one product
/// applies these beside it; one without an active pair gives none and gets every adapted row.
pub fn routed_runs(routes: &[Route], active: Option<SlotId>) -> Vec<RowRun> {
    let mut runs: Vec<RowRun> = Vec::new();
    for (row, slot) in routes.iter().enumerate().filter_map(|(row, route)| Some((row, route.slot()?))) {
        if Some(slot) == active {
            continue;
        }
        match runs.last_mut() {
            Some(run) if run.slot == slot && run.rows.end == row => run.rows.end = row + 1,
            _ => runs.push(RowRun { slot, rows: row..row + 1 }),
        }
    }
    runs
}

#[cfg(test)]
mod tests;
