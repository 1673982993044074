//! `config.json` and `generation_config.json` of transformers 4 and 5 to a [`ModelConfig`].
//!
//! transformers 4 writes `rope_theta` and `rope_scaling`, transformers 5 one `rope_parameters`; both spellings are
//! read, with the defaults of the transformers class that `model_type` names. Fields that this class does not read
//! are ignored, as transformers ignores them, except for those in [`refuse_foreign_arithmetic`]: they announce
//! weights or code that the class alone cannot run.

use std::path::Path;

use serde_json::Value;

use super::config::{
    Activation, Architecture, FeedForward, LayerConfig, Llama3Scaling, Mixer, ModelConfig, RopeConfig, RopeScaling,
    YarnScaling,
};
use super::error::CheckpointError;
use super::fields::Fields;

const SUPPORTED_ROPE: &str = "default, linear, dynamic, yarn, llama3";

/// What transformers' configuration class fills in for fields that the file leaves out.
struct Defaults {
    num_kv_heads: Option<usize>,
    head_dim: Option<usize>,
    max_position_embeddings: usize,
    bos_token_id: Option<u32>,
    eos_token_id: Option<u32>,
}

fn defaults(architecture: Architecture) -> Defaults {
    let qwen2 = Defaults {
        num_kv_heads: Some(32),
        head_dim: None,
        max_position_embeddings: 32768,
        bos_token_id: None,
        eos_token_id: None,
    };
    match architecture {
        Architecture::Llama => Defaults {
            num_kv_heads: None,
            head_dim: None,
            max_position_embeddings: 2048,
            bos_token_id: Some(1),
            eos_token_id: Some(2),
        },
        Architecture::Qwen2 => qwen2,
        Architecture::Qwen3 => Defaults { head_dim: Some(128), ..qwen2 },
    }
}

/// Parses `config.json` (`config`) and, where the model has one, `generation_config.json` (`generation`), whose end
/// tokens take precedence as they do in transformers' `generate`. `path` names the first in errors.
///
/// # Errors
/// [`CheckpointError`] naming the field, for whatever is missing, malformed or not supported.
pub(crate) fn parse(path: &Path, config: &str, generation: Option<&str>) -> Result<ModelConfig, CheckpointError> {
    let value: Value = serde_json::from_str(config).map_err(CheckpointError::json(path))?;
    let fields = Fields::new(path, "", &value)?;
    let architecture = architecture(&fields)?;
    refuse_foreign_arithmetic(&fields)?;
    let defaults = defaults(architecture);

    let hidden_size = fields.size("hidden_size")?;
    let num_heads = fields.size("num_attention_heads")?;
    let num_kv_heads = match (fields.opt_size("num_key_value_heads")?, fields.contains("num_key_value_heads")) {
        (Some(num_kv_heads), _) => num_kv_heads,
        // An explicit null means one KV head for each query head in every class.
        (None, true) => num_heads,
        (None, false) => defaults.num_kv_heads.unwrap_or(num_heads),
    };
    let head_dim = match fields.opt_size("head_dim")?.or(defaults.head_dim) {
        Some(head_dim) => head_dim,
        None if hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
        None => {
            return Err(fields.invalid("hidden_size", format!("a multiple of num_attention_heads = {num_heads}")));
        }
    };
    let attention_bias = fields.bool_or("attention_bias", false)?;
    let (qkv_bias, o_bias) = match architecture {
        Architecture::Llama | Architecture::Qwen3 => (attention_bias, attention_bias),
        Architecture::Qwen2 => (true, false),
    };
    let mlp_bias = architecture == Architecture::Llama && fields.bool_or("mlp_bias", false)?;
    let max_position_embeddings =
        fields.opt_size("max_position_embeddings")?.unwrap_or(defaults.max_position_embeddings);
    let intermediate_size = fields.size("intermediate_size")?;
    let num_layers = fields.size("num_hidden_layers")?;
    let layer = LayerConfig { mixer: Mixer::FullAttention, feed_forward: FeedForward::Dense { intermediate_size } };
    refuse_windows(&fields, architecture, num_layers)?;

    let eos_token_ids = match fields.opt_token_ids("eos_token_id")? {
        Some(ids) => ids,
        None if fields.contains("eos_token_id") => Vec::new(),
        None => defaults.eos_token_id.into_iter().collect(),
    };
    let bos_token_id = match fields.opt_token_ids("bos_token_id")? {
        Some(ids) => ids.first().copied(),
        None if fields.contains("bos_token_id") => None,
        None => defaults.bos_token_id,
    };
    let mut config = ModelConfig {
        architecture,
        vocab_size: fields.size("vocab_size")?,
        hidden_size,
        intermediate_size,
        num_heads,
        num_kv_heads,
        head_dim,
        rms_norm_eps: fields.f64_or("rms_norm_eps", 1e-6)? as f32,
        tie_word_embeddings: fields.bool_or("tie_word_embeddings", false)?,
        qkv_bias,
        o_bias,
        mlp_bias,
        qk_norm: architecture == Architecture::Qwen3,
        max_position_embeddings,
        rope: rope(&fields, max_position_embeddings)?,
        activation: activation(&fields)?,
        bos_token_id,
        eos_token_ids,
        layers: Vec::new(),
    };
    if let Some(text) = generation {
        let path = path.with_file_name("generation_config.json");
        let value: Value = serde_json::from_str(text).map_err(CheckpointError::json(&path))?;
        if let Some(ids) = Fields::new(&path, "", &value)?.opt_token_ids("eos_token_id")? {
            config.eos_token_ids = ids;
        }
    }
    config.finish(path, num_layers, layer)?;
    Ok(config)
}

impl ModelConfig {
    /// Parses the text of a `config.json` and, where there is one, of its `generation_config.json`.
    ///
    /// # Errors
    /// [`CheckpointError`] naming the field, for whatever is missing, malformed or not supported.
    pub fn from_hf_json(config: &str, generation: Option<&str>) -> Result<Self, CheckpointError> {
        parse(Path::new("config.json"), config, generation)
    }
}

fn architecture(fields: &Fields<'_>) -> Result<Architecture, CheckpointError> {
    let supported = || Architecture::ALL.map(Architecture::name).join(", ");
    let model_type = fields.str("model_type")?;
    let architecture = Architecture::from_name(model_type)
        .ok_or_else(|| CheckpointError::unsupported(fields.path(), "model_type", model_type, supported()))?;
    let class = match architecture {
        Architecture::Llama => "LlamaForCausalLM",
        Architecture::Qwen2 => "Qwen2ForCausalLM",
        Architecture::Qwen3 => "Qwen3ForCausalLM",
    };
    if let Some(found) = fields.get("architectures") {
        let names = found.as_array().map(Vec::as_slice).unwrap_or_default();
        if !names.iter().any(|name| name.as_str() == Some(class)) {
            return Err(CheckpointError::unsupported(fields.path(), "architectures", found.to_string(), class));
        }
    }
    Ok(architecture)
}

/// Refuses fields by which a file says that its weights or its code are not those of the plain class.
fn refuse_foreign_arithmetic(fields: &Fields<'_>) -> Result<(), CheckpointError> {
    for name in ["quantization_config", "compression_config", "auto_map"] {
        if let Some(found) = fields.get(name) {
            return Err(CheckpointError::unsupported(fields.path(), name, summary(found), "none"));
        }
    }
    for name in ["num_experts", "num_local_experts"] {
        if let Some(found) = fields.get(name).filter(|found| found.as_u64() != Some(0)) {
            return Err(CheckpointError::unsupported(fields.path(), name, summary(found), "dense models"));
        }
    }
    if fields.bool_or("rope_interleaved", false)? {
        return Err(CheckpointError::unsupported(fields.path(), "rope_interleaved", "true", "false"));
    }
    Ok(())
}

/// A value short enough for one line.
fn summary(value: &Value) -> String {
    const SHOWN: usize = 120;
    let text = value.to_string();
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// Refuses layers that look back over a window only.
fn refuse_windows(fields: &Fields<'_>, architecture: Architecture, num_layers: usize) -> Result<(), CheckpointError> {
    if let Some(found) = fields.get("layer_types") {
        let types = found.as_array().map(Vec::as_slice).unwrap_or_default();
        if types.len() != num_layers {
            return Err(fields.invalid("layer_types", format!("a list of num_hidden_layers = {num_layers} names")));
        }
        match types.iter().find(|name| name.as_str() != Some("full_attention")) {
            Some(other) => {
                let found = other.to_string();
                Err(CheckpointError::unsupported(fields.path(), "layer_types", found, "full_attention"))
            }
            None => Ok(()),
        }
    } else if architecture != Architecture::Llama && fields.bool_or("use_sliding_window", false)? {
        let window = if fields.contains("sliding_window") { fields.opt_size("sliding_window")? } else { Some(4096) };
        let first = fields.opt_u64("max_window_layers")?.unwrap_or(28);
        match window {
            Some(window) if first < num_layers as u64 => Err(CheckpointError::unsupported(
                fields.path(),
                "sliding_window",
                format!("{window} tokens from layer {first} of {num_layers} on"),
                "full attention in every layer",
            )),
            _ => Ok(()),
        }
    } else {
        Ok(())
    }
}

fn activation(fields: &Fields<'_>) -> Result<Activation, CheckpointError> {
    match fields.opt_str("hidden_act")?.unwrap_or("silu") {
        "silu" | "swish" => Ok(Activation::Silu),
        other => Err(CheckpointError::unsupported(fields.path(), "hidden_act", other, "silu")),
    }
}

/// `rope_parameters` of transformers 5, or `rope_scaling` with top-level `rope_theta` of transformers 4.
fn rope(fields: &Fields<'_>, max_position_embeddings: usize) -> Result<RopeConfig, CheckpointError> {
    let nested = match fields.opt_object("rope_scaling")? {
        Some(scaling) => Some(scaling),
        None => fields.opt_object("rope_parameters")?,
    };
    let top_theta = fields.f64_or("rope_theta", 10_000.0)?;
    let theta = match &nested {
        Some(rope) => rope.f64_or("rope_theta", top_theta)?,
        None => top_theta,
    };
    for scope in nested.iter().chain([fields]) {
        let factor = scope.f64_or("partial_rotary_factor", 1.0)?;
        if factor != 1.0 {
            let what = scope.name("partial_rotary_factor");
            return Err(CheckpointError::unsupported(fields.path(), what, factor.to_string(), "1"));
        }
    }
    let scaling = match &nested {
        Some(rope) => rope_scaling(fields, rope, max_position_embeddings)?,
        None => RopeScaling::Default,
    };
    Ok(RopeConfig { theta, scaling })
}

fn rope_scaling(
    fields: &Fields<'_>,
    rope: &Fields<'_>,
    max_position_embeddings: usize,
) -> Result<RopeScaling, CheckpointError> {
    if let Some(name) = rope.keys().find(|name| rope.get(name).is_some_and(Value::is_object)) {
        return Err(CheckpointError::unsupported(fields.path(), rope.name(name), "rope by layer type", SUPPORTED_ROPE));
    }
    if let Some(found) = rope.get("mrope_section") {
        let what = rope.name("mrope_section");
        return Err(CheckpointError::unsupported(fields.path(), what, found.to_string(), SUPPORTED_ROPE));
    }
    let kind = match rope.opt_str("rope_type")? {
        Some(kind) => kind,
        None => rope.opt_str("type")?.unwrap_or("default"),
    };
    // A trained length outside the object takes precedence, as in transformers.
    let original = || -> Result<usize, CheckpointError> {
        let inside = rope.opt_size("original_max_position_embeddings")?;
        let outside = fields.opt_size("original_max_position_embeddings")?;
        Ok(outside.or(inside).unwrap_or(max_position_embeddings))
    };
    Ok(match kind {
        "default" => RopeScaling::Default,
        "linear" => RopeScaling::Linear { factor: rope.f64("factor")? },
        "dynamic" => RopeScaling::Dynamic { factor: rope.f64("factor")?, max_position_embeddings },
        "yarn" => RopeScaling::Yarn(yarn(rope, original()?, max_position_embeddings)?),
        "llama3" => RopeScaling::Llama3(Llama3Scaling {
            factor: rope.f64("factor")?,
            low_freq_factor: rope.f64("low_freq_factor")?,
            high_freq_factor: rope.f64("high_freq_factor")?,
            original_max_position_embeddings: original()?,
        }),
        other => {
            let what = rope.name("rope_type");
            return Err(CheckpointError::unsupported(fields.path(), what, other, SUPPORTED_ROPE));
        }
    })
}

/// The attention factor is `0.1 · mscale · ln(factor) + 1`, or a ratio of two such terms when the file gives both
/// `mscale` and `mscale_all_dim` (transformers `_compute_yarn_parameters`).
fn yarn(rope: &Fields<'_>, original: usize, max_position_embeddings: usize) -> Result<YarnScaling, CheckpointError> {
    let nonzero = |value: Option<f64>| value.filter(|value| *value != 0.0);
    let factor = match rope.opt_f64("factor")? {
        Some(factor) => factor,
        None => max_position_embeddings as f64 / original as f64,
    };
    let magnitude = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
    let mscale = nonzero(rope.opt_f64("mscale")?);
    let mscale_all_dim = nonzero(rope.opt_f64("mscale_all_dim")?);
    let attention_factor = match (rope.opt_f64("attention_factor")?, mscale, mscale_all_dim) {
        (Some(given), _, _) => given,
        (None, Some(mscale), Some(all_dim)) => magnitude(mscale) / magnitude(all_dim),
        (None, _, _) => magnitude(1.0),
    };
    Ok(YarnScaling {
        factor,
        attention_factor,
        beta_fast: nonzero(rope.opt_f64("beta_fast")?).unwrap_or(32.0),
        beta_slow: nonzero(rope.opt_f64("beta_slow")?).unwrap_or(1.0),
        original_max_position_embeddings: original,
        truncate: rope.bool_or("truncate", true)?,
    })
}

#[cfg(test)]
mod tests;
