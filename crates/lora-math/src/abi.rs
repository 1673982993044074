//! The structs that a pool writes, a step fills and kernels read, byte for byte alike in Rust and in CUDA.
//!
//! This is the one place where "no adapter" is a negative number: [`row_slot`] writes it, nothing else does.

use crate::selection::Route;

/// One entry of the slot table, at `[slot][site]`.
///
/// A is row-major `[rank, in_features]`, B row-major `[out_features, rank]`, both in the pool's slot dtype;
/// the delta of the site is `scaling · B · A · x`. `rank` 0 says that the adapter does not touch this site; then no
/// other field is read. Kernels are bounded by `rank`, so bytes past it are unreachable.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct SiteEntry {
    /// Device address of A.
    pub a: u64,
    /// Device address of B.
    pub b: u64,
    /// Rank of the adapter at this site.
    pub rank: u32,
    /// alpha / rank, or alpha / √rank.
    pub scaling: f32,
}

impl SiteEntry {
    /// Bytes of an entry.
    pub const BYTES: usize = 24;

    /// An entry that says: this adapter does not touch this site.
    pub const EMPTY: SiteEntry = SiteEntry { a: 0, b: 0, rank: 0, scaling: 0.0 };

    /// The bytes of the entry as they stand in device memory (little endian, as every supported device is).
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[0..8].copy_from_slice(&self.a.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.b.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.rank.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.scaling.to_le_bytes());
        bytes
    }
}

/// One use of an adapter by a token row. A step's entries are sorted by (slot, row).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowEntry {
    /// The token row, from 0.
    pub row: u32,
    /// The request's own scale for this adapter (1 unless it says otherwise), multiplied with the site's scaling.
    pub scale: f32,
}

/// At most [`MAX_GROUP_ROWS`] consecutive entries of one slot: the unit that reads A and B once.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowGroup {
    /// The slot that all entries of the group use.
    pub slot: u32,
    /// Index of its first entry.
    pub first_entry: u32,
    /// Number of entries, 1 to [`MAX_GROUP_ROWS`].
    pub count: u32,
}

/// Largest number of entries in a [`RowGroup`].
pub const MAX_GROUP_ROWS: usize = 8;

/// Consecutive rows that use the same adapters in the same order: the unit of a delta, which reads A and B once for all of
/// them. The shrunk values of use `u` and row `i` of the tile are entry `first_entry + u · num_rows + i` of the tiles' h.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowTile {
    /// The first row.
    pub first_row: u32,
    /// Rows, 1 to [`MAX_TILE_ROWS`].
    pub num_rows: u32,
    /// Index of its first [`TileUse`].
    pub first_use: u32,
    /// Adapters of each row, at least 1.
    pub num_uses: u32,
    /// Index of its first value between shrink and expand.
    pub first_entry: u32,
}

/// One adapter of a [`RowTile`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TileUse {
    /// The slot.
    pub slot: u32,
    /// The request's own scale for this adapter.
    pub scale: f32,
}

/// Largest number of rows in a [`RowTile`].
pub const MAX_TILE_ROWS: usize = 64;

/// The number that a kernel reads as the slot of a row: the slot's index, or −1 for a base or padding row. Slots are
/// below 2³¹: no [`SiteTable`](crate::SiteTable) has more.
pub fn row_slot(route: Route) -> i32 {
    match route {
        Route::Base => -1,
        Route::Slot(slot) => slot.raw() as i32,
    }
}

const _: () = {
    use std::mem::{align_of, offset_of, size_of};
    assert!(size_of::<SiteEntry>() == SiteEntry::BYTES && align_of::<SiteEntry>() == 8);
    assert!(offset_of!(SiteEntry, a) == 0 && offset_of!(SiteEntry, b) == 8);
    assert!(offset_of!(SiteEntry, rank) == 16 && offset_of!(SiteEntry, scaling) == 20);
    assert!(size_of::<RowEntry>() == 8 && offset_of!(RowEntry, row) == 0 && offset_of!(RowEntry, scale) == 4);
    assert!(size_of::<RowGroup>() == 12 && offset_of!(RowGroup, slot) == 0);
    assert!(offset_of!(RowGroup, first_entry) == 4 && offset_of!(RowGroup, count) == 8);
    assert!(size_of::<RowTile>() == 20 && offset_of!(RowTile, first_row) == 0 && offset_of!(RowTile, num_rows) == 4);
    assert!(offset_of!(RowTile, first_use) == 8 && offset_of!(RowTile, num_uses) == 12);
    assert!(offset_of!(RowTile, first_entry) == 16);
    assert!(size_of::<TileUse>() == 8 && offset_of!(TileUse, slot) == 0 && offset_of!(TileUse, scale) == 4);
};
