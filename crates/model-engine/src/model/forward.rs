//! The forward pass of a step: token rows of any number of sequences through all layers, to the logits asked for.
//!
//! Every product is the base product (with its bias) and then the deltas of the rows' adapters. Nothing here depends on
//! which rows share a step: a row's activations are computed from that row and from its own sequence's cache.

use lora_kernels::{KernelError, Rows, RowsMut, WeightView};
use lora_math::Features;
use rayon::prelude::*;

use super::attention::{AttentionSize, StepPlaces, attend};
use super::lora::LoraStep;
use super::scratch::Scratch;
use super::vectors::{self, StepVectors};
use super::{Attention, FeedForward, Mixer, Mlp, TransformerModel, ops};
use crate::checkpoint::weights::{Linear, WeightMatrix, WeightSlice};
use crate::kv_cache::KvCache;

/// Elements below which a pass over rows stays on one thread: handing it out costs more than it takes.
const MIN_PARALLEL_ELEMENTS: usize = 1 << 14;

/// What one step computes.
pub(crate) struct Step<'a> {
    /// The token of each row.
    pub(crate) token_ids: &'a [u32],
    /// Where each row stands.
    pub(crate) places: &'a StepPlaces,
    /// The rows whose logits are wanted, in the order of the logits.
    pub(crate) logit_rows: &'a [usize],
    /// Rows whose adapters change outputs or norms.
    pub(crate) vectors: StepVectors<'a>,
}

impl TransformerModel {
    /// Runs a step. Rotations of the rows' positions stand in `scratch.cos_sin`; keys and values of the rows go into
    /// `cache`; the logits end in `scratch.logits`, `[logit_rows, vocab_size]`.
    pub(crate) fn forward(
        &self,
        step: &Step<'_>,
        mut lora: Option<LoraStep<'_>>,
        cache: &mut KvCache,
        scratch: &mut Scratch,
    ) -> Result<(), KernelError> {
        let num_rows = step.token_ids.len();
        let hidden_size = self.config.hidden_size;
        let len = num_rows * hidden_size;
        for (x, token) in scratch.x.chunks_exact_mut(hidden_size).zip(step.token_ids) {
            widen_row(&self.embed_tokens, *token as usize, x);
        }
        let mut x = RowsMut::new(&mut scratch.x[..len], hidden_size)?;
        step.vectors.adjust(|vectors| &vectors.embed_tokens, &mut x);
        if let Some(lora) = &mut lora {
            lora.embed(step.token_ids, x)?;
        }
        for (index, layer) in self.layers.iter().enumerate() {
            let input_norm =
                |row| step.vectors.norm(row, |vectors| &vectors.layers[index].input_norm).unwrap_or(&layer.input_norm);
            self.norm(&scratch.x[..len], input_norm, &mut scratch.normed[..len]);
            match &layer.mixer {
                Mixer::Attention(part) => self.attention(part, (index, num_rows), step, &mut lora, cache, scratch)?,
            }
            add_rows(&mut scratch.x[..len], &scratch.out[..len], hidden_size);
            let post_attention_norm = |row| {
                let own = step.vectors.norm(row, |vectors| &vectors.layers[index].post_attention_norm);
                own.unwrap_or(&layer.post_attention_norm)
            };
            self.norm(&scratch.x[..len], post_attention_norm, &mut scratch.normed[..len]);
            match &layer.feed_forward {
                FeedForward::Dense(part) => self.mlp(part, (index, num_rows), step, &mut lora, scratch)?,
            }
            add_rows(&mut scratch.x[..len], &scratch.out[..len], hidden_size);
        }
        self.logits(step, &mut lora, scratch)
    }

    fn attention(
        &self,
        part: &Attention,
        (layer, num_rows): (usize, usize),
        step: &Step<'_>,
        lora: &mut Option<LoraStep<'_>>,
        cache: &mut KvCache,
        scratch: &mut Scratch,
    ) -> Result<(), KernelError> {
        let config = &self.config;
        let (q_features, kv_features) = (config.q_features(), config.kv_features());
        let x = Rows::new(&scratch.normed[..num_rows * config.hidden_size], config.hidden_size)?;
        let mut q = RowsMut::new(&mut scratch.q[..num_rows * q_features], q_features)?;
        let mut k = RowsMut::new(&mut scratch.k[..num_rows * kv_features], kv_features)?;
        let mut v = RowsMut::new(&mut scratch.v[..num_rows * kv_features], kv_features)?;
        self.project(&part.q, x, q.reborrow())?;
        self.project(&part.k, x, k.reborrow())?;
        self.project(&part.v, x, v.reborrow())?;
        step.vectors.adjust(|vectors| &vectors.layers[layer].q, &mut q);
        step.vectors.adjust(|vectors| &vectors.layers[layer].k, &mut k);
        step.vectors.adjust(|vectors| &vectors.layers[layer].v, &mut v);
        if let Some(lora) = lora {
            lora.add(|sites| &sites.qkv, layer, x, [q, k, v])?;
        }
        let q = &mut scratch.q[..num_rows * q_features];
        let k = &mut scratch.k[..num_rows * kv_features];
        let own = |row| step.vectors.norm(row, |vectors| &vectors.layers[layer].q_norm);
        self.place_heads(q, |row| own(row).or(part.q_norm.as_deref()), &scratch.cos_sin, q_features);
        let own = |row| step.vectors.norm(row, |vectors| &vectors.layers[layer].k_norm);
        self.place_heads(k, |row| own(row).or(part.k_norm.as_deref()), &scratch.cos_sin, kv_features);
        step.places.write(cache, part.kv_layer, k, &scratch.v[..num_rows * kv_features], kv_features);

        let size =
            AttentionSize { num_heads: config.num_heads, num_kv_heads: config.num_kv_heads, head_dim: config.head_dim };
        let attended = &mut scratch.attended[..num_rows * q_features];
        attend(size, cache, (part.kv_layer, step.places), q, attended);
        let x = Rows::new(attended, q_features)?;
        let mut out = RowsMut::new(&mut scratch.out[..num_rows * config.hidden_size], config.hidden_size)?;
        self.project(&part.o, x, out.reborrow())?;
        step.vectors.adjust(|vectors| &vectors.layers[layer].o, &mut out);
        if let Some(lora) = lora {
            lora.add(|sites| &sites.o, layer, x, [out])?;
        }
        Ok(())
    }

    /// Norm (where the family has one) and rotation of every head of q or of k; `width` is all heads of a row.
    fn place_heads<'w>(
        &self,
        rows: &mut [f32],
        norm: impl Fn(usize) -> Option<&'w [f32]> + Sync,
        cos_sin: &[f32],
        width: usize,
    ) {
        let (head_dim, eps) = (self.config.head_dim, self.config.rms_norm_eps);
        for_rows(rows, width, |row, heads| {
            let norm = norm(row);
            let (cos, sin) = cos_sin[row * head_dim..(row + 1) * head_dim].split_at(head_dim / 2);
            for head in heads.chunks_exact_mut(head_dim) {
                if let Some(norm) = norm {
                    ops::rms_norm_in_place(head, norm, eps);
                }
                ops::rotate_half(head, cos, sin);
            }
        });
    }

    fn mlp(
        &self,
        part: &Mlp,
        (layer, num_rows): (usize, usize),
        step: &Step<'_>,
        lora: &mut Option<LoraStep<'_>>,
        scratch: &mut Scratch,
    ) -> Result<(), KernelError> {
        let (hidden_size, width) = (self.config.hidden_size, part.intermediate_size);
        let x = Rows::new(&scratch.normed[..num_rows * hidden_size], hidden_size)?;
        let mut gate = RowsMut::new(&mut scratch.gate[..num_rows * width], width)?;
        let mut up = RowsMut::new(&mut scratch.up[..num_rows * width], width)?;
        self.project(&part.gate, x, gate.reborrow())?;
        self.project(&part.up, x, up.reborrow())?;
        step.vectors.adjust(|vectors| &vectors.layers[layer].gate, &mut gate);
        step.vectors.adjust(|vectors| &vectors.layers[layer].up, &mut up);
        if let Some(lora) = lora {
            lora.add(|sites| &sites.gate_up, layer, x, [gate, up])?;
        }
        let gate = &mut scratch.gate[..num_rows * width];
        let up = &scratch.up[..num_rows * width];
        for_rows(gate, width, |row, gate| ops::silu_mul(gate, &up[row * width..(row + 1) * width]));
        let x = Rows::new(gate, width)?;
        let mut out = RowsMut::new(&mut scratch.out[..num_rows * hidden_size], hidden_size)?;
        self.project(&part.down, x, out.reborrow())?;
        step.vectors.adjust(|vectors| &vectors.layers[layer].down, &mut out);
        if let Some(lora) = lora {
            lora.add(|sites| &sites.down, layer, x, [out])?;
        }
        Ok(())
    }

    /// Final norm and head, for the rows that were asked for only.
    fn logits(
        &self,
        step: &Step<'_>,
        lora: &mut Option<LoraStep<'_>>,
        scratch: &mut Scratch,
    ) -> Result<(), KernelError> {
        let (hidden_size, vocab_size) = (self.config.hidden_size, self.config.vocab_size);
        let logit_rows = step.logit_rows;
        let len = logit_rows.len() * vocab_size;
        if scratch.logits.len() < len {
            scratch.logits.resize(len, 0.0);
        }
        if logit_rows.is_empty() {
            return Ok(());
        }
        let normed = &mut scratch.normed[..logit_rows.len() * hidden_size];
        for (out, row) in normed.chunks_exact_mut(hidden_size).zip(logit_rows) {
            let x = &scratch.x[row * hidden_size..(row + 1) * hidden_size];
            let norm = step.vectors.norm(*row, |vectors| &vectors.final_norm).unwrap_or(&self.final_norm);
            ops::rms_norm(x, norm, self.config.rms_norm_eps, out);
        }
        let mut logits = RowsMut::new(&mut scratch.logits[..len], vocab_size)?;
        let normed = Rows::new(normed, hidden_size)?;
        self.products.matmul(normed, &weight_view(self.output_head())?, None, logits.reborrow())?;
        for (index, row) in logit_rows.iter().enumerate() {
            if let Some(vectors) = step.vectors.of_row(*row) {
                vectors::adjust_row(&vectors.lm_head, logits.row_mut(index));
            }
        }
        match lora {
            Some(lora) => lora.head(normed, logits),
            None => Ok(()),
        }
    }

    /// The base product with its bias.
    fn project(&self, linear: &Linear, x: Rows<'_>, y: RowsMut<'_>) -> Result<(), KernelError> {
        self.products.matmul(x, &weight_view(&linear.weight)?, linear.bias.as_deref(), y)
    }

    fn norm<'w>(&self, x: &[f32], weight: impl Fn(usize) -> &'w [f32] + Sync, out: &mut [f32]) {
        let (width, eps) = (self.config.hidden_size, self.config.rms_norm_eps);
        for_rows(out, width, |row, out| ops::rms_norm(&x[row * width..(row + 1) * width], weight(row), eps, out));
    }
}

/// Runs `f` on every row, in parallel where that pays; rows are independent, so the result is the same.
fn for_rows(rows: &mut [f32], width: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
    if rows.len() < MIN_PARALLEL_ELEMENTS {
        rows.chunks_exact_mut(width).enumerate().for_each(|(row, data)| f(row, data));
    } else {
        rows.par_chunks_exact_mut(width).enumerate().for_each(|(row, data)| f(row, data));
    }
}

fn add_rows(x: &mut [f32], delta: &[f32], width: usize) {
    for_rows(x, width, |row, x| ops::add(x, &delta[row * width..(row + 1) * width]));
}

fn weight_view(weight: &WeightMatrix) -> Result<WeightView<'_>, KernelError> {
    let features = Features { in_features: weight.in_features(), out_features: weight.out_features() };
    match weight.as_slice() {
        WeightSlice::F32(data) => WeightView::f32(data, features),
        WeightSlice::Bf16(data) => WeightView::bf16(data, features),
    }
}

/// A row of a weight as f32. Whoever asks has checked that there is such a row.
pub(super) fn widen_row(weight: &WeightMatrix, row: usize, out: &mut [f32]) {
    match weight.row(row) {
        Some(WeightSlice::F32(data)) => out.copy_from_slice(data),
        Some(WeightSlice::Bf16(data)) => {
            for (out, element) in out.iter_mut().zip(data) {
                *out = element.to_f32();
            }
        }
        None => unreachable!("row {row} of a weight of {} rows", weight.out_features()),
    }
}
