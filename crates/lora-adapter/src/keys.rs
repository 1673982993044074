//! From the name of a tensor to what it is: the one place that reads names.
//!
//! A name is prefix, module path and suffix. The prefix is `base_model.model.`, as PEFT writes it; the path is that of
//! the trained model class, `model.layers.N.self_attn.q_proj`; the suffix says which part of the adapter the tensor is.
//! Whatever differs is told apart here by what it is, so that a refusal can name it. Shapes are not looked at.

use std::fmt;

use lora_math::{Module, Site};

use crate::feature::Feature;

/// What PEFT puts before the module path.
const PREFIX: &str = "base_model.model.";

/// A way of naming tensors that differs from PEFT's own for a plain causal language model. Served as it stands, such
/// an adapter would match no module and act as the base model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Dialect {
    /// `base_model.model.` is missing.
    NoPrefix,
    /// `base_model.model.` stands twice.
    DoubledPrefix,
    /// `layers.N.` follows the prefix without `model.`: trained on the bare backbone.
    BareBackbone,
    /// `language_model.` in the path: trained on a model that wraps the language model.
    LanguageModel,
    /// `_orig_mod.` of torch.compile.
    TorchCompile,
    /// `module.` of data-parallel wrappers.
    DataParallel,
    /// `_fsdp_wrapped_module.`
    Fsdp,
    /// `_checkpoint_wrapped_module.`
    CheckpointWrapper,
    /// The adapter's name inside the suffix, `lora_A.default.weight`.
    AdapterName,
    /// `lora_a` and `lora_b` of mlx-lm.
    Mlx,
}

impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Dialect::NoPrefix => "no base_model.model. prefix",
            Dialect::DoubledPrefix => "a doubled base_model.model. prefix",
            Dialect::BareBackbone => "no model. before layers.N (a bare backbone)",
            Dialect::LanguageModel => "language_model. in the path (a wrapping model)",
            Dialect::TorchCompile => "_orig_mod. (torch.compile)",
            Dialect::DataParallel => "module. (a data-parallel wrapper)",
            Dialect::Fsdp => "_fsdp_wrapped_module. (FSDP)",
            Dialect::CheckpointWrapper => "_checkpoint_wrapped_module. (activation checkpointing)",
            Dialect::AdapterName => "the adapter's name in the suffix",
            Dialect::Mlx => "lora_a and lora_b (mlx-lm)",
        })
    }
}

/// A or B.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Half {
    A,
    B,
}

impl Half {
    pub(crate) fn other_name(self, name: &str) -> String {
        match self {
            Half::A => name.replace(".lora_A.", ".lora_B."),
            Half::B => name.replace(".lora_B.", ".lora_A."),
        }
    }
}

/// What a tensor is, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Key<'a> {
    /// A or B of a site. `path` is the module path that patterns are matched against.
    Half { site: Site, half: Half, path: &'a str },
    /// Used in training only.
    TrainingOnly { method: &'static str },
    /// Known, and not supported.
    Unsupported(Feature),
    /// Known under another way of naming.
    Dialect(Dialect),
    /// Not known; which part of the name.
    Unknown(&'static str),
}

/// What a suffix says.
#[derive(Clone, Copy)]
enum Suffix {
    Half(Half),
    TrainingOnly(&'static str),
    Unsupported(Feature),
}

/// Every suffix that stands at the end of a name, longer ones before those that they end in.
const SUFFIXES: [(&str, Suffix); 15] = [
    (".lora_A.weight", Suffix::Half(Half::A)),
    (".lora_B.weight", Suffix::Half(Half::B)),
    (".lora_B.bias", Suffix::Unsupported(Feature::LoraBias)),
    (".lora_magnitude_vector", Suffix::Unsupported(Feature::Dora)),
    (".lora_magnitude_vector.weight", Suffix::Unsupported(Feature::Dora)),
    (".lora_embedding_A", Suffix::Unsupported(Feature::EmbeddingLora)),
    (".lora_embedding_B", Suffix::Unsupported(Feature::EmbeddingLora)),
    (".lora_diag", Suffix::Unsupported(Feature::Kasa)),
    (".lora_velora_embed", Suffix::TrainingOnly("VeLoRA")),
    (".trainable_tokens_delta", Suffix::Unsupported(Feature::TrainableTokens)),
    (".base_layer.weight", Suffix::Unsupported(Feature::BaseWeightCopy)),
    (".base_layer.bias", Suffix::Unsupported(Feature::TrainedBias)),
    (".modules_to_save.weight", Suffix::Unsupported(Feature::ReplacedModule)),
    (".bias", Suffix::Unsupported(Feature::TrainedBias)),
    (".weight", Suffix::Unsupported(Feature::ReplacedModule)),
];

/// Inside the suffix of every tensor of MonteCLoRA's sampler.
const MONTECLORA: &str = ".lora_monteclora_sampler.";

/// Reads a tensor's name.
pub(crate) fn parse(name: &str) -> Key<'_> {
    if let Some(dialect) = dialect(name) {
        return Key::Dialect(dialect);
    }
    let Some(rest) = name.strip_prefix(PREFIX) else {
        return Key::Unknown("prefix");
    };
    let Some((path, suffix)) = split(rest) else {
        return Key::Unknown("suffix");
    };
    match (suffix, place(path)) {
        (Suffix::Half(half), Ok(Place::Site(site))) => Key::Half { site, half, path },
        (Suffix::Half(_), Ok(Place::Unsupported(feature))) => Key::Unsupported(feature),
        (Suffix::Half(_) | Suffix::TrainingOnly(_), Err(part)) => Key::Unknown(part),
        (Suffix::TrainingOnly(method), Ok(_)) => Key::TrainingOnly { method },
        // Whole modules and biases stand on any module, norms included.
        (Suffix::Unsupported(feature), _) => Key::Unsupported(feature),
    }
}

fn dialect(name: &str) -> Option<Dialect> {
    let segment = |wrapper: &str| name.split('.').any(|segment| segment == wrapper);
    let rest = name.strip_prefix(PREFIX);
    if segment("_orig_mod") {
        Some(Dialect::TorchCompile)
    } else if segment("_fsdp_wrapped_module") {
        Some(Dialect::Fsdp)
    } else if segment("_checkpoint_wrapped_module") {
        Some(Dialect::CheckpointWrapper)
    } else if segment("module") {
        Some(Dialect::DataParallel)
    } else if name.ends_with(".lora_a") || name.ends_with(".lora_b") {
        Some(Dialect::Mlx)
    } else if rest.is_some_and(|rest| rest.starts_with(PREFIX)) {
        Some(Dialect::DoubledPrefix)
    } else if segment("language_model") {
        Some(Dialect::LanguageModel)
    } else if rest.is_some_and(|rest| rest.starts_with("layers.")) {
        Some(Dialect::BareBackbone)
    } else if rest.is_none() && (segment("layers") || segment("embed_tokens") || segment("lm_head")) {
        Some(Dialect::NoPrefix)
    } else if names_adapter(name) {
        Some(Dialect::AdapterName)
    } else {
        None
    }
}

/// Whether a segment stands between a LoRA suffix and its end, `lora_A.default.weight`, or after one that has no end,
/// `lora_embedding_A.default`.
fn names_adapter(name: &str) -> bool {
    let mut segments = name.rsplit('.');
    let (last, before, third) = (segments.next(), segments.next(), segments.next());
    let with_end = matches!(third, Some("lora_A" | "lora_B")) && matches!(last, Some("weight" | "bias"));
    let without_end = matches!(before, Some("lora_embedding_A" | "lora_embedding_B" | "lora_magnitude_vector"));
    with_end || (without_end && last != Some("weight"))
}

fn split(rest: &str) -> Option<(&str, Suffix)> {
    if let Some((path, _)) = rest.split_once(MONTECLORA) {
        return Some((path, Suffix::TrainingOnly("MonteCLoRA")));
    }
    let known = SUFFIXES.iter().find_map(|(text, suffix)| Some((rest.strip_suffix(text)?, *suffix)));
    known.filter(|(path, _)| !path.split('.').any(|segment| segment.starts_with("lora_")))
}

/// What stands at a module path.
enum Place {
    Site(Site),
    Unsupported(Feature),
}

/// What stands at a path, or which part of the path is not known.
fn place(path: &str) -> Result<Place, &'static str> {
    match path {
        "lm_head" => return Ok(Place::Unsupported(Feature::HeadLora)),
        "model.embed_tokens" => return Ok(Place::Unsupported(Feature::EmbeddingLora)),
        _ => {}
    }
    let (index, module) = path.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.')).ok_or("module")?;
    let layer = layer_index(index).ok_or("layer index")?;
    let site = |module| Ok(Place::Site(Site::layer(layer, module)));
    match module {
        "self_attn.q_proj" => site(Module::QProj),
        "self_attn.k_proj" => site(Module::KProj),
        "self_attn.v_proj" => site(Module::VProj),
        "self_attn.o_proj" => site(Module::OProj),
        "mlp.gate_proj" => site(Module::GateProj),
        "mlp.up_proj" => site(Module::UpProj),
        "mlp.down_proj" => site(Module::DownProj),
        _ => unsupported(module).map(Place::Unsupported).ok_or("module"),
    }
}

fn unsupported(module: &str) -> Option<Feature> {
    let (block, rest) = module.split_once('.')?;
    let first = rest.split('.').next().unwrap_or_default();
    match (block, first) {
        ("mlp" | "block_sparse_moe" | "feed_forward", "experts") => Some(Feature::ExpertLora),
        ("mlp" | "block_sparse_moe", "gate") | ("mlp" | "feed_forward", "router") => Some(Feature::RouterLora),
        ("mlp" | "feed_forward", "shared_expert" | "shared_expert_gate" | "shared_experts") => {
            Some(Feature::SharedExpertLora)
        }
        ("linear_attn", "in_proj_qkvz" | "in_proj_ba" | "in_proj_qkv" | "in_proj_z" | "in_proj_b" | "in_proj_a")
        | ("linear_attn", "out_proj") => Some(Feature::LinearAttentionLora),
        ("self_attn", "qkv_proj") | ("mlp", "gate_up_proj") => Some(Feature::FusedProjection),
        _ => None,
    }
}

/// Plain decimal without leading zeros, so that one layer has one name.
fn layer_index(text: &str) -> Option<usize> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    if plain { text.parse().ok() } else { None }
}
