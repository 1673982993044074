//! A decoder-only transformer as a list of layers, each described by its parts.
//!
//! A layer is a `Mixer` (how tokens see each other) and a `FeedForward` (what is done to each token alone); the
//! forward pass matches on the parts, so a family of models is a description and not a copy of the pass. The model holds
//! weights and the description only: sequences, caches and adapters are the engine's.

pub(crate) mod attention;
mod base_weights;
pub(crate) mod forward;
pub(crate) mod lora;
pub(crate) mod ops;
pub(crate) mod scratch;
pub(crate) mod vectors;

use lora_kernels::Cpu;
use lora_math::shape::{AttentionSize as AttentionFeatures, MlpSize, ShapeError};
use lora_math::{LayerShape, ModelShape};

use crate::checkpoint::config::{FeedForward as FeedForwardConfig, Mixer as MixerConfig, ModelConfig};
use crate::checkpoint::weights::{DenseLayerWeights, Linear, ModelWeights, WeightMatrix};
use crate::kv_cache::KvShape;

/// A configuration and weights that do not make a model. The checkpoint has to change; a retry cannot help.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A matrix has other sizes than the configuration says.
    #[error(
        "{tensor}: expected [{}, {}], found [{}, {}]",
        .expected.0, .expected.1, .found.0, .found.1
    )]
    MatrixShape {
        /// Which matrix.
        tensor: String,
        /// `(out_features, in_features)` by the configuration.
        expected: (usize, usize),
        /// `(out_features, in_features)` of the weights.
        found: (usize, usize),
    },
    /// A vector has another length than the configuration says.
    #[error("{tensor}: expected {expected} elements, found {found}")]
    VectorLength {
        /// Which vector.
        tensor: String,
        /// Length by the configuration.
        expected: usize,
        /// Length of the weights.
        found: usize,
    },
    /// The configuration and the weights disagree about the number of layers.
    #[error("the configuration has {expected} layers, the weights {found}")]
    NumLayers {
        /// Layers of the configuration.
        expected: usize,
        /// Layers of the weights.
        found: usize,
    },
    /// The configuration's sizes cannot be a model's.
    #[error("heads do not fit: {num_heads} query heads, {num_kv_heads} key and value heads, head_dim {head_dim}")]
    Heads {
        /// Query heads.
        num_heads: usize,
        /// Key and value heads.
        num_kv_heads: usize,
        /// Width of a head.
        head_dim: usize,
    },
    /// The layers carry no valid sites.
    #[error(transparent)]
    Shape(#[from] ShapeError),
}

/// One decoder layer.
#[derive(Debug)]
pub(crate) struct Layer {
    /// Norm before the mixer, `[hidden_size]`.
    pub(crate) input_norm: Vec<f32>,
    pub(crate) mixer: Mixer,
    /// Norm before the feed-forward part, `[hidden_size]`.
    pub(crate) post_attention_norm: Vec<f32>,
    pub(crate) feed_forward: FeedForward,
}

/// How a layer lets tokens see each other.
#[derive(Debug)]
pub(crate) enum Mixer {
    /// Causal attention over every earlier position.
    Attention(Attention),
}

/// Full attention with rotation, and norms over the heads of q and k where the family has them.
#[derive(Debug)]
pub(crate) struct Attention {
    pub(crate) q: Linear,
    pub(crate) k: Linear,
    pub(crate) v: Linear,
    pub(crate) o: Linear,
    pub(crate) q_norm: Option<Vec<f32>>,
    pub(crate) k_norm: Option<Vec<f32>>,
    /// Which layer of the KV cache is this one's: only attention layers have one.
    pub(crate) kv_layer: usize,
}

/// What a layer does to each token alone.
#[derive(Debug)]
pub(crate) enum FeedForward {
    /// `down(silu(gate(x)) · up(x))`.
    Dense(Mlp),
}

/// The projections of a gated MLP.
#[derive(Debug)]
pub(crate) struct Mlp {
    pub(crate) gate: Linear,
    pub(crate) up: Linear,
    pub(crate) down: Linear,
    pub(crate) intermediate_size: usize,
}

/// A base model: configuration, weights, and the shape by which adapters are laid out.
#[derive(Debug)]
pub struct TransformerModel {
    config: ModelConfig,
    shape: ModelShape,
    embed_tokens: WeightMatrix,
    layers: Vec<Layer>,
    final_norm: Vec<f32>,
    lm_head: Option<WeightMatrix>,
    num_kv_layers: usize,
    /// The base products.
    products: Cpu,
}

impl TransformerModel {
    /// A model of these weights.
    ///
    /// # Errors
    /// [`ModelError`] when a tensor's sizes are not those of the configuration.
    pub fn new(config: ModelConfig, weights: ModelWeights) -> Result<Self, ModelError> {
        let ModelConfig { num_heads, num_kv_heads, head_dim, hidden_size, vocab_size, .. } = config;
        if num_kv_heads == 0 || num_heads == 0 || !num_heads.is_multiple_of(num_kv_heads) || head_dim == 0 {
            return Err(ModelError::Heads { num_heads, num_kv_heads, head_dim });
        }
        if weights.layers.len() != config.num_layers() {
            return Err(ModelError::NumLayers { expected: config.num_layers(), found: weights.layers.len() });
        }
        check_matrix("embed_tokens", &weights.embed_tokens, (vocab_size, hidden_size))?;
        if let Some(head) = &weights.lm_head {
            check_matrix("lm_head", head, (vocab_size, hidden_size))?;
        }
        check_vector("norm", &weights.final_norm, hidden_size)?;
        let mut num_kv_layers = 0;
        let mut layers = Vec::with_capacity(weights.layers.len());
        for (index, layer) in weights.layers.into_iter().enumerate() {
            check_layer(&config, index, &layer)?;
            layers.push(describe(&config, index, layer, &mut num_kv_layers));
        }
        let shape = config_shape(&config)?;
        Ok(TransformerModel {
            shape,
            embed_tokens: weights.embed_tokens,
            layers,
            final_norm: weights.final_norm,
            lm_head: weights.lm_head,
            num_kv_layers,
            products: Cpu::new(),
            config,
        })
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The shape as adapters and pools see it.
    #[must_use]
    pub fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// Bytes of all matrices, the embedding counted once where it is also the head.
    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        let linears = self.layers.iter().flat_map(|layer| {
            let Mixer::Attention(Attention { q, k, v, o, .. }) = &layer.mixer;
            let FeedForward::Dense(Mlp { gate, up, down, .. }) = &layer.feed_forward;
            [q, k, v, o, gate, up, down]
        });
        let matrices = [Some(&self.embed_tokens), self.lm_head.as_ref()].into_iter().flatten();
        linears.map(|linear| &linear.weight).chain(matrices).map(WeightMatrix::size_bytes).sum()
    }

    /// What one position costs in the KV cache.
    #[must_use]
    pub fn kv_shape(&self) -> KvShape {
        let ModelConfig { num_kv_heads, head_dim, .. } = self.config;
        KvShape { num_layers: self.num_kv_layers, num_kv_heads, head_dim }
    }

    fn output_head(&self) -> &WeightMatrix {
        self.lm_head.as_ref().unwrap_or(&self.embed_tokens)
    }
}

/// The sites of a model with this configuration; the same numbers that its weights are checked against.
///
/// # Errors
/// [`ShapeError`] when the configuration has no layers or a width of 0.
pub fn config_shape(config: &ModelConfig) -> Result<ModelShape, ShapeError> {
    let layers = config.layers.iter().map(|layer| {
        let mut shape = LayerShape::new();
        match layer.mixer {
            MixerConfig::FullAttention => {
                shape = shape.with_attention(AttentionFeatures {
                    hidden_size: config.hidden_size,
                    q_features: config.q_features(),
                    kv_features: config.kv_features(),
                    o_features: config.q_features(),
                });
            }
        }
        match layer.feed_forward {
            FeedForwardConfig::Dense { intermediate_size } => {
                shape.with_mlp(MlpSize { hidden_size: config.hidden_size, intermediate_size })
            }
        }
    });
    ModelShape::new(config.hidden_size, config.vocab_size, layers.collect())
}

fn describe(config: &ModelConfig, index: usize, layer: DenseLayerWeights, num_kv_layers: &mut usize) -> Layer {
    let DenseLayerWeights { q, k, v, o, gate, up, down, input_norm, post_attention_norm, q_norm, k_norm } = layer;
    let mixer = match config.layers[index].mixer {
        MixerConfig::FullAttention => {
            let kv_layer = *num_kv_layers;
            *num_kv_layers += 1;
            Mixer::Attention(Attention { q, k, v, o, q_norm, k_norm, kv_layer })
        }
    };
    let feed_forward = match config.layers[index].feed_forward {
        FeedForwardConfig::Dense { intermediate_size } => FeedForward::Dense(Mlp { gate, up, down, intermediate_size }),
    };
    Layer { input_norm, mixer, post_attention_norm, feed_forward }
}

fn check_layer(config: &ModelConfig, index: usize, layer: &DenseLayerWeights) -> Result<(), ModelError> {
    let FeedForwardConfig::Dense { intermediate_size } = config.layers[index].feed_forward;
    let (hidden, q_features, kv_features) = (config.hidden_size, config.q_features(), config.kv_features());
    let linears = [
        ("q_proj", &layer.q, (q_features, hidden)),
        ("k_proj", &layer.k, (kv_features, hidden)),
        ("v_proj", &layer.v, (kv_features, hidden)),
        ("o_proj", &layer.o, (hidden, q_features)),
        ("gate_proj", &layer.gate, (intermediate_size, hidden)),
        ("up_proj", &layer.up, (intermediate_size, hidden)),
        ("down_proj", &layer.down, (hidden, intermediate_size)),
    ];
    for (name, linear, expected) in linears {
        check_matrix(&format!("layer {index} {name}"), &linear.weight, expected)?;
        if let Some(bias) = &linear.bias {
            check_vector(&format!("layer {index} {name} bias"), bias, expected.0)?;
        }
    }
    let norms = [
        ("input_layernorm", Some(&layer.input_norm), hidden),
        ("post_attention_layernorm", Some(&layer.post_attention_norm), hidden),
        ("q_norm", layer.q_norm.as_ref(), config.head_dim),
        ("k_norm", layer.k_norm.as_ref(), config.head_dim),
    ];
    for (name, norm, expected) in norms {
        if let Some(norm) = norm {
            check_vector(&format!("layer {index} {name}"), norm, expected)?;
        }
    }
    Ok(())
}

fn check_matrix(tensor: &str, matrix: &WeightMatrix, expected: (usize, usize)) -> Result<(), ModelError> {
    let found = (matrix.out_features(), matrix.in_features());
    if found == expected { Ok(()) } else { Err(ModelError::MatrixShape { tensor: tensor.into(), expected, found }) }
}

fn check_vector(tensor: &str, vector: &[f32], expected: usize) -> Result<(), ModelError> {
    let found = vector.len();
    if found == expected { Ok(()) } else { Err(ModelError::VectorLength { tensor: tensor.into(), expected, found }) }
}
