//! The weights of a dense decoder as the forward pass takes them: plain row-major matrices and vectors.
//!
//! Matrices keep the checkpoint's precision where the kernels can read it (f32, bf16); everything else becomes
//! f32 when it is loaded. Nothing is packed for a kernel here.

use half::bf16;

/// Precisions in which a weight matrix can lie in memory.
///
/// A checkpoint's f16 tensors and quantised blocks are widened to f32, which holds every one of their values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WeightDtype {
    /// IEEE single precision.
    F32,
    /// bfloat16; a wider source is rounded to nearest even.
    Bf16,
}

impl WeightDtype {
    /// Bytes of one element.
    #[must_use]
    pub fn size_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }

    /// The name used in messages and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }
}

/// The elements of a matrix, borrowed.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum WeightSlice<'a> {
    /// f32 elements.
    F32(&'a [f32]),
    /// bf16 elements.
    Bf16(&'a [bf16]),
}

/// The elements of a matrix, owned.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum WeightData {
    /// f32 elements.
    F32(Vec<f32>),
    /// bf16 elements.
    Bf16(Vec<bf16>),
}

impl WeightData {
    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::F32(data) => data.len(),
            Self::Bf16(data) => data.len(),
        }
    }

    /// Whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A matrix `[out_features, in_features]`, row-major.
#[derive(Debug, Clone, PartialEq)]
pub struct WeightMatrix {
    out_features: usize,
    in_features: usize,
    data: WeightData,
}

impl WeightMatrix {
    /// A matrix over `data`; `None` unless `data` holds exactly `out_features · in_features` elements.
    #[must_use]
    pub fn new(out_features: usize, in_features: usize, data: WeightData) -> Option<Self> {
        (out_features.checked_mul(in_features)? == data.len()).then_some(Self { out_features, in_features, data })
    }

    /// Rows: the width of what the matrix gives.
    #[must_use]
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Columns: the width of what the matrix takes.
    #[must_use]
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// The precision in memory.
    #[must_use]
    pub fn dtype(&self) -> WeightDtype {
        match self.data {
            WeightData::F32(_) => WeightDtype::F32,
            WeightData::Bf16(_) => WeightDtype::Bf16,
        }
    }

    /// Bytes in memory.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        self.data.len() * self.dtype().size_bytes()
    }

    /// All elements, row after row.
    #[must_use]
    pub fn as_slice(&self) -> WeightSlice<'_> {
        match &self.data {
            WeightData::F32(data) => WeightSlice::F32(data),
            WeightData::Bf16(data) => WeightSlice::Bf16(data),
        }
    }

    /// Row `row`, or `None` past the last. A row of the embedding is one token's vector.
    #[must_use]
    pub fn row(&self, row: usize) -> Option<WeightSlice<'_>> {
        if row >= self.out_features {
            return None;
        }
        let range = row * self.in_features..(row + 1) * self.in_features;
        Some(match &self.data {
            WeightData::F32(data) => WeightSlice::F32(&data[range]),
            WeightData::Bf16(data) => WeightSlice::Bf16(&data[range]),
        })
    }
}

/// A projection: `y = W·x + bias`.
#[derive(Debug, Clone, PartialEq)]
pub struct Linear {
    /// `[out_features, in_features]`.
    pub weight: WeightMatrix,
    /// `[out_features]`.
    pub bias: Option<Vec<f32>>,
}

/// One decoder layer with full attention and a dense feed-forward part.
#[derive(Debug, Clone, PartialEq)]
pub struct DenseLayerWeights {
    /// `[num_heads · head_dim, hidden_size]`.
    pub q: Linear,
    /// `[num_kv_heads · head_dim, hidden_size]`.
    pub k: Linear,
    /// `[num_kv_heads · head_dim, hidden_size]`.
    pub v: Linear,
    /// `[hidden_size, num_heads · head_dim]`.
    pub o: Linear,
    /// `[intermediate_size, hidden_size]`.
    pub gate: Linear,
    /// `[intermediate_size, hidden_size]`.
    pub up: Linear,
    /// `[hidden_size, intermediate_size]`.
    pub down: Linear,
    /// RMS norm before attention, `[hidden_size]`.
    pub input_norm: Vec<f32>,
    /// RMS norm before the feed-forward part, `[hidden_size]`.
    pub post_attention_norm: Vec<f32>,
    /// RMS norm over each head of q, `[head_dim]`, where the architecture has one.
    pub q_norm: Option<Vec<f32>>,
    /// RMS norm over each head of k, `[head_dim]`, where the architecture has one.
    pub k_norm: Option<Vec<f32>>,
}

/// All weights of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelWeights {
    /// `[vocab_size, hidden_size]`.
    pub embed_tokens: WeightMatrix,
    /// Layers from first to last.
    pub layers: Vec<DenseLayerWeights>,
    /// RMS norm before the output head, `[hidden_size]`.
    pub final_norm: Vec<f32>,
    /// `[vocab_size, hidden_size]`; `None` when the embedding serves as the head.
    pub lm_head: Option<WeightMatrix>,
}

impl ModelWeights {
    /// The output head: `lm_head`, or the embedding of a tied model.
    #[must_use]
    pub fn output_head(&self) -> &WeightMatrix {
        self.lm_head.as_ref().unwrap_or(&self.embed_tokens)
    }
}
