//! What a base model is: the numbers its arithmetic is built from, whatever file they came from.
//!
//! [`ModelConfig`] is the resolved form: defaults are filled in, spellings are gone, and everything that this
//! engine cannot compute has been refused by name. The parsers live beside it: `hf_config` reads `config.json`,
//! `gguf::config` reads GGUF metadata.

use std::fmt;
use std::path::Path;

use super::error::CheckpointError;
use crate::rope::RopeTable;

/// The largest size that a file may name: far above every model, and small enough that products of two fit.
pub(crate) const MAX_SIZE: usize = 1 << 30;

/// The most layers that a file may name; each costs memory before any tensor is looked at.
const MAX_LAYERS: usize = 1 << 14;

/// The families of decoder that the engine computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Architecture {
    /// Llama 1 to 3.x and everything that saves itself as `llama` (SmolLM2, TinyLlama, …).
    Llama,
    /// Qwen2 and Qwen2.5: biases on q, k and v.
    Qwen2,
    /// Qwen3 dense: RMS norms over each head of q and k.
    Qwen3,
}

impl Architecture {
    /// Every architecture, in the order in which messages list them.
    pub const ALL: [Self; 3] = [Self::Llama, Self::Qwen2, Self::Qwen3];

    /// The name used in `config.json` (`model_type`) and in GGUF (`general.architecture`).
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }

    /// The architecture called `name`, or `None` when the engine does not compute it.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|architecture| architecture.name() == name)
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The function between gate and down projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activation {
    /// `x · sigmoid(x)`.
    Silu,
}

/// How positions become rotations. [`crate::rope::RopeTable`] turns it into numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// The base of the geometric series of frequencies.
    pub theta: f64,
    /// What is done to the frequencies to stretch the context.
    pub scaling: RopeScaling,
}

/// Rules that stretch the context; the formulas are in [`crate::rope`].
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// None.
    Default,
    /// Every frequency divided by `factor`.
    Linear {
        /// Divisor of the frequencies, above 0.
        factor: f64,
    },
    /// The base grows with the length of the sequence once that passes `max_position_embeddings`.
    Dynamic {
        /// Growth per multiple of the trained length.
        factor: f64,
        /// The trained length, in tokens.
        max_position_embeddings: usize,
    },
    /// Low frequencies interpolated, high ones kept, a ramp between; cos and sin scaled.
    Yarn(YarnScaling),
    /// Llama 3.1's piecewise rule over wavelengths.
    Llama3(Llama3Scaling),
    /// One divisor per frequency, `head_dim / 2` of them: the form in which GGUF files carry Llama 3.1's rule.
    Divisors(Vec<f32>),
}

/// The numbers of [`RopeScaling::Yarn`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct YarnScaling {
    /// Divisor of the interpolated frequencies.
    pub factor: f64,
    /// Multiplier of cos and sin, already derived when the file does not give it.
    pub attention_factor: f64,
    /// Rotations over the trained length above which a frequency is kept.
    pub beta_fast: f64,
    /// Rotations over the trained length below which a frequency is interpolated.
    pub beta_slow: f64,
    /// The trained length, in tokens.
    pub original_max_position_embeddings: usize,
    /// Whether the ends of the ramp are rounded outward to whole dimensions.
    pub truncate: bool,
}

/// The numbers of [`RopeScaling::Llama3`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Llama3Scaling {
    /// Divisor of the low frequencies.
    pub factor: f64,
    /// The trained length over this is the longest wavelength that is smoothed.
    pub low_freq_factor: f64,
    /// The trained length over this is the shortest wavelength that is smoothed.
    pub high_freq_factor: f64,
    /// The trained length, in tokens.
    pub original_max_position_embeddings: usize,
}

/// What one decoder layer is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct LayerConfig {
    /// How tokens see each other.
    pub mixer: Mixer,
    /// What is done to each token alone.
    pub feed_forward: FeedForward,
}

/// How a layer lets tokens see each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mixer {
    /// Causal attention over every earlier position.
    FullAttention,
}

/// The part of a layer that treats each token alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FeedForward {
    /// Gate, up and down projections.
    Dense {
        /// Width between up and down.
        intermediate_size: usize,
    },
}

/// A base model's numbers, resolved and checked.
///
/// Sizes are counts of elements; every size is at least 1, `num_heads` is a multiple of `num_kv_heads`, and
/// `head_dim` is even.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ModelConfig {
    /// The family.
    pub architecture: Architecture,
    /// Rows of the embedding and of the output head.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the dense feed-forward part (the same in every layer of the families known today).
    pub intermediate_size: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Width of one head; `num_heads · head_dim` need not be `hidden_size`.
    pub head_dim: usize,
    /// Added to the mean square in every RMS norm.
    pub rms_norm_eps: f32,
    /// Whether the output head is the embedding.
    pub tie_word_embeddings: bool,
    /// Whether q, k and v projections carry biases.
    pub qkv_bias: bool,
    /// Whether the o projection carries a bias.
    pub o_bias: bool,
    /// Whether gate, up and down projections carry biases.
    pub mlp_bias: bool,
    /// Whether each head of q and k passes an RMS norm before rotation.
    pub qk_norm: bool,
    /// The context length that the checkpoint declares, in tokens.
    pub max_position_embeddings: usize,
    /// Positions.
    pub rope: RopeConfig,
    /// The feed-forward activation.
    pub activation: Activation,
    /// First token of a sequence, where the model has one.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a generation, ascending, without repeats; empty when the files name none.
    pub eos_token_ids: Vec<u32>,
    /// The layers from first to last.
    pub layers: Vec<LayerConfig>,
}

impl ModelConfig {
    /// Number of decoder layers.
    #[must_use]
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// Output width of the q projection and input width of o: `num_heads · head_dim`.
    #[must_use]
    pub fn q_features(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Output width of the k and of the v projection: `num_kv_heads · head_dim`.
    #[must_use]
    pub fn kv_features(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// Adds `num_layers` equal layers and checks what a parser cannot check field by field.
    pub(crate) fn finish(&mut self, path: &Path, num_layers: usize, layer: LayerConfig) -> Result<(), CheckpointError> {
        let check = |holds: bool, field: &str, found: usize, expected: String| {
            if holds { Ok(()) } else { Err(CheckpointError::field(path, field, found.to_string(), expected)) }
        };
        let most = format!("at most {MAX_LAYERS}");
        check(num_layers <= MAX_LAYERS, "the number of layers", num_layers, most)?;
        let multiple = format!("a multiple of the number of KV heads, {}", self.num_kv_heads);
        let divides = self.num_heads.is_multiple_of(self.num_kv_heads);
        check(divides, "the number of attention heads", self.num_heads, multiple)?;
        if !(self.rms_norm_eps.is_finite() && self.rms_norm_eps >= 0.0) {
            let found = self.rms_norm_eps.to_string();
            return Err(CheckpointError::field(path, "rms_norm_eps", found, "a finite number of at least 0"));
        }
        RopeTable::new(&self.rope, self.head_dim, 0)
            .map_err(|source| CheckpointError::Rope { path: path.to_owned(), source })?;
        self.eos_token_ids.sort_unstable();
        self.eos_token_ids.dedup();
        self.layers = vec![layer; num_layers];
        Ok(())
    }
}
