//! From the name of a tensor to what it is: the one place that reads names.
//!
//! A name is prefix, module path and suffix. The prefix is `base_model.model.`, as PEFT writes it; the path is that of
//! the trained model class, `model.layers.N.self_attn.q_proj`; the suffix says which part of the adapter the tensor is.
//! Wrappers of trainers put segments of their own between them. They are taken out here, each told as a [`Dialect`], so
//! that one place of a model has one site whatever wrote its name. Shapes are not looked at.

use std::collections::BTreeSet;
use std::fmt;

use lora_math::{Module, Site};
use serde::Serialize;

use crate::extras::Extra;
use crate::feature::Feature;
use crate::modules::{self, Place, Target};

/// Longer than any name of a tensor: what is longer is not taken apart.
const MAX_NAME_BYTES: usize = 4096;

/// What PEFT puts before the module path.
const PREFIX: [&str; 2] = ["base_model", "model"];

/// A way of naming tensors that differs from PEFT's own for a plain causal language model. Matched as it stands, such
/// a name fits no module, and the adapter would act as the base model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
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

/// Segments that wrappers put anywhere into a path.
const WRAPPERS: [(&str, Dialect); 4] = [
    ("_orig_mod", Dialect::TorchCompile),
    ("module", Dialect::DataParallel),
    ("_fsdp_wrapped_module", Dialect::Fsdp),
    ("_checkpoint_wrapped_module", Dialect::CheckpointWrapper),
];

/// A or B.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Half {
    A,
    B,
}

impl Half {
    pub(crate) fn other_name(self, name: &str) -> String {
        match self {
            Half::A => {
                name.replace(".lora_A.", ".lora_B.").replace(".lora_a", ".lora_b").replace("embedding_A", "embedding_B")
            }
            Half::B => {
                name.replace(".lora_B.", ".lora_A.").replace(".lora_b", ".lora_a").replace("embedding_B", "embedding_A")
            }
        }
    }
}

/// What a tensor is, by its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Key<'a> {
    pub(crate) kind: Kind,
    /// The module path that patterns are matched against: that of the trained model class, without what wrappers put
    /// into it.
    pub(crate) path: String,
    /// In which ways the name differs from PEFT's own.
    pub(crate) dialects: BTreeSet<Dialect>,
    /// The adapter's name inside the suffix.
    pub(crate) adapter: Option<&'a str>,
}

/// The kinds of tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A or B of a pair.
    Half { target: Target, half: Half },
    /// A tensor beside the pairs.
    Extra(Extra),
    /// Used in training only.
    TrainingOnly { method: &'static str },
    /// Known, and not supported.
    Unsupported(Feature),
    /// Known under a way of naming that is not supported.
    Dialect(Dialect),
    /// Not known; which part of the name.
    Unknown(&'static str),
}

/// What a suffix says.
#[derive(Clone, Copy)]
enum Suffix {
    Half(Half),
    /// A or B of an embedding.
    EmbeddingHalf(Half),
    TrainingOnly(&'static str),
    /// A tensor beside the pair of a site, and what it is called where no site can have it.
    Beside(fn(Site) -> Extra, Feature),
    /// The weight of any module.
    Weight,
}

/// Reads a tensor's name.
pub(crate) fn parse(name: &str) -> Key<'_> {
    let mut key = Key { kind: Kind::Unknown("prefix"), path: String::new(), dialects: BTreeSet::new(), adapter: None };
    if name.len() > MAX_NAME_BYTES {
        key.kind = Kind::Unknown("name of that length");
        return key;
    }
    let segments: Vec<&str> = name.split('.').collect();
    if matches!(segments.last(), Some(&("lora_a" | "lora_b"))) {
        key.kind = Kind::Dialect(Dialect::Mlx);
        return key;
    }
    // Behind the first segment of LoRA stands the suffix, where an adapter may bear the name of a wrapper.
    let lora = segments.iter().position(|segment| segment.starts_with("lora_")).unwrap_or(segments.len());
    let (path, suffix) = segments.split_at(lora);
    let mut path = unwrapped(path, &mut key.dialects);
    let suffix = if lora < segments.len() {
        let (suffix, adapter) = lora_suffix(suffix);
        key.dialects.extend(adapter.map(|_| Dialect::AdapterName));
        key.adapter = adapter;
        suffix
    } else {
        plain_suffix(&mut path)
    };
    let Some(rest) = without_prefix(&path, &mut key.dialects) else {
        return key;
    };
    let Some(suffix) = suffix else {
        key.kind = Kind::Unknown("suffix");
        return key;
    };
    key.path = rest.join(".");
    key.kind = match modules::place(&in_language_model(rest, &mut key.dialects)) {
        Ok(place) => kind(suffix, place),
        Err(part) => Kind::Unknown(part),
    };
    key
}

/// What a tensor with this suffix is at this place.
fn kind(suffix: Suffix, place: Place) -> Kind {
    let is_embedding = |target| target == Target::Site(Site::Vocabulary { module: Module::EmbedTokens });
    match (suffix, place) {
        (Suffix::TrainingOnly(method), _) => Kind::TrainingOnly { method },
        (_, Place::Unsupported(feature)) => Kind::Unsupported(feature),
        (Suffix::Half(half), Place::Target(target)) if !is_embedding(target) => Kind::Half { target, half },
        (Suffix::EmbeddingHalf(half), Place::Target(target)) if is_embedding(target) => Kind::Half { target, half },
        (Suffix::Half(_) | Suffix::EmbeddingHalf(_), _) => Kind::Unknown("suffix of this module"),
        (Suffix::Beside(extra, _), Place::Target(Target::Site(site))) => match extra(site) {
            Extra::TokenRows(_) if !matches!(site, Site::Vocabulary { .. }) => Kind::Unknown("suffix of this module"),
            extra => Kind::Extra(extra),
        },
        (Suffix::Beside(_, feature), Place::Target(_)) => Kind::Unsupported(feature),
        (Suffix::Weight, Place::Target(Target::Site(site))) => Kind::Extra(Extra::Weight(site)),
        (Suffix::Weight, Place::Target(_)) => Kind::Unsupported(Feature::ReplacedModule),
        (Suffix::Weight, Place::Norm(site)) => Kind::Extra(Extra::Norm(site)),
        (Suffix::Beside(..), Place::Norm(_)) => Kind::Unknown("suffix of a norm"),
    }
}

/// The path without the segments of wrappers.
fn unwrapped<'a>(path: &[&'a str], dialects: &mut BTreeSet<Dialect>) -> Vec<&'a str> {
    let wrapper = |segment: &str| WRAPPERS.iter().find(|(name, _)| *name == segment).map(|(_, dialect)| *dialect);
    let mut kept = Vec::with_capacity(path.len());
    for segment in path {
        match wrapper(segment) {
            Some(dialect) => drop(dialects.insert(dialect)),
            None => kept.push(*segment),
        }
    }
    kept
}

/// The path behind the prefix, which may be missing or stand twice. None where nothing of a language model begins there.
fn without_prefix<'a, 'b>(path: &'b [&'a str], dialects: &mut BTreeSet<Dialect>) -> Option<&'b [&'a str]> {
    let Some(rest) = path.strip_prefix(&PREFIX) else {
        let known = matches!(
            path.first(),
            Some(&("model" | "layers" | "language_model" | "lm_head" | "embed_tokens" | "norm"))
        );
        dialects.insert(Dialect::NoPrefix);
        return known.then_some(path);
    };
    match rest.strip_prefix(&PREFIX) {
        Some(rest) => {
            dialects.insert(Dialect::DoubledPrefix);
            Some(rest)
        }
        None => Some(rest),
    }
}

/// The path in a plain causal language model: `language_model` goes from the first or second place, and a bare backbone
/// gets its `model`.
fn in_language_model<'a>(path: &[&'a str], dialects: &mut BTreeSet<Dialect>) -> Vec<&'a str> {
    let mut path = path.to_vec();
    let wrapped = path.iter().take(2).position(|segment| *segment == "language_model");
    if let Some(at) = wrapped.filter(|at| *at == 0 || path[0] == "model") {
        path.remove(at);
        dialects.insert(Dialect::LanguageModel);
    }
    if matches!(path.first(), Some(&("layers" | "embed_tokens" | "norm"))) {
        path.insert(0, "model");
        if wrapped.is_none() {
            dialects.insert(Dialect::BareBackbone);
        }
    }
    path
}

/// What the segments from the first one of LoRA on say, and the adapter's name among them.
fn lora_suffix<'a>(suffix: &[&'a str]) -> (Option<Suffix>, Option<&'a str>) {
    let half = |name: &str| if name.ends_with('A') { Half::A } else { Half::B };
    let magnitude = Suffix::Beside(Extra::Magnitude, Feature::Dora);
    let bias = Suffix::Beside(Extra::LoraBias, Feature::LoraBias);
    let diagonal = Suffix::Beside(Extra::Diagonal, Feature::Kasa);
    let (suffix, adapter) = match *suffix {
        [name @ ("lora_A" | "lora_B"), "weight"] => (Suffix::Half(half(name)), None),
        [name @ ("lora_A" | "lora_B"), adapter, "weight"] => (Suffix::Half(half(name)), Some(adapter)),
        ["lora_B", "bias"] => (bias, None),
        ["lora_B", adapter, "bias"] => (bias, Some(adapter)),
        ["lora_magnitude_vector"] | ["lora_magnitude_vector", "weight"] => (magnitude, None),
        ["lora_magnitude_vector", adapter] | ["lora_magnitude_vector", adapter, "weight"] => (magnitude, Some(adapter)),
        [name @ ("lora_embedding_A" | "lora_embedding_B")] => (Suffix::EmbeddingHalf(half(name)), None),
        [name @ ("lora_embedding_A" | "lora_embedding_B"), adapter] => {
            (Suffix::EmbeddingHalf(half(name)), Some(adapter))
        }
        ["lora_diag"] => (diagonal, None),
        ["lora_diag", adapter] => (diagonal, Some(adapter)),
        ["lora_velora_embed"] => (Suffix::TrainingOnly("VeLoRA"), None),
        ["lora_monteclora_sampler", _, ..] => (Suffix::TrainingOnly("MonteCLoRA"), None),
        _ => return (None, None),
    };
    (Some(suffix), adapter)
}

/// What a name without any segment of LoRA ends in; the segments of the suffix go from `path`.
fn plain_suffix(path: &mut Vec<&str>) -> Option<Suffix> {
    let token_rows = Suffix::Beside(Extra::TokenRows, Feature::TrainableTokens);
    let bias = Suffix::Beside(Extra::Bias, Feature::TrainedBias);
    let (length, suffix) = match path[..] {
        [.., "token_adapter", "trainable_tokens_delta"] => (2, token_rows),
        [.., "base_layer", "weight"] => (2, Suffix::Beside(Extra::BaseCopy, Feature::BaseWeightCopy)),
        [.., "base_layer", "bias"] => (2, bias),
        [.., "modules_to_save", "weight"] => (2, Suffix::Weight),
        [.., "modules_to_save", "bias"] => (2, bias),
        [.., "bias"] => (1, bias),
        [.., "weight"] => (1, Suffix::Weight),
        _ => return None,
    };
    path.truncate(path.len() - length);
    Some(suffix)
}
