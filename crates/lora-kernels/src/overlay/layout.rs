//! How an overlay lies in memory: one block, of one size for all slots, from which an entry's addresses follow.

use super::{OverlayEntry, OverlayError, OverlayIndex, Vocabulary};

/// Where each part of a block starts: bitmap, counts, tokens, rows. Parts start at multiples of 64 bytes; a block of a
/// multiple of its [`num_bytes`](Self::num_bytes) behind another one is aligned like it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverlayLayout {
    vocabulary: Vocabulary,
    max_rows: usize,
    row_bytes: usize,
    counts_offset: usize,
    tokens_offset: usize,
    rows_offset: usize,
    num_bytes: usize,
}

const ALIGNMENT: usize = 64;

impl OverlayLayout {
    /// Blocks for overlays of up to `max_rows` rows of `row_bytes` bytes.
    ///
    /// # Errors
    /// [`OverlayError::TooLarge`] for sizes past what can be addressed, and for tokens or rows past 2³¹.
    pub fn new(vocabulary: Vocabulary, max_rows: usize, row_bytes: usize) -> Result<Self, OverlayError> {
        let num_tokens = vocabulary.num_tokens();
        let too_large = OverlayError::TooLarge { num_tokens, max_rows, row_bytes };
        if num_tokens > i32::MAX as usize || max_rows > i32::MAX as usize {
            return Err(too_large);
        }
        let part = |start: usize, count: usize, bytes: usize| {
            count.checked_mul(bytes)?.checked_add(start)?.checked_next_multiple_of(ALIGNMENT)
        };
        let offsets = || {
            let counts_offset = part(0, vocabulary.num_words(), 4)?;
            let tokens_offset = part(counts_offset, vocabulary.num_blocks(), 4)?;
            let rows_offset = part(tokens_offset, max_rows, 4)?;
            let num_bytes = part(rows_offset, max_rows, row_bytes)?;
            Some(OverlayLayout {
                vocabulary,
                max_rows,
                row_bytes,
                counts_offset,
                tokens_offset,
                rows_offset,
                num_bytes,
            })
        };
        offsets().ok_or(too_large)
    }

    /// Bytes of a block.
    pub fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    /// Bytes of a block before its rows: what the index costs a slot.
    pub fn index_bytes(&self) -> usize {
        self.rows_offset
    }

    /// Rows that a block holds.
    pub fn max_rows(&self) -> usize {
        self.max_rows
    }

    /// The tokens that overlays may have.
    pub fn vocabulary(&self) -> Vocabulary {
        self.vocabulary
    }

    /// Writes a block: the whole index, so nothing of an earlier overlay is left in it, and the rows, which are in the
    /// order of `tokens`. Rows past them keep their bytes and are read by nobody.
    ///
    /// # Errors
    /// Tokens that make no [`OverlayIndex`], [`OverlayError::TooManyRows`], [`OverlayError::RowBytes`],
    /// [`OverlayError::BlockSize`]; the block keeps its bytes.
    pub fn pack(&self, tokens: &[u32], rows: &[u8], block: &mut [u8]) -> Result<(), OverlayError> {
        if tokens.len() > self.max_rows {
            return Err(OverlayError::TooManyRows { rows: tokens.len(), max_rows: self.max_rows });
        }
        let expected = tokens.len() * self.row_bytes;
        if rows.len() != expected {
            return Err(OverlayError::RowBytes { rows: tokens.len(), expected, found: rows.len() });
        }
        if block.len() != self.num_bytes {
            return Err(OverlayError::BlockSize { expected: self.num_bytes, found: block.len() });
        }
        let index = OverlayIndex::new(tokens, self.vocabulary)?;
        put(&mut block[..self.counts_offset], index.bitmap());
        put(&mut block[self.counts_offset..self.tokens_offset], index.counts());
        put(&mut block[self.tokens_offset..self.rows_offset], index.tokens());
        block[self.rows_offset..][..expected].copy_from_slice(rows);
        Ok(())
    }

    /// The entry of a slot whose block, with `num_rows` rows, stands at `address`.
    ///
    /// # Errors
    /// [`OverlayError::TooManyRows`]; [`OverlayError::Misaligned`] for an address that is no multiple of 16.
    pub fn entry(&self, address: u64, num_rows: usize) -> Result<OverlayEntry, OverlayError> {
        if num_rows > self.max_rows {
            return Err(OverlayError::TooManyRows { rows: num_rows, max_rows: self.max_rows });
        }
        if !address.is_multiple_of(16) {
            return Err(OverlayError::Misaligned { address, alignment: 16 });
        }
        Ok(OverlayEntry {
            bitmap: address,
            counts: address + self.counts_offset as u64,
            tokens: address + self.tokens_offset as u64,
            rows: address + self.rows_offset as u64,
            num_rows: num_rows as u32,
            reserved: 0,
        })
    }
}

/// Writes words in the device's byte order.
fn put(bytes: &mut [u8], words: &[u32]) {
    for (place, word) in bytes.chunks_exact_mut(4).zip(words) {
        place.copy_from_slice(&word.to_le_bytes());
    }
}
