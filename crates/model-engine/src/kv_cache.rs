//! The paged KV cache: fixed blocks of tokens, a free list, and a block table for each sequence.
//!
//! A block holds [`BLOCK_TOKENS`] positions of every attention layer, so one list of blocks serves a sequence in all
//! layers. Which block a sequence gets never shows in its results: attention walks the table in order of position.
//!
//! Blocks are shared: several tables may have a whole block in common, which nobody writes any more. A block with a key that
//! no table has is kept, and is free all the same: it goes, the longest unused first, when no other is left.

use std::collections::{BTreeSet, HashMap};

use crate::model::ops::LANES;
use crate::prefix::PrefixKey;
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
    /// Blocks that no sequence owns: those that are kept for their contents are among them.
    pub free_blocks: usize,
    /// Free blocks that are kept, for a sequence that begins with the same tokens.
    pub kept_blocks: usize,
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
    /// Blocks without contents that anybody could want.
    free: Vec<u32>,
    /// Tables that have each block.
    refs: Vec<u32>,
    /// Of each block its key, if it is found by one.
    keys_of: Vec<Option<PrefixKey>>,
    by_key: HashMap<PrefixKey, u32>,
    /// Blocks with a key that no table has, by when the last table let go of them.
    idle: BTreeSet<(u64, u32)>,
    /// When each idle block became so.
    idle_since: Vec<u64>,
    clock: u64,
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
            refs: vec![0; num_blocks],
            keys_of: vec![None; num_blocks],
            by_key: HashMap::new(),
            idle: BTreeSet::new(),
            idle_since: vec![0; num_blocks],
            clock: 0,
        })
    }

    /// Blocks that `num_tokens` positions occupy.
    pub(crate) fn blocks_for(num_tokens: usize) -> usize {
        num_tokens.div_ceil(BLOCK_TOKENS)
    }

    pub(crate) fn usage(&self) -> KvUsage {
        KvUsage {
            num_blocks: self.num_blocks,
            free_blocks: self.free.len() + self.idle.len(),
            kept_blocks: self.idle.len(),
            block_tokens: BLOCK_TOKENS,
            capacity_bytes: (self.keys.len() + self.values.len()) * size_of::<f32>(),
        }
    }

    /// Extends `table` until it covers `num_tokens` positions. The caller has checked that enough blocks are free;
    /// `false` says that they ran out, with the blocks so far in the table.
    pub(crate) fn grow(&mut self, table: &mut BlockTable, num_tokens: usize) -> bool {
        while table.blocks.len() < Self::blocks_for(num_tokens) {
            let Some(block) = self.free.pop().or_else(|| self.give_up_oldest()) else { return false };
            self.refs[block as usize] = 1;
            table.blocks.push(block);
        }
        true
    }

    /// The block that was not used for the longest time, without its key.
    fn give_up_oldest(&mut self) -> Option<u32> {
        let (_, block) = self.idle.pop_first()?;
        if let Some(key) = self.keys_of[block as usize].take() {
            self.by_key.remove(&key);
        }
        Some(block)
    }

    /// Takes back the blocks of a sequence. What has a key is kept: of a sequence the last block goes first, for without it
    /// those before are of use, and not the other way round.
    pub(crate) fn release(&mut self, table: BlockTable) {
        for block in table.blocks.into_iter().rev() {
            let index = block as usize;
            self.refs[index] -= 1;
            if self.refs[index] > 0 {
                continue;
            }
            if self.keys_of[index].is_some() {
                self.clock += 1;
                self.idle_since[index] = self.clock;
                self.idle.insert((self.clock, block));
            } else {
                self.free.push(block);
            }
        }
    }

    /// Lets a whole block be found by its key. Where another one has it already, that one stays the one that is found.
    pub(crate) fn register(&mut self, block: u32, key: PrefixKey) {
        if let std::collections::hash_map::Entry::Vacant(place) = self.by_key.entry(key) {
            place.insert(block);
            self.keys_of[block as usize] = Some(key);
        }
    }

    /// Adds the block of this key to an empty place behind a table's blocks. Whether there is one.
    pub(crate) fn attach(&mut self, table: &mut BlockTable, key: PrefixKey) -> bool {
        let Some(&block) = self.by_key.get(&key) else { return false };
        let index = block as usize;
        if self.refs[index] == 0 {
            self.idle.remove(&(self.idle_since[index], block));
        }
        self.refs[index] += 1;
        table.blocks.push(block);
        true
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

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(num_blocks: usize) -> KvCache {
        KvCache::new(KvShape { num_layers: 1, num_kv_heads: 1, head_dim: 2 }, num_blocks).expect("a cache")
    }

    fn key(tokens: &[u32]) -> PrefixKey {
        PrefixKey::root(None, b"").next(tokens)
    }

    #[test]
    fn kept_blocks_are_found_until_their_room_is_needed() {
        let mut cache = cache(3);
        let mut first = BlockTable::default();
        assert!(cache.grow(&mut first, 2 * BLOCK_TOKENS));
        let blocks = first.blocks.clone();
        cache.register(blocks[0], key(&[1]));
        cache.register(blocks[1], key(&[2]));
        let mut second = BlockTable::default();
        assert!(cache.attach(&mut second, key(&[1])) && !cache.attach(&mut second, key(&[3])));
        cache.release(first);
        assert_eq!((cache.usage().free_blocks, cache.usage().kept_blocks), (2, 1), "the first is still in use");
        cache.release(second);
        assert_eq!((cache.usage().free_blocks, cache.usage().kept_blocks), (3, 2));

        // The free block goes first, then the one that was last in its sequence, and then the other.
        let mut third = BlockTable::default();
        assert!(cache.grow(&mut third, 2 * BLOCK_TOKENS));
        assert_eq!(third.blocks[1], blocks[1]);
        let mut again = BlockTable::default();
        assert!(!cache.attach(&mut again, key(&[2])) && cache.attach(&mut again, key(&[1])));
        assert_eq!(again.blocks, [blocks[0]]);
        let mut fourth = BlockTable::default();
        assert!(!cache.grow(&mut fourth, 1), "a block in use is never given away");
        cache.release(again);
        assert!(cache.grow(&mut fourth, 1));
        assert!(!cache.attach(&mut BlockTable::default(), key(&[1])));
    }

    #[test]
    fn equal_contents_in_two_blocks_are_found_in_one() {
        let mut cache = cache(2);
        let (mut first, mut second) = (BlockTable::default(), BlockTable::default());
        assert!(cache.grow(&mut first, 1) && cache.grow(&mut second, 1));
        cache.register(first.blocks[0], key(&[1]));
        cache.register(second.blocks[0], key(&[1]));
        cache.release(second);
        assert_eq!(cache.usage().kept_blocks, 0, "the second is not found by its key, and so not kept");
        cache.release(first);
        assert_eq!((cache.usage().kept_blocks, cache.usage().free_blocks), (1, 2));
    }

    /// Random operations, and after each: every block is free, kept, or in as many tables as it counts.
    #[test]
    fn no_block_is_lost_or_given_out_twice() {
        let mut state = 1u64;
        let mut below = |end: usize| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((state >> 33) % end as u64) as usize
        };
        let mut cache = cache(7);
        let mut tables: Vec<BlockTable> = Vec::new();
        for _ in 0..20_000 {
            match below(4) {
                0 if tables.len() < 5 => tables.push(BlockTable::default()),
                1 if !tables.is_empty() => {
                    let index = below(tables.len());
                    let wanted = (tables[index].blocks.len() + 1) * BLOCK_TOKENS;
                    let had = cache.usage().free_blocks;
                    assert_eq!(cache.grow(&mut tables[index], wanted), had > 0);
                    if let (true, Some(&block)) = (below(2) == 0, tables[index].blocks.last())
                        && cache.refs[block as usize] == 1
                        && cache.keys_of[block as usize].is_none()
                    {
                        cache.register(block, key(&[below(6) as u32]));
                    }
                }
                2 if !tables.is_empty() => {
                    let index = below(tables.len());
                    let wanted = key(&[below(6) as u32]);
                    // A sequence has no two blocks with one key.
                    let has = |block: &u32| cache.keys_of[*block as usize] == Some(wanted);
                    if !tables[index].blocks.iter().any(has) {
                        cache.attach(&mut tables[index], wanted);
                    }
                }
                _ if !tables.is_empty() => {
                    let table = tables.swap_remove(below(tables.len()));
                    cache.release(table);
                }
                _ => {}
            }
            let mut seen = vec![0u32; 7];
            tables.iter().flat_map(|table| &table.blocks).for_each(|block| seen[*block as usize] += 1);
            assert_eq!(seen, cache.refs);
            let mut unused: Vec<u32> = cache.free.iter().copied().chain(cache.idle.iter().map(|idle| idle.1)).collect();
            unused.sort_unstable();
            let expected: Vec<u32> = (0..7).filter(|block| seen[*block as usize] == 0).collect();
            assert_eq!(unused, expected);
            for (key, block) in &cache.by_key {
                assert_eq!(cache.keys_of[*block as usize], Some(*key));
            }
            assert!(cache.free.iter().all(|block| cache.keys_of[*block as usize].is_none()));
        }
    }
}
