//! The norms of a transformer, by place. Adapters may bring norm weights of their own; nothing else here knows norms.

use std::fmt;

/// One norm of a model. The derived order has no meaning beyond being fixed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum NormSite {
    /// A norm of a layer.
    Layer {
        /// Layer index, from 0.
        layer: usize,
        /// Which one.
        norm: LayerNorm,
    },
    /// The norm before the head, `[hidden_size]`.
    Final,
}

/// The norms that a layer can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum LayerNorm {
    /// Before attention, or what stands in its place: `[hidden_size]`.
    Input,
    /// Before the feed-forward part: `[hidden_size]`.
    PostAttention,
    /// Over each query head: `[head_dim]`.
    Query,
    /// Over each key head: `[head_dim]`.
    Key,
}

impl LayerNorm {
    /// The name of its module in a layer of a transformers model.
    pub const fn name(self) -> &'static str {
        match self {
            LayerNorm::Input => "input_layernorm",
            LayerNorm::PostAttention => "post_attention_layernorm",
            LayerNorm::Query => "q_norm",
            LayerNorm::Key => "k_norm",
        }
    }
}

impl fmt::Display for NormSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NormSite::Layer { layer, norm } => write!(f, "layer {layer} {}", norm.name()),
            NormSite::Final => f.write_str("norm"),
        }
    }
}
