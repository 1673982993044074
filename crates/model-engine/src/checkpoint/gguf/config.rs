//! GGUF metadata to a [`ModelConfig`].
//!
//! Keys are those of ggml's `docs/gguf.md` and llama.cpp's converter. Every key below the architecture's own prefix
//! has to be one that is read here or known to change nothing: an unknown one may change the arithmetic, so it is
//! refused by name.

use std::path::Path;

use super::super::config::{
    Activation, Architecture, FeedForward, LayerConfig, MAX_SIZE, Mixer, ModelConfig, RopeConfig, RopeScaling,
    YarnScaling,
};
use super::super::error::CheckpointError;
use super::{GgufFile, MetadataValue};

/// Keys under the architecture's prefix that change nothing in inference.
const HARMLESS: [&str; 2] = ["rope.scaling.finetuned", "tensor_data_layout"];

/// The divisors of the frequencies by which Llama 3.1 stretches its context.
pub(super) const ROPE_DIVISORS: &str = "rope_freqs.weight";

struct Metadata<'a> {
    path: &'a Path,
    file: &'a GgufFile<'a>,
    architecture: Architecture,
    /// Keys that were asked for, without the architecture's prefix.
    read: std::cell::RefCell<Vec<&'static str>>,
}

impl<'a> Metadata<'a> {
    fn get(&self, key: &'static str) -> Option<&'a MetadataValue<'a>> {
        self.read.borrow_mut().push(key);
        self.file.get(&self.full(key))
    }

    fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn invalid(&self, key: &str, expected: impl Into<String>) -> CheckpointError {
        let key = self.full(key);
        let found = self.file.get(&key).map_or("absent".to_owned(), MetadataValue::summary);
        CheckpointError::field(self.path, key, found, expected)
    }

    fn convert<T>(
        &self,
        key: &'static str,
        expected: &str,
        convert: impl FnOnce(&MetadataValue<'a>) -> Option<T>,
    ) -> Result<Option<T>, CheckpointError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => convert(value).map(Some).ok_or_else(|| self.invalid(key, expected)),
        }
    }

    fn opt_size(&self, key: &'static str) -> Result<Option<usize>, CheckpointError> {
        self.convert(key, "a whole number from 1 to 2^30", |value| {
            // Some writers list one value a layer where all are equal.
            let value = match value.as_array() {
                Some(array) => {
                    let first = array.iter().next()?;
                    array.iter().all(|other| other == first).then_some(first)?.as_u64()?
                }
                None => value.as_u64()?,
            };
            let size = usize::try_from(value).ok()?;
            (1..=MAX_SIZE).contains(&size).then_some(size)
        })
    }

    fn size(&self, key: &'static str) -> Result<usize, CheckpointError> {
        self.opt_size(key)?.ok_or_else(|| self.invalid(key, "a whole number from 1 to 2^30"))
    }

    fn opt_f64(&self, key: &'static str) -> Result<Option<f64>, CheckpointError> {
        self.convert(key, "a number", MetadataValue::as_f64)
    }

    fn unsupported(&self, key: &str, found: impl Into<String>, supported: impl Into<String>) -> CheckpointError {
        CheckpointError::unsupported(self.path, self.full(key), found, supported)
    }

    /// Refuses every key under the architecture's prefix that nothing has read.
    fn refuse_unread(&self) -> Result<(), CheckpointError> {
        let prefix = format!("{}.", self.architecture);
        for (key, value) in self.file.metadata() {
            let Some(name) = key.strip_prefix(&prefix) else { continue };
            if !HARMLESS.contains(&name) && !self.read.borrow().contains(&name) {
                return Err(self.unsupported(name, value.summary(), "files without this key"));
            }
        }
        Ok(())
    }
}

/// The configuration that `file`, read from `path`, describes.
///
/// # Errors
/// [`CheckpointError`] naming the key, for whatever is missing, malformed or not supported.
pub(crate) fn parse(path: &Path, file: &GgufFile<'_>) -> Result<ModelConfig, CheckpointError> {
    let architecture = architecture(path, file)?;
    let metadata = Metadata { path, file, architecture, read: std::cell::RefCell::default() };
    let hidden_size = metadata.size("embedding_length")?;
    let num_heads = metadata.size("attention.head_count")?;
    let num_kv_heads = metadata.opt_size("attention.head_count_kv")?.unwrap_or(num_heads);
    let head_dim = head_dim(&metadata, hidden_size, num_heads)?;
    refuse_other_arithmetic(&metadata)?;

    let max_position_embeddings = metadata.size("context_length")?;
    let intermediate_size = metadata.size("feed_forward_length")?;
    let num_layers = metadata.size("block_count")?;
    let layer = LayerConfig { mixer: Mixer::FullAttention, feed_forward: FeedForward::Dense { intermediate_size } };
    let has = |name: &str| file.tensor(name).is_some();
    let vocab_size = match (metadata.opt_size("vocab_size")?, file.tensor("token_embd.weight")) {
        (Some(vocab_size), _) => vocab_size,
        (None, Some(tensor)) if tensor.shape.len() == 2 && tensor.shape[0] > 0 => tensor.shape[0],
        (None, _) => return Err(metadata.invalid("vocab_size", "a size, here or in token_embd.weight")),
    };
    let eps = metadata.opt_f64("attention.layer_norm_rms_epsilon")?;
    let eps = eps.ok_or_else(|| metadata.invalid("attention.layer_norm_rms_epsilon", "a number"))?;
    let mut config = ModelConfig {
        architecture,
        vocab_size,
        hidden_size,
        intermediate_size,
        num_heads,
        num_kv_heads,
        head_dim,
        rms_norm_eps: eps as f32,
        // llama.cpp's rule: a file without a head uses the embedding.
        tie_word_embeddings: !has("output.weight"),
        qkv_bias: has("blk.0.attn_q.bias"),
        o_bias: has("blk.0.attn_output.bias"),
        mlp_bias: has("blk.0.ffn_gate.bias"),
        qk_norm: architecture == Architecture::Qwen3,
        max_position_embeddings,
        rope: rope(&metadata, max_position_embeddings)?,
        activation: Activation::Silu,
        bos_token_id: token_id(path, file, "tokenizer.ggml.bos_token_id")?,
        eos_token_ids: Vec::new(),
        layers: Vec::new(),
    };
    // llama.cpp ends a generation at each of these.
    for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
        config.eos_token_ids.extend(token_id(path, file, key)?);
    }
    metadata.refuse_unread()?;
    config.finish(path, num_layers, layer)?;
    Ok(config)
}

fn architecture(path: &Path, file: &GgufFile<'_>) -> Result<Architecture, CheckpointError> {
    let text = |key: &str| file.get(key).and_then(MetadataValue::as_str);
    let kind = text("general.type").unwrap_or("model");
    if kind != "model" {
        return Err(CheckpointError::unsupported(path, "general.type", kind, "model"));
    }
    let parts = file.get("split.count").and_then(MetadataValue::as_u64).unwrap_or(1);
    if parts > 1 {
        let found = format!("{parts} files");
        return Err(CheckpointError::unsupported(path, "split.count", found, "one file; join them with gguf-split"));
    }
    let Some(name) = text("general.architecture") else {
        return Err(CheckpointError::field(path, "general.architecture", "absent", "a string"));
    };
    Architecture::from_name(name).ok_or_else(|| {
        let supported = Architecture::ALL.map(Architecture::name).join(", ");
        CheckpointError::unsupported(path, "general.architecture", name, supported)
    })
}

fn head_dim(metadata: &Metadata<'_>, hidden_size: usize, num_heads: usize) -> Result<usize, CheckpointError> {
    let head_dim = match metadata.opt_size("attention.key_length")? {
        Some(head_dim) => head_dim,
        None if hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
        None => {
            let expected = format!("a multiple of attention.head_count = {num_heads}");
            return Err(metadata.invalid("embedding_length", expected));
        }
    };
    for key in ["attention.value_length", "rope.dimension_count"] {
        if let Some(other) = metadata.opt_size(key)?.filter(|other| *other != head_dim) {
            return Err(metadata.unsupported(key, other.to_string(), format!("the head width, {head_dim}")));
        }
    }
    Ok(head_dim)
}

/// Refuses keys that may hold a neutral value and hold another.
fn refuse_other_arithmetic(metadata: &Metadata<'_>) -> Result<(), CheckpointError> {
    for key in ["expert_count", "expert_used_count", "attention.sliding_window"] {
        if let Some(value) = metadata.get(key).filter(|value| value.as_u64() != Some(0)) {
            return Err(metadata.unsupported(key, value.summary(), "0"));
        }
    }
    Ok(())
}

fn token_id(path: &Path, file: &GgufFile<'_>, key: &str) -> Result<Option<u32>, CheckpointError> {
    let Some(value) = file.get(key) else { return Ok(None) };
    match value.as_u64().and_then(|id| u32::try_from(id).ok()) {
        Some(id) => Ok(Some(id)),
        None => Err(CheckpointError::field(path, key, value.summary(), "a token id")),
    }
}

fn rope(metadata: &Metadata<'_>, max_position_embeddings: usize) -> Result<RopeConfig, CheckpointError> {
    const TYPE: &str = "rope.scaling.type";
    let theta = metadata.opt_f64("rope.freq_base")?.unwrap_or(10_000.0);
    // Older files write the linear factor alone.
    let old_linear = metadata.opt_f64("rope.scale_linear")?;
    let factor = metadata.opt_f64("rope.scaling.factor")?;
    let attention_factor = metadata.opt_f64("rope.scaling.attn_factor")?;
    let original = metadata.opt_size("rope.scaling.original_context_length")?;
    let beta_fast = metadata.opt_f64("rope.scaling.yarn_beta_fast")?;
    let beta_slow = metadata.opt_f64("rope.scaling.yarn_beta_slow")?;
    let kind = match metadata.get(TYPE) {
        Some(value) => value.as_str().ok_or_else(|| metadata.invalid(TYPE, "a string"))?,
        None if old_linear.or(factor).is_some() => "linear",
        None => "none",
    };
    if attention_factor.is_some_and(|factor| factor != 1.0) {
        return Err(metadata.unsupported("rope.scaling.attn_factor", format!("{attention_factor:?}"), "1"));
    }
    let factor = || factor.or(old_linear).ok_or_else(|| metadata.invalid("rope.scaling.factor", "a number"));
    let scaling = match kind {
        "none" => RopeScaling::Default,
        "linear" => RopeScaling::Linear { factor: factor()? },
        "yarn" => {
            let factor = factor()?;
            let magnitude = if factor <= 1.0 { 1.0 } else { 0.1 * factor.ln() + 1.0 };
            RopeScaling::Yarn(YarnScaling {
                factor,
                attention_factor: magnitude,
                beta_fast: beta_fast.unwrap_or(32.0),
                beta_slow: beta_slow.unwrap_or(1.0),
                original_max_position_embeddings: original.unwrap_or(max_position_embeddings),
                truncate: true,
            })
        }
        other => return Err(metadata.unsupported(TYPE, other, "none, linear, yarn")),
    };
    let scaling = match (metadata.file.tensor(ROPE_DIVISORS), scaling) {
        (None, scaling) => scaling,
        (Some(tensor), RopeScaling::Default) => RopeScaling::Divisors(metadata.file.dequantize(tensor)),
        (Some(_), _) => {
            return Err(metadata.unsupported(TYPE, format!("{kind} beside {ROPE_DIVISORS}"), "one of the two"));
        }
    };
    Ok(RopeConfig { theta, scaling })
}

#[cfg(test)]
mod tests;
