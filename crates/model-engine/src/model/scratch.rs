//! The activations of a step: buffers made once for the largest step and used by every layer of every step.

use crate::checkpoint::ModelConfig;
use crate::checkpoint::config::FeedForward;
use crate::zeroed::zeroed;

/// Row-major activations, f32; a step of `n` rows uses the first `n · width` elements of each.
#[derive(Debug)]
pub(crate) struct Scratch {
    /// The residual stream, `[rows, hidden_size]`.
    pub(crate) x: Vec<f32>,
    /// `x` after a norm, `[rows, hidden_size]`.
    pub(crate) normed: Vec<f32>,
    /// What a part adds to `x`, `[rows, hidden_size]`.
    pub(crate) out: Vec<f32>,
    /// `[rows, num_heads · head_dim]`.
    pub(crate) q: Vec<f32>,
    /// `[rows, num_kv_heads · head_dim]`.
    pub(crate) k: Vec<f32>,
    /// `[rows, num_kv_heads · head_dim]`.
    pub(crate) v: Vec<f32>,
    /// `[rows, num_heads · head_dim]`.
    pub(crate) attended: Vec<f32>,
    /// `[rows, intermediate_size]`.
    pub(crate) gate: Vec<f32>,
    /// `[rows, intermediate_size]`.
    pub(crate) up: Vec<f32>,
    /// Cosines then sines of each row's position, `[rows, head_dim]`.
    pub(crate) cos_sin: Vec<f32>,
    /// Logits of the rows that were asked for, `[asked, vocab_size]`; grows to the most ever asked.
    pub(crate) logits: Vec<f32>,
}

impl Scratch {
    /// Buffers for steps of up to `max_rows` rows; `None` when they do not fit in memory.
    pub(crate) fn new(config: &ModelConfig, max_rows: usize) -> Option<Self> {
        let intermediate = config.layers.iter().map(|layer| match layer.feed_forward {
            FeedForward::Dense { intermediate_size } => intermediate_size,
        });
        let intermediate_size = intermediate.max().unwrap_or(0);
        let rows_of = |width: usize| zeroed(max_rows.checked_mul(width)?);
        Some(Scratch {
            x: rows_of(config.hidden_size)?,
            normed: rows_of(config.hidden_size)?,
            out: rows_of(config.hidden_size)?,
            q: rows_of(config.q_features())?,
            k: rows_of(config.kv_features())?,
            v: rows_of(config.kv_features())?,
            attended: rows_of(config.q_features())?,
            gate: rows_of(intermediate_size)?,
            up: rows_of(intermediate_size)?,
            cos_sin: rows_of(config.head_dim)?,
            logits: Vec::new(),
        })
    }
}
