//! The long runs of a step, as in prefill: consecutive rows with the same adapters, cut into tiles that read every adapter
//! once. What is too short for a tile is left to the groups of [`StepRows`](crate::StepRows).
//!
//! A worked example with tiles from 3 rows on in place of 9: rows `[slot 1, slot 1, slot 1, base, slot 0]`
//!
//! ```text
//! tiles   [{first_row 0, num_rows 3, first_use 0, num_uses 1, first_entry 0}]
//! uses    [{slot 1}]
//! ```
//!
//! and [`StepRows::stamp_beside`](crate::StepRows::stamp_beside) has an entry for row 4 alone.

use crate::abi::{MAX_GROUP_ROWS, MAX_TILE_ROWS, RowTile, TileUse};
use crate::rows::{RowAdapter, RowsCapacity, RowsError};

/// Fewest rows of a run that becomes tiles: shorter ones fit in one group, which reads an adapter once as well.
pub const MIN_TILED_ROWS: usize = MAX_GROUP_ROWS + 1;

/// The tiles of one step. Buffers are made once at their largest size and refilled each step.
#[derive(Clone, Debug)]
pub struct StepTiles {
    capacity: RowsCapacity,
    tiles: Vec<RowTile>,
    uses: Vec<TileUse>,
    tiled: Vec<bool>,
    num_entries: usize,
}

impl StepTiles {
    /// Buffers for steps of this size; nothing is allocated after this.
    pub fn with_capacity(capacity: RowsCapacity) -> Self {
        StepTiles {
            capacity,
            tiles: Vec::with_capacity(Self::max_tiles(capacity)),
            uses: Vec::with_capacity(Self::max_uses(capacity)),
            tiled: Vec::with_capacity(capacity.max_rows),
            num_entries: 0,
        }
    }

    /// Tiles that a step of this size has at most: no run of fewer rows becomes one, and a long run has the fewest tiles
    /// for its rows.
    pub fn max_tiles(capacity: RowsCapacity) -> usize {
        capacity.max_rows / MIN_TILED_ROWS
    }

    /// Uses of adapters by tiles that a step of this size has at most: each stands for at least as many uses by rows as
    /// the shortest run has rows, on an average over the tiles of its run.
    pub fn max_uses(capacity: RowsCapacity) -> usize {
        capacity.max_entries / MIN_TILED_ROWS
    }

    /// Finds the tiles of a step whose row `i` uses the adapters `rows[i]` in that order: maximal runs of at least
    /// [`MIN_TILED_ROWS`] consecutive rows with the same adapters and scales, in pieces of at most [`MAX_TILE_ROWS`].
    /// Base rows stand in no tile. Nothing is allocated.
    ///
    /// # Errors
    /// Rows that do not fit the capacity, as [`StepRows::stamp`](crate::StepRows::stamp).
    pub fn stamp<R: AsRef<[RowAdapter]>>(&mut self, rows: &[R]) -> Result<(), RowsError> {
        self.tiles.clear();
        self.uses.clear();
        self.tiled.clear();
        self.num_entries = 0;
        self.capacity.check(rows, rows.len())?;
        self.tiled.resize(rows.len(), false);
        let mut start = 0;
        while start < rows.len() {
            let adapters = rows[start].as_ref();
            let same = |row: &&R| same_adapters(row.as_ref(), adapters);
            let end = start + rows[start..].iter().take_while(same).count();
            if !adapters.is_empty() && end - start >= MIN_TILED_ROWS {
                self.tiled[start..end].fill(true);
                for first_row in (start..end).step_by(MAX_TILE_ROWS) {
                    self.push(first_row, (end - first_row).min(MAX_TILE_ROWS), adapters);
                }
            }
            start = end;
        }
        Ok(())
    }

    fn push(&mut self, first_row: usize, num_rows: usize, adapters: &[RowAdapter]) {
        self.tiles.push(RowTile {
            first_row: first_row as u32,
            num_rows: num_rows as u32,
            first_use: self.uses.len() as u32,
            num_uses: adapters.len() as u32,
            first_entry: self.num_entries as u32,
        });
        self.uses.extend(adapters.iter().map(|adapter| TileUse { slot: adapter.slot.raw(), scale: adapter.scale }));
        self.num_entries += num_rows * adapters.len();
    }

    /// Sizes of the buffers.
    pub fn capacity(&self) -> RowsCapacity {
        self.capacity
    }

    /// Rows of the step that the tiles were made of, without padding.
    pub fn num_rows(&self) -> usize {
        self.tiled.len()
    }

    /// Whether a row stands in a tile.
    ///
    /// # Panics
    /// If `row` is not below [`num_rows`](Self::num_rows).
    pub fn is_tiled(&self, row: usize) -> bool {
        self.tiled[row]
    }

    /// The tiles, in the order of their rows.
    pub fn tiles(&self) -> &[RowTile] {
        &self.tiles
    }

    /// The adapters of the tiles, tile after tile, within a tile in the request's order.
    pub fn uses(&self) -> &[TileUse] {
        &self.uses
    }

    /// Values between shrink and expand: rows times uses, over all tiles.
    pub fn num_entries(&self) -> usize {
        self.num_entries
    }
}

/// Whether two rows use the same adapters with the same scales, to the bit, in the same order.
fn same_adapters(a: &[RowAdapter], b: &[RowAdapter]) -> bool {
    let key = |adapter: &RowAdapter| (adapter.slot, adapter.scale.to_bits());
    a.len() == b.len() && a.iter().map(key).eq(b.iter().map(key))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::rows::StepRows;
    use crate::site::SlotId;

    const CAPACITY: RowsCapacity = RowsCapacity { max_rows: 300, max_entries: 600, num_slots: 4 };

    fn runs(lengths: &[(usize, &[(u32, f32)])]) -> Vec<Vec<RowAdapter>> {
        let row = |uses: &[(u32, f32)]| -> Vec<RowAdapter> {
            uses.iter().map(|&(slot, scale)| RowAdapter { slot: SlotId::new(slot), scale }).collect()
        };
        lengths.iter().flat_map(|&(count, uses)| std::iter::repeat_n(row(uses), count)).collect()
    }

    #[test]
    fn long_runs_are_tiles_and_the_rest_is_groups() {
        let one: &[(u32, f32)] = &[(1, 1.0)];
        let scaled: &[(u32, f32)] = &[(1, 0.5)];
        let two: &[(u32, f32)] = &[(2, 1.0), (0, 1.0)];
        let rows = runs(&[(8, one), (9, scaled), (70, &[]), (65, two), (1, one)]);
        let mut tiles = StepTiles::with_capacity(CAPACITY);
        tiles.stamp(&rows).unwrap();
        let tile = |first_row, num_rows, first_use, num_uses, first_entry| RowTile {
            first_row,
            num_rows,
            first_use,
            num_uses,
            first_entry,
        };
        assert_eq!(tiles.tiles(), [tile(8, 9, 0, 1, 0), tile(87, 64, 1, 2, 9), tile(151, 1, 3, 2, 137)]);
        let slots: Vec<_> = tiles.uses().iter().map(|tile_use| (tile_use.slot, tile_use.scale)).collect();
        assert_eq!(slots, [(1, 0.5), (2, 1.0), (0, 1.0), (2, 1.0), (0, 1.0)]);
        assert_eq!(tiles.num_entries(), 139);

        let mut beside = StepRows::with_capacity(CAPACITY);
        beside.stamp_beside(&rows, 160, &tiles).unwrap();
        let left: Vec<u32> = beside.entries().iter().map(|entry| entry.row).collect();
        assert_eq!(left, [0, 1, 2, 3, 4, 5, 6, 7, 152]);
        let mut alone = StepRows::with_capacity(CAPACITY);
        alone.stamp(&rows, 160).unwrap();
        assert_eq!(beside.row_slots(), alone.row_slots());
        assert_eq!(beside.row_entries(87), [] as [u32; 0]);

        tiles.stamp(&rows[..9]).unwrap();
        let error = beside.stamp_beside(&rows, 160, &tiles).unwrap_err();
        assert_eq!(error, RowsError::TilesOfOtherRows { rows: 153, tiled_rows: 9 });
        let other = RowsCapacity { num_slots: 1, ..CAPACITY };
        assert!(matches!(StepTiles::with_capacity(other).stamp(&rows), Err(RowsError::SlotOutOfRange { row: 0, .. })));
    }

    proptest! {
        /// Every use of a row stands in one place: an entry of a group or of a tile; and nothing outgrows its buffer.
        #[test]
        fn tiles_and_groups_share_out_all_uses(
            lengths in prop::collection::vec((1usize..80, prop::collection::vec(0u32..4, 0..3)), 0..12),
        ) {
            let lengths: Vec<(usize, Vec<(u32, f32)>)> =
                lengths.into_iter().map(|(n, slots)| (n, slots.into_iter().map(|s| (s, 1.0)).collect())).collect();
            let lengths: Vec<(usize, &[(u32, f32)])> = lengths.iter().map(|(n, uses)| (*n, &uses[..])).collect();
            let rows = runs(&lengths);
            let max_entries = rows.iter().map(Vec::len).sum();
            let capacity = RowsCapacity { max_rows: rows.len(), max_entries, num_slots: 4 };
            let (mut tiles, mut beside) = (StepTiles::with_capacity(capacity), StepRows::with_capacity(capacity));
            let room = (tiles.tiles.capacity(), tiles.uses.capacity());
            tiles.stamp(&rows).unwrap();
            prop_assert!(tiles.tiles().len() <= StepTiles::max_tiles(capacity));
            prop_assert!(tiles.uses().len() <= StepTiles::max_uses(capacity));
            prop_assert_eq!(room, (tiles.tiles.capacity(), tiles.uses.capacity()));
            beside.stamp_beside(&rows, rows.len(), &tiles).unwrap();
            let mut found: Vec<Vec<u32>> = vec![Vec::new(); rows.len()];
            let slot_of = |entry: u32| beside.groups().iter().find(|group| {
                (group.first_entry..group.first_entry + group.count).contains(&entry)
            }).map(|group| group.slot);
            for (row, found) in found.iter_mut().enumerate() {
                found.extend(beside.row_entries(row).iter().filter_map(|&entry| slot_of(entry)));
            }
            let mut next_entry = 0;
            for tile in tiles.tiles() {
                prop_assert_eq!(tile.first_entry, next_entry);
                next_entry += tile.num_rows * tile.num_uses;
                for row in tile.first_row..tile.first_row + tile.num_rows {
                    let uses = &tiles.uses()[tile.first_use as usize..][..tile.num_uses as usize];
                    found[row as usize].extend(uses.iter().map(|tile_use| tile_use.slot));
                }
            }
            prop_assert_eq!(next_entry as usize, tiles.num_entries());
            for (row, found) in found.iter().enumerate() {
                let wanted: Vec<u32> = rows[row].iter().map(|adapter| adapter.slot.raw()).collect();
                prop_assert_eq!(found, &wanted);
            }
        }
    }
}
