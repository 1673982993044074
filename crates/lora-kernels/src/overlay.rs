//! Token overlays: rows that an adapter puts in place of rows of a vocabulary matrix (embedding or head), or adds
//! behind its end.
//!
//! This module is the one place that says how an overlay lies in memory: [`OverlayEntry`] is the ABI, [`OverlayLayout`]
//! the block behind it, [`OverlayIndex`] how a token's row is found. [`mod@reference`] computes on the host what the
//! kernels `embed_overlay`, `logits_overlay` and `row_diff` compute. What becomes an overlay, and in which memory, is
//! decided elsewhere.

mod error;
mod index;
mod layout;
pub mod reference;

pub use error::OverlayError;
pub use index::{Overlay, OverlayIndex, Vocabulary};
pub use layout::OverlayLayout;

/// The overlay of one slot on one matrix, as kernels read it: entry `slot` of a table. All addresses are device
/// addresses. `num_rows` 0 says that the adapter has no overlay; then no other field is read.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OverlayEntry {
    /// One bit for each token, in u32 words from the lowest bit on, whole blocks of [`COUNT_BITS`].
    pub bitmap: u64,
    /// u32 for each block: bits that are set in the blocks before.
    pub counts: u64,
    /// u32 for each row: its token, ascending.
    pub tokens: u64,
    /// `[num_rows, hidden_size]`, of the type of the activations.
    pub rows: u64,
    /// Rows of the overlay.
    pub num_rows: u32,
    /// 0.
    pub reserved: u32,
}

impl OverlayEntry {
    /// Bytes of an entry.
    pub const BYTES: usize = 40;

    /// An entry that says: this adapter has no overlay.
    pub const EMPTY: OverlayEntry = OverlayEntry { bitmap: 0, counts: 0, tokens: 0, rows: 0, num_rows: 0, reserved: 0 };

    /// The bytes of the entry as they stand in device memory (little endian, as every supported device is).
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        for (place, address) in bytes.chunks_exact_mut(8).zip([self.bitmap, self.counts, self.tokens, self.rows]) {
            place.copy_from_slice(&address.to_le_bytes());
        }
        bytes[32..36].copy_from_slice(&self.num_rows.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.reserved.to_le_bytes());
        bytes
    }
}

/// Bits of an index that share one count: `COUNT_BITS` of `kernels/overlay.cuh`.
pub const COUNT_BITS: usize = 512;

const _: () = {
    use std::mem::{align_of, offset_of, size_of};
    assert!(size_of::<OverlayEntry>() == OverlayEntry::BYTES && align_of::<OverlayEntry>() == 8);
    assert!(offset_of!(OverlayEntry, bitmap) == 0 && offset_of!(OverlayEntry, counts) == 8);
    assert!(offset_of!(OverlayEntry, tokens) == 16 && offset_of!(OverlayEntry, rows) == 24);
    assert!(offset_of!(OverlayEntry, num_rows) == 32);
};

#[cfg(test)]
mod tests;
