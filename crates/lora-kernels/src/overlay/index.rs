//! Which tokens an overlay has, and the row of each.

use super::{COUNT_BITS, OverlayError};
use crate::activations::Rows;
use crate::error::{KernelError, Operand};

const WORD_BITS: usize = u32::BITS as usize;

/// The tokens that overlays of a table may have; one for all its slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vocabulary {
    /// Rows of the base's matrix: tokens from 0 on, which an overlay may replace.
    pub vocab_size: usize,
    /// Tokens behind them, which an overlay may add.
    pub max_added: usize,
}

impl Vocabulary {
    /// Tokens, added ones included; the width of a row of logits.
    pub fn num_tokens(&self) -> usize {
        self.vocab_size.saturating_add(self.max_added)
    }

    /// u32 words of a bitmap.
    pub(super) fn num_words(&self) -> usize {
        self.num_blocks() * (COUNT_BITS / WORD_BITS)
    }

    /// Blocks of a bitmap, each with a count.
    pub(super) fn num_blocks(&self) -> usize {
        self.num_tokens().div_ceil(COUNT_BITS)
    }
}

/// A bitmap of the tokens and a count for each [`COUNT_BITS`] of it: the row of a token is the number of bits before
/// its own, so rows stand in the order of their tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverlayIndex {
    vocabulary: Vocabulary,
    bitmap: Vec<u32>,
    counts: Vec<u32>,
    tokens: Vec<u32>,
}

impl OverlayIndex {
    /// The index of an overlay whose row `i` is token `tokens[i]`; tokens ascend.
    ///
    /// # Errors
    /// [`OverlayError::TokenOrder`], [`OverlayError::TokenOutOfRange`].
    pub fn new(tokens: &[u32], vocabulary: Vocabulary) -> Result<Self, OverlayError> {
        for (row, pair) in tokens.windows(2).enumerate() {
            if pair[0] >= pair[1] {
                return Err(OverlayError::TokenOrder { row: row + 1, token: pair[1], before: pair[0] });
            }
        }
        // The last is the largest, but the first past the end says more.
        let row = tokens.partition_point(|&token| (token as usize) < vocabulary.num_tokens());
        if let Some(&token) = tokens.get(row) {
            let Vocabulary { vocab_size, max_added } = vocabulary;
            return Err(OverlayError::TokenOutOfRange { row, token, vocab_size, max_added });
        }
        let mut bitmap = vec![0; vocabulary.num_words()];
        for &token in tokens {
            bitmap[token as usize / WORD_BITS] |= 1u32 << (token as usize % WORD_BITS);
        }
        let blocks = bitmap.chunks_exact(COUNT_BITS / WORD_BITS);
        let counts = blocks.scan(0, |before, block| {
            let count = *before;
            *before += block.iter().map(|word| word.count_ones()).sum::<u32>();
            Some(count)
        });
        Ok(OverlayIndex { vocabulary, counts: counts.collect(), bitmap, tokens: tokens.to_vec() })
    }

    /// The tokens that the index is made for.
    pub fn vocabulary(&self) -> Vocabulary {
        self.vocabulary
    }

    /// One bit for each token.
    pub fn bitmap(&self) -> &[u32] {
        &self.bitmap
    }

    /// For each block of the bitmap the bits in those before.
    pub fn counts(&self) -> &[u32] {
        &self.counts
    }

    /// The token of each row, ascending.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The row of a token, none where the overlay lacks it.
    pub fn row(&self, token: u32) -> Option<usize> {
        let (word, bit) = (token as usize / WORD_BITS, token as usize % WORD_BITS);
        let own = *self.bitmap.get(word)?;
        if own >> bit & 1 == 0 {
            return None;
        }
        let block = token as usize / COUNT_BITS;
        let before = self.bitmap[block * (COUNT_BITS / WORD_BITS)..word].iter().map(|word| word.count_ones());
        let row = self.counts[block] + before.sum::<u32>() + (own & ((1 << bit) - 1)).count_ones();
        Some(row as usize)
    }
}

/// One slot's overlay on one matrix, on the host.
#[derive(Clone, Copy, Debug)]
pub struct Overlay<'a> {
    index: &'a OverlayIndex,
    rows: Rows<'a>,
}

impl<'a> Overlay<'a> {
    /// Rows `[tokens, hidden_size]`, widened, in the order of the index.
    ///
    /// # Errors
    /// [`KernelError::RowCount`] unless there is one row for each token.
    pub fn new(index: &'a OverlayIndex, rows: Rows<'a>) -> Result<Self, OverlayError> {
        let (expected, found) = (index.tokens().len(), rows.num_rows());
        if expected != found {
            return Err(KernelError::RowCount { operand: Operand::Input, expected, found }.into());
        }
        Ok(Overlay { index, rows })
    }

    /// Its tokens.
    pub fn index(&self) -> &'a OverlayIndex {
        self.index
    }

    /// Their rows.
    pub fn rows(&self) -> Rows<'a> {
        self.rows
    }
}
