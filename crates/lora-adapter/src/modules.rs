//! Module paths of the model classes that adapters are trained on, and the site that each names.

use lora_math::{Module, Site};

use crate::feature::Feature;

/// What stands at a module path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Site(Site),
    Unsupported(Feature),
}

/// What stands at a path in a causal language model, or which part of the path is not known.
pub(crate) fn place(path: &[&str]) -> Result<Place, &'static str> {
    let (index, module) = match path {
        ["lm_head"] => return Ok(Place::Unsupported(Feature::HeadLora)),
        ["model", "embed_tokens"] => return Ok(Place::Unsupported(Feature::EmbeddingLora)),
        ["model", "layers", index, module @ ..] => (*index, module),
        _ => return Err("module"),
    };
    let layer = plain_index(index).ok_or("layer index")?;
    let site = |module| Ok(Place::Site(Site::layer(layer, module)));
    match module {
        ["self_attn", "q_proj"] => site(Module::QProj),
        ["self_attn", "k_proj"] => site(Module::KProj),
        ["self_attn", "v_proj"] => site(Module::VProj),
        ["self_attn", "o_proj"] => site(Module::OProj),
        ["mlp", "gate_proj"] => site(Module::GateProj),
        ["mlp", "up_proj"] => site(Module::UpProj),
        ["mlp", "down_proj"] => site(Module::DownProj),
        _ => unsupported(module).map(Place::Unsupported).ok_or("module"),
    }
}

fn unsupported(module: &[&str]) -> Option<Feature> {
    match module {
        ["mlp" | "block_sparse_moe" | "feed_forward", "experts", ..] => Some(Feature::ExpertLora),
        ["mlp" | "block_sparse_moe", "gate", ..] | ["mlp" | "feed_forward", "router", ..] => Some(Feature::RouterLora),
        ["mlp" | "feed_forward", "shared_expert" | "shared_expert_gate" | "shared_experts", ..] => {
            Some(Feature::SharedExpertLora)
        }
        [
            "linear_attn",
            "in_proj_qkvz" | "in_proj_ba" | "in_proj_qkv" | "in_proj_z" | "in_proj_b" | "in_proj_a" | "out_proj",
        ] => Some(Feature::LinearAttentionLora),
        ["self_attn", "qkv_proj"] | ["mlp", "gate_up_proj"] => Some(Feature::FusedProjection),
        _ => None,
    }
}

/// Plain decimal without leading zeros, so that one layer has one name.
fn plain_index(text: &str) -> Option<usize> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    if plain { text.parse().ok() } else { None }
}
