//! Causal attention of token rows over the paged KV cache, grouped queries included.
//!
//! `out[row, h] = Σ_t softmax_t(scale · q[row, h] · k[t, h / group]) · v[t, h / group]` over `t ≤ position[row]`, with the
//! running maximum of <https://arxiv.org/abs/1805.02867>. Blocks are walked in order of position and sums inside a block
//! have one fixed order: neither batch mates, nor the cut of a prompt into steps, nor threads change a row's bits.

use rayon::prelude::*;

use super::ops::{LANES, exp};
use crate::kv_cache::{BLOCK_TOKENS, KvCache};

/// Query heads that walk the blocks of their KV head together, so that a block is read from memory once.
const MAX_HEADS: usize = 8;

/// Where a token row stands: its position, and where its sequence's block table starts in the step's list.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowPlace {
    /// Position in the sequence, from 0.
    pub(crate) position: usize,
    /// Index of the sequence's first block in [`StepPlaces::blocks`].
    pub(crate) first_block: usize,
}

/// The places of all rows of a step; buffers are refilled each step.
#[derive(Debug, Default)]
pub(crate) struct StepPlaces {
    /// One for each row.
    pub(crate) rows: Vec<RowPlace>,
    /// The block tables of the step's sequences, one after the other.
    pub(crate) blocks: Vec<u32>,
}

impl StepPlaces {
    /// The block that holds `position` of the row's sequence.
    fn block(&self, row: RowPlace, position: usize) -> u32 {
        self.blocks[row.first_block + position / BLOCK_TOKENS]
    }

    /// Stores the keys and values of all rows: `k` and `v` are `[rows, num_kv_heads · head_dim]`.
    pub(crate) fn write(&self, cache: &mut KvCache, layer: usize, k: &[f32], v: &[f32], kv_features: usize) {
        let vectors = k.chunks_exact(kv_features).zip(v.chunks_exact(kv_features));
        for (&row, (key, value)) in self.rows.iter().zip(vectors) {
            let block = self.block(row, row.position);
            cache.write(layer, block, row.position % BLOCK_TOKENS, key, value);
        }
    }
}

/// Sizes of one layer's attention.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionSize {
    /// Query heads.
    pub(crate) num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub(crate) num_kv_heads: usize,
    /// Width of a head.
    pub(crate) head_dim: usize,
}

/// Attends for all rows: `q` and `out` are `[rows, num_heads · head_dim]`; keys and values of the rows are stored.
pub(crate) fn attend(
    size: AttentionSize,
    cache: &KvCache,
    (layer, places): (usize, &StepPlaces),
    q: &[f32],
    out: &mut [f32],
) {
    let AttentionSize { num_heads, num_kv_heads, head_dim } = size;
    let scale = 1.0 / (head_dim as f32).sqrt();
    let group_len = num_heads / num_kv_heads * head_dim;
    out.par_chunks_mut(group_len).zip(q.par_chunks(group_len)).enumerate().for_each(|(task, (out, q))| {
        let (row, kv_head) = (places.rows[task / num_kv_heads], task % num_kv_heads);
        let blocks = &places.blocks[row.first_block..];
        let heads = MAX_HEADS * head_dim;
        for (out, q) in out.chunks_mut(heads).zip(q.chunks(heads)) {
            let mut softmax = RunningSoftmax::new(head_dim, scale);
            out.fill(0.0);
            for (index, &block) in blocks[..KvCache::blocks_for(row.position + 1)].iter().enumerate() {
                let num_tokens = (row.position + 1 - index * BLOCK_TOKENS).min(BLOCK_TOKENS);
                let keys = cache.keys(layer, block, kv_head);
                let values = cache.values(layer, block, kv_head);
                softmax.add_block(q, keys, (values, num_tokens), out);
            }
            softmax.finish(out);
        }
    });
}

/// The state of up to [`MAX_HEADS`] heads between blocks: largest score so far, and the sum of exponentials under it.
struct RunningSoftmax {
    head_dim: usize,
    scale: f32,
    largest: [f32; MAX_HEADS],
    sum: [f32; MAX_HEADS],
}

impl RunningSoftmax {
    fn new(head_dim: usize, scale: f32) -> Self {
        RunningSoftmax { head_dim, scale, largest: [f32::NEG_INFINITY; MAX_HEADS], sum: [0.0; MAX_HEADS] }
    }

    /// Adds the first `num_tokens` positions of a block to every head of `out`.
    #[inline(always)]
    fn add_block(&mut self, q: &[f32], keys: &[f32], (values, num_tokens): (&[f32], usize), out: &mut [f32]) {
        let heads = q.chunks_exact(self.head_dim).zip(out.chunks_exact_mut(self.head_dim));
        for ((q, out), (largest, sum)) in heads.zip(self.largest.iter_mut().zip(&mut self.sum)) {
            let mut weights = scores(q, keys);
            let mut block_largest = f32::NEG_INFINITY;
            for score in &mut weights[..num_tokens] {
                *score *= self.scale;
                block_largest = block_largest.max(*score);
            }
            if block_largest > *largest {
                let correction = exp(*largest - block_largest);
                *largest = block_largest;
                *sum *= correction;
                out.iter_mut().for_each(|element| *element *= correction);
            }
            for weight in &mut weights {
                *weight = exp(*weight - *largest);
            }
            *sum = weights[..num_tokens].iter().fold(*sum, |sum, weight| sum + weight);
            add_values(out, &weights[..num_tokens], values);
        }
    }

    fn finish(&self, out: &mut [f32]) {
        for (out, sum) in out.chunks_exact_mut(self.head_dim).zip(&self.sum) {
            out.iter_mut().for_each(|element| *element /= sum);
        }
    }
}

/// `q · k[t]` for every place `t` of a block; lanes past the last position hold what the block held before.
#[inline(always)]
fn scores(q: &[f32], keys: &[f32]) -> [f32; LANES] {
    let mut even = [0.0f32; LANES];
    let mut odd = [0.0f32; LANES];
    for (q, keys) in q.chunks_exact(2).zip(keys.chunks_exact(2 * LANES)) {
        let (first, second) = keys.split_at(LANES);
        for lane in 0..LANES {
            even[lane] += q[0] * first[lane];
            odd[lane] += q[1] * second[lane];
        }
    }
    for (even, odd) in even.iter_mut().zip(odd) {
        *even += odd;
    }
    even
}

/// `out += Σ_t weights[t] · values[t]`, positions ascending for every element.
#[inline(always)]
fn add_values(out: &mut [f32], weights: &[f32], values: &[f32]) {
    let head_dim = out.len();
    let mut chunks = out.chunks_exact_mut(LANES);
    let mut start = 0;
    for chunk in &mut chunks {
        let mut lanes = [0.0f32; LANES];
        lanes.copy_from_slice(chunk);
        for (weight, value) in weights.iter().zip(values.chunks_exact(head_dim)) {
            for (lane, value) in lanes.iter_mut().zip(&value[start..start + LANES]) {
                *lane += weight * value;
            }
        }
        chunk.copy_from_slice(&lanes);
        start += LANES;
    }
    for (element, at) in chunks.into_remainder().iter_mut().zip(start..) {
        for (weight, value) in weights.iter().zip(values.chunks_exact(head_dim)) {
            *element += weight * value[at];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv_cache::{BlockTable, KvShape};

    fn noise(seed: usize, len: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 500.0 - 2.0).collect()
    }

    /// Softmax attention of one head in float64, straight from the formula.
    fn expected(q: &[f32], keys: &[&[f32]], values: &[&[f32]]) -> Vec<f64> {
        let scale = 1.0 / (q.len() as f64).sqrt();
        let dot = |k: &[f32]| q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        let weights: Vec<f64> = keys.iter().map(|k| (dot(k) * scale).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let element = |d: usize| weights.iter().zip(values).map(|(w, v)| w * f64::from(v[d])).sum::<f64>();
        (0..q.len()).map(|d| element(d) / sum).collect()
    }

    #[test]
    fn rows_attend_to_their_own_past_through_scattered_blocks() {
        for (head_dim, num_heads, num_kv_heads) in [(24, 4, 2), (16, 20, 2), (2, 3, 3)] {
            let size = AttentionSize { num_heads, num_kv_heads, head_dim };
            let (kv_features, q_features) = (num_kv_heads * head_dim, num_heads * head_dim);
            let mut cache = KvCache::new(KvShape { num_layers: 2, num_kv_heads, head_dim }, 8).unwrap();
            // What an earlier owner left must never be seen: fill every block with huge values.
            let huge = vec![1e30; kv_features];
            for block in 0..8 {
                (0..BLOCK_TOKENS).for_each(|offset| cache.write(1, block, offset, &huge, &huge));
            }
            let mut tables = [BlockTable::default(), BlockTable::default()];
            for num_tokens in [1, 17, 35] {
                tables.iter_mut().for_each(|table| assert!(cache.grow(table, num_tokens)));
            }
            let mut places = StepPlaces::default();
            for table in &tables {
                let first_block = places.blocks.len();
                places.blocks.extend(&table.blocks);
                places.rows.extend((0..35).map(|position| RowPlace { position, first_block }));
            }
            let (k, v) = (noise(1, 70 * kv_features), noise(2, 70 * kv_features));
            let q = noise(3, 70 * q_features);
            places.write(&mut cache, 1, &k, &v, kv_features);
            let mut out = vec![0.0; 70 * q_features];
            attend(size, &cache, (1, &places), &q, &mut out);
            for row in [0, 1, 15, 16, 34, 35, 69] {
                let (sequence, position) = (row / 35, row % 35);
                for head in 0..num_heads {
                    let kv_head = head / (num_heads / num_kv_heads);
                    let at = |data: &'_ [f32], t: usize| -> Vec<f32> {
                        data[(sequence * 35 + t) * kv_features + kv_head * head_dim..][..head_dim].to_vec()
                    };
                    let keys: Vec<Vec<f32>> = (0..=position).map(|t| at(&k, t)).collect();
                    let values: Vec<Vec<f32>> = (0..=position).map(|t| at(&v, t)).collect();
                    let keys: Vec<&[f32]> = keys.iter().map(Vec::as_slice).collect();
                    let values: Vec<&[f32]> = values.iter().map(Vec::as_slice).collect();
                    let start = row * q_features + head * head_dim;
                    let expected = expected(&q[start..start + head_dim], &keys, &values);
                    for (found, expected) in out[start..start + head_dim].iter().zip(expected) {
                        assert!((f64::from(*found) - expected).abs() < 2e-5, "row {row} head {head}");
                    }
                }
            }
        }
    }
}
