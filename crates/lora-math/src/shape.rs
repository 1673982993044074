//! The shape of a model as LoRA sees it: which modules each layer carries, and their features.
//!
//! Layers may differ: a hybrid model has attention projections on its attention layers only, while a dense MLP has its
//! place on every layer.

use thiserror::Error;

use crate::module::{Module, Part};
use crate::site::Site;

/// Input and output width of a projection: its weight is `[out_features, in_features]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Features {
    /// Length of the input vector.
    pub in_features: usize,
    /// Length of the output vector.
    pub out_features: usize,
}

/// What one layer carries.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct LayerShape {
    modules: Vec<(Module, Features)>,
    num_experts: usize,
}

/// Sizes of the dense MLP of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MlpSize {
    /// Model width.
    pub hidden_size: usize,
    /// Width between up and down.
    pub intermediate_size: usize,
}

/// Sizes of the attention of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionSize {
    /// Model width.
    pub hidden_size: usize,
    /// Output features of `q_proj`: heads × head size, doubled where the query carries an output gate.
    pub q_features: usize,
    /// Output features of `k_proj` and of `v_proj`: KV heads × head size.
    pub kv_features: usize,
    /// Input features of `o_proj`: heads × head size.
    pub o_features: usize,
}

/// A shape that cannot be a model's.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// A module is given twice in one layer.
    #[error("layer {layer}: {module} is given twice")]
    DuplicateModule {
        /// The layer.
        layer: usize,
        /// The module.
        module: Module,
    },
    /// A width is 0.
    #[error(
        "layer {layer}: {module} has in_features {in_features} and out_features {out_features}; both must be positive"
    )]
    EmptyFeatures {
        /// The layer.
        layer: usize,
        /// The module.
        module: Module,
        /// Its `in_features`.
        in_features: usize,
        /// Its `out_features`.
        out_features: usize,
    },
    /// Embedding or head inside a layer, or expert modules in a layer without experts.
    #[error("layer {layer}: {module} cannot stand there ({num_experts} experts)")]
    Misplaced {
        /// The layer.
        layer: usize,
        /// The module.
        module: Module,
        /// Experts of that layer.
        num_experts: usize,
    },
    /// No layers, or a hidden or vocabulary size of 0.
    #[error(
        "a model needs layers, a hidden size and a vocabulary: {num_layers} layers, hidden {hidden_size}, vocabulary {vocab_size}"
    )]
    Empty {
        /// Number of layers.
        num_layers: usize,
        /// Hidden size.
        hidden_size: usize,
        /// Vocabulary size.
        vocab_size: usize,
    },
}

impl LayerShape {
    /// A layer that carries nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds one module.
    #[must_use]
    pub fn with(mut self, module: Module, features: Features) -> Self {
        self.modules.push((module, features));
        self
    }

    /// Adds q, k, v and o.
    #[must_use]
    pub fn with_attention(self, size: AttentionSize) -> Self {
        let AttentionSize { hidden_size, q_features, kv_features, o_features } = size;
        self.with(Module::QProj, Features { in_features: hidden_size, out_features: q_features })
            .with(Module::KProj, Features { in_features: hidden_size, out_features: kv_features })
            .with(Module::VProj, Features { in_features: hidden_size, out_features: kv_features })
            .with(Module::OProj, Features { in_features: o_features, out_features: hidden_size })
    }

    /// Adds gate, up and down of a dense MLP.
    #[must_use]
    pub fn with_mlp(self, size: MlpSize) -> Self {
        let MlpSize { hidden_size, intermediate_size } = size;
        self.with(Module::GateProj, Features { in_features: hidden_size, out_features: intermediate_size })
            .with(Module::UpProj, Features { in_features: hidden_size, out_features: intermediate_size })
            .with(Module::DownProj, Features { in_features: intermediate_size, out_features: hidden_size })
    }

    /// Adds gate, up and down of `num_experts` routed experts of one size.
    #[must_use]
    pub fn with_experts(mut self, num_experts: usize, size: MlpSize) -> Self {
        let MlpSize { hidden_size, intermediate_size } = size;
        self.num_experts = num_experts;
        self.with(Module::ExpertGateProj, Features { in_features: hidden_size, out_features: intermediate_size })
            .with(Module::ExpertUpProj, Features { in_features: hidden_size, out_features: intermediate_size })
            .with(Module::ExpertDownProj, Features { in_features: intermediate_size, out_features: hidden_size })
    }

    /// The modules of the layer with their features, in layout order. Expert modules stand once, for every expert.
    pub fn modules(&self) -> &[(Module, Features)] {
        &self.modules
    }

    /// Features of `module` in this layer; none where the layer does not carry it.
    pub fn features(&self, module: Module) -> Option<Features> {
        self.modules.iter().find(|(m, _)| *m == module).map(|(_, features)| *features)
    }

    /// Number of routed experts; 0 on dense layers.
    pub fn num_experts(&self) -> usize {
        self.num_experts
    }
}

/// The shape of a model: its layers, and the width of its embedding and head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelShape {
    layers: Vec<LayerShape>,
    hidden_size: usize,
    vocab_size: usize,
}

impl ModelShape {
    /// A checked shape. `vocab_size` is the number of rows of the embedding table.
    pub fn new(hidden_size: usize, vocab_size: usize, mut layers: Vec<LayerShape>) -> Result<Self, ShapeError> {
        if layers.is_empty() || hidden_size == 0 || vocab_size == 0 {
            return Err(ShapeError::Empty { num_layers: layers.len(), hidden_size, vocab_size });
        }
        for (layer, shape) in layers.iter_mut().enumerate() {
            shape.modules.sort_by_key(|(module, _)| *module);
            for pair in shape.modules.windows(2) {
                if pair[0].0 == pair[1].0 {
                    return Err(ShapeError::DuplicateModule { layer, module: pair[0].0 });
                }
            }
            for &(module, Features { in_features, out_features }) in &shape.modules {
                let misplaced = match module.part() {
                    Part::Layer => false,
                    Part::Expert => shape.num_experts == 0,
                    Part::Vocabulary => true,
                };
                if misplaced {
                    return Err(ShapeError::Misplaced { layer, module, num_experts: shape.num_experts });
                }
                if in_features == 0 || out_features == 0 {
                    return Err(ShapeError::EmptyFeatures { layer, module, in_features, out_features });
                }
            }
        }
        Ok(ModelShape { layers, hidden_size, vocab_size })
    }

    /// A model whose `num_layers` layers are all alike.
    pub fn uniform(
        hidden_size: usize,
        vocab_size: usize,
        num_layers: usize,
        layer: LayerShape,
    ) -> Result<Self, ShapeError> {
        Self::new(hidden_size, vocab_size, vec![layer; num_layers])
    }

    /// The layers, ascending.
    pub fn layers(&self) -> &[LayerShape] {
        &self.layers
    }

    /// Number of layers.
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// Model width.
    pub fn hidden_size(&self) -> usize {
        self.hidden_size
    }

    /// Rows of the embedding table.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Features of a site, or none where the model has no such site.
    pub fn features(&self, site: Site) -> Option<Features> {
        match site {
            Site::Layer { layer, module } => {
                (module.part() == Part::Layer).then(|| self.layers.get(layer)?.features(module))?
            }
            Site::Expert { layer, expert, module } => {
                let shape = self.layers.get(layer)?;
                (module.part() == Part::Expert && expert < shape.num_experts()).then(|| shape.features(module))?
            }
            Site::Vocabulary { module: Module::EmbedTokens } => {
                Some(Features { in_features: self.vocab_size, out_features: self.hidden_size })
            }
            Site::Vocabulary { module: Module::LmHead } => {
                Some(Features { in_features: self.hidden_size, out_features: self.vocab_size })
            }
            Site::Vocabulary { .. } => None,
        }
    }
}
