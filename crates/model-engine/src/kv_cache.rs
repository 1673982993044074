//! The paged KV cache: fixed blocks of tokens, a free list, and a block table for each sequence.
//!
//! A block holds [`BLOCK_TOKENS`] positions of every attention layer, so one list of blocks serves a sequence in all
//! layers. Which block a sequence gets never shows in its results: attention walks the table in order of position.
//! Who owns a block is the engine's knowledge (the tables); this module stores, and counts what is free.

use crate::model::ops::LANES;
use crate::zeroed::zeroed;

/// Positions in one block. Attention reduces block by block, so this number is part of every result's bits.
pub const BLOCK_TOKENS: usize = LANES;

/// Sizes of what a cache stores for one position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Layers that keep keys and values.
    pub num_layers: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

/// How full a cache is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct KvUsage {
    /// Blocks in all.
    pub num_blocks: usize,
    /// Blocks that no sequence owns.
    pub free_blocks: usize,
    /// Positions of one block.
    pub block_tokens: usize,
    /// Bytes of all blocks.
    pub capacity_bytes: usize,
}

/// The blocks a sequence owns, in order of position.
#[derive(Debug, Default)]
pub(crate) struct BlockTable {
    pub(crate) blocks: Vec<u32>,
}

/// Keys `[layer][block][kv_head][head_dim][token]` and values `[layer][block][kv_head][token][head_dim]`, f32.
///
/// Keys lie transposed inside a block, so the scores of its tokens are lanes of one accumulator.
#[derive(Debug)]
pub(crate) struct KvCache {
    shape: KvShape,
    num_blocks: usize,
    keys: Vec<f32>,
    values: Vec<f32>,
    free: Vec<u32>,
}

impl KvCache {
    /// A cache of `num_blocks` free blocks; `None` when its size does not fit in the address space.
    ///
    /// Untouched blocks cost address space only where the system hands out zeroed pages on first use.
    pub(crate) fn new(shape: KvShape, num_blocks: usize) -> Option<Self> {
        let last_block = u32::try_from(num_blocks).ok()?;
        let len = [shape.num_layers, shape.num_kv_heads, shape.head_dim, BLOCK_TOKENS]
            .into_iter()
            .try_fold(num_blocks, usize::checked_mul)?;
        Some(KvCache {
            shape,
            num_blocks,
            keys: zeroed(len)?,
            values: zeroed(len)?,
            free: (0..last_block).rev().collect(),
        })
    }

    /// Blocks that `num_tokens` positions occupy.
    pub(crate) fn blocks_for(num_tokens: usize) -> usize {
        num_tokens.div_ceil(BLOCK_TOKENS)
    }

    pub(crate) fn usage(&self) -> KvUsage {
        KvUsage {
            num_blocks: self.num_blocks,
            free_blocks: self.free.len(),
            block_tokens: BLOCK_TOKENS,
            capacity_bytes: (self.keys.len() + self.values.len()) * size_of::<f32>(),
        }
    }

    /// Extends `table` until it covers `num_tokens` positions. The caller has checked that enough blocks are free;
    /// `false` says that they ran out, with the blocks so far in the table.
    pub(crate) fn grow(&mut self, table: &mut BlockTable, num_tokens: usize) -> bool {
        while table.blocks.len() < Self::blocks_for(num_tokens) {
            let Some(block) = self.free.pop() else { return false };
            table.blocks.push(block);
        }
        true
    }

    /// Takes back the blocks of a sequence.
    pub(crate) fn release(&mut self, table: BlockTable) {
        self.free.extend(table.blocks.into_iter().rev());
    }

    /// Floats of one head in one block.
    fn head_len(&self) -> usize {
        self.shape.head_dim * BLOCK_TOKENS
    }

    fn head_start(&self, layer: usize, block: u32, head: usize) -> usize {
        ((layer * self.num_blocks + block as usize) * self.shape.num_kv_heads + head) * self.head_len()
    }

    /// Keys of one head in one block, `[head_dim][BLOCK_TOKENS]`.
    pub(crate) fn keys(&self, layer: usize, block: u32, head: usize) -> &[f32] {
        let start = self.head_start(layer, block, head);
        &self.keys[start..start + self.head_len()]
    }

    /// Values of one head in one block, `[BLOCK_TOKENS][head_dim]`.
    pub(crate) fn values(&self, layer: usize, block: u32, head: usize) -> &[f32] {
        let start = self.head_start(layer, block, head);
        &self.values[start..start + self.head_len()]
    }

    /// Stores one position: `key` and `value` are `[num_kv_heads, head_dim]`, `offset` is the place in the block.
    pub(crate) fn write(&mut self, layer: usize, block: u32, offset: usize, key: &[f32], value: &[f32]) {
        let (head_dim, head_len) = (self.shape.head_dim, self.head_len());
        let start = self.head_start(layer, block, 0);
        for (head, (key, value)) in key.chunks_exact(head_dim).zip(value.chunks_exact(head_dim)).enumerate() {
            let at = start + head * head_len;
            for (place, element) in self.keys[at + offset..at + head_len].iter_mut().step_by(BLOCK_TOKENS).zip(key) {
                *place = *element;
            }
            self.values[at + offset * head_dim..][..head_dim].copy_from_slice(value);
        }
    }
}
