//! From an opened source to checked, owned weights.
//!
//! The names and shapes of everything that a configuration needs are listed first and compared with the file; only
//! when all of them fit, and nothing is left over, are data read.

use std::collections::{BTreeMap, BTreeSet};

use super::LoadOptions;
use super::config::{FeedForward, LayerConfig, ModelConfig};
use super::error::CheckpointError;
use super::source::TensorSource;
use super::weights::{DenseLayerWeights, Linear, ModelWeights, WeightData, WeightDtype, WeightMatrix};

const EMBEDDING: &str = "model.embed_tokens.weight";
const FINAL_NORM: &str = "model.norm.weight";
const HEAD: &str = "lm_head.weight";

/// Progress of a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadProgress {
    /// Tensors read so far.
    pub tensors_done: usize,
    /// Tensors to read.
    pub tensors_total: usize,
}

/// Where embedding and head come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tying {
    /// Two tensors.
    Separate,
    /// One tensor, stored as the embedding; the head is absent or equal to it.
    Embedding,
    /// One tensor, stored as the head.
    Head,
}

/// What a configuration needs from a source: names by Hugging Face, with shapes.
pub(crate) struct Plan {
    required: BTreeMap<String, Vec<usize>>,
    tying: Tying,
}

fn layer_name(layer: usize, module: &str) -> String {
    format!("model.layers.{layer}.{module}")
}

/// Tensors that transformers ignores as well: the frequencies that old Llama checkpoints stored, which follow from
/// the configuration.
fn is_ignored(file_name: &str) -> bool {
    file_name.ends_with(".rotary_emb.inv_freq")
}

impl Plan {
    /// Lists what `config` needs and compares it with `source`.
    ///
    /// A tied model may still store `lm_head.weight`. As in transformers, equal values mean that it is tied, other
    /// values that it is not whatever the configuration says, and a head without an embedding serves as both.
    ///
    /// # Errors
    /// [`CheckpointError`] for a missing tensor, a wrong shape, or tensors that nothing uses.
    pub(crate) fn new(config: &ModelConfig, source: &dyn TensorSource) -> Result<Self, CheckpointError> {
        let matrix = vec![config.vocab_size, config.hidden_size];
        let tying = tying(config, source)?;
        let mut required = BTreeMap::from([(FINAL_NORM.to_owned(), vec![config.hidden_size])]);
        if tying != Tying::Head {
            required.insert(EMBEDDING.to_owned(), matrix.clone());
        }
        if tying != Tying::Embedding {
            required.insert(HEAD.to_owned(), matrix);
        }
        for (index, layer) in config.layers.iter().enumerate() {
            for (module, shape) in layer_tensors(config, layer) {
                required.insert(layer_name(index, &module), shape);
            }
        }
        let plan = Self { required, tying };
        plan.check(source)?;
        Ok(plan)
    }

    fn check(&self, source: &dyn TensorSource) -> Result<(), CheckpointError> {
        let mut used = BTreeSet::new();
        for (name, expected) in &self.required {
            let file_name = source.file_name(name);
            let expected = expected.clone();
            let Some(found) = source.find(&file_name) else {
                let path = source.path().to_owned();
                return Err(CheckpointError::MissingTensor { path, tensor: file_name, expected });
            };
            if found.shape != expected {
                let (path, found) = (found.file, found.shape);
                return Err(CheckpointError::WrongShape { path, tensor: file_name, expected, found });
            }
            used.insert(file_name);
        }
        if self.tying == Tying::Embedding {
            used.insert(source.file_name(HEAD));
        }
        let names = source.tensors().into_iter().map(|tensor| tensor.name);
        let unused: Vec<_> = names.filter(|name| !used.contains(name) && !is_ignored(name)).collect();
        if unused.is_empty() {
            Ok(())
        } else {
            Err(CheckpointError::UnusedTensors { path: source.path().to_owned(), tensors: unused })
        }
    }

    /// Whether one matrix serves as embedding and as head.
    pub(crate) fn is_tied(&self) -> bool {
        self.tying != Tying::Separate
    }

    /// Reads everything.
    pub(crate) fn load(
        self,
        config: &ModelConfig,
        source: &dyn TensorSource,
        options: LoadOptions<'_>,
    ) -> Result<ModelWeights, CheckpointError> {
        let tensors_total = self.required.len();
        let mut loader = Loader { shapes: self.required, source, options, tensors_total };
        let (embedding, lm_head) = match self.tying {
            Tying::Separate => (EMBEDDING, Some(loader.matrix(HEAD)?)),
            Tying::Embedding => (EMBEDDING, None),
            Tying::Head => (HEAD, None),
        };
        Ok(ModelWeights {
            embed_tokens: loader.matrix(embedding)?,
            layers: (0..config.num_layers()).map(|layer| loader.layer(layer)).collect::<Result<_, _>>()?,
            final_norm: loader.vector(FINAL_NORM)?,
            lm_head,
        })
    }
}

fn tying(config: &ModelConfig, source: &dyn TensorSource) -> Result<Tying, CheckpointError> {
    if !config.tie_word_embeddings {
        return Ok(Tying::Separate);
    }
    let find = |name| source.find(&source.file_name(name));
    Ok(match (find(EMBEDDING), find(HEAD)) {
        (_, None) => Tying::Embedding,
        (None, Some(_)) => Tying::Head,
        (Some(embedding), Some(head)) => {
            // Different shapes are reported when the two are checked one by one.
            let equal = embedding.shape == head.shape
                && source.read(EMBEDDING, Some(WeightDtype::F32))? == source.read(HEAD, Some(WeightDtype::F32))?;
            if equal { Tying::Embedding } else { Tying::Separate }
        }
    })
}

/// Names within one layer, with shapes.
fn layer_tensors(config: &ModelConfig, layer: &LayerConfig) -> Vec<(String, Vec<usize>)> {
    let FeedForward::Dense { intermediate_size } = layer.feed_forward;
    let (hidden, q, kv) = (config.hidden_size, config.q_features(), config.kv_features());
    let mut tensors = vec![
        ("input_layernorm.weight".to_owned(), vec![hidden]),
        ("post_attention_layernorm.weight".to_owned(), vec![hidden]),
    ];
    if config.qk_norm {
        tensors.push(("self_attn.q_norm.weight".to_owned(), vec![config.head_dim]));
        tensors.push(("self_attn.k_norm.weight".to_owned(), vec![config.head_dim]));
    }
    let projections = [
        ("self_attn.q_proj", q, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q, config.o_bias),
        ("mlp.gate_proj", intermediate_size, hidden, config.mlp_bias),
        ("mlp.up_proj", intermediate_size, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, intermediate_size, config.mlp_bias),
    ];
    for (module, out_features, in_features, bias) in projections {
        tensors.push((format!("{module}.weight"), vec![out_features, in_features]));
        if bias {
            tensors.push((format!("{module}.bias"), vec![out_features]));
        }
    }
    tensors
}

struct Loader<'a, 'p> {
    /// What is still to be read.
    shapes: BTreeMap<String, Vec<usize>>,
    source: &'a dyn TensorSource,
    options: LoadOptions<'p>,
    tensors_total: usize,
}

impl Loader<'_, '_> {
    fn read(&mut self, name: &str, dtype: Option<WeightDtype>) -> Result<(Vec<usize>, WeightData), CheckpointError> {
        let data = self.source.read(name, dtype)?;
        let shape = self.shapes.remove(name).unwrap_or_default();
        if let Some(report) = self.options.progress.as_mut() {
            let tensors_done = self.tensors_total - self.shapes.len();
            report(LoadProgress { tensors_done, tensors_total: self.tensors_total });
        }
        Ok((shape, data))
    }

    fn wrong_shape(&self, name: &str, expected: &[usize], num_elements: usize) -> CheckpointError {
        CheckpointError::WrongShape {
            path: self.source.path().to_owned(),
            tensor: self.source.file_name(name),
            expected: expected.to_vec(),
            found: vec![num_elements],
        }
    }

    fn matrix(&mut self, name: &str) -> Result<WeightMatrix, CheckpointError> {
        let (shape, data) = self.read(name, self.options.weight_dtype)?;
        let num_elements = data.len();
        let matrix = match shape[..] {
            [out_features, in_features] => WeightMatrix::new(out_features, in_features, data),
            _ => None,
        };
        matrix.ok_or_else(|| self.wrong_shape(name, &shape, num_elements))
    }

    /// Vectors are small and enter every row's arithmetic: always f32.
    fn vector(&mut self, name: &str) -> Result<Vec<f32>, CheckpointError> {
        match self.read(name, Some(WeightDtype::F32))? {
            (shape, WeightData::F32(data)) if shape == [data.len()] => Ok(data),
            (shape, data) => Err(self.wrong_shape(name, &shape, data.len())),
        }
    }

    /// The vector under `name` where the plan has it.
    fn opt_vector(&mut self, name: &str) -> Result<Option<Vec<f32>>, CheckpointError> {
        if self.shapes.contains_key(name) { self.vector(name).map(Some) } else { Ok(None) }
    }

    fn linear(&mut self, layer: usize, module: &str) -> Result<Linear, CheckpointError> {
        let weight = self.matrix(&layer_name(layer, &format!("{module}.weight")))?;
        let bias = self.opt_vector(&layer_name(layer, &format!("{module}.bias")))?;
        Ok(Linear { weight, bias })
    }

    fn layer(&mut self, layer: usize) -> Result<DenseLayerWeights, CheckpointError> {
        Ok(DenseLayerWeights {
            q: self.linear(layer, "self_attn.q_proj")?,
            k: self.linear(layer, "self_attn.k_proj")?,
            v: self.linear(layer, "self_attn.v_proj")?,
            o: self.linear(layer, "self_attn.o_proj")?,
            gate: self.linear(layer, "mlp.gate_proj")?,
            up: self.linear(layer, "mlp.up_proj")?,
            down: self.linear(layer, "mlp.down_proj")?,
            input_norm: self.vector(&layer_name(layer, "input_layernorm.weight"))?,
            post_attention_norm: self.vector(&layer_name(layer, "post_attention_layernorm.weight"))?,
            q_norm: self.opt_vector(&layer_name(layer, "self_attn.q_norm.weight"))?,
            k_norm: self.opt_vector(&layer_name(layer, "self_attn.k_norm.weight"))?,
        })
    }
}
