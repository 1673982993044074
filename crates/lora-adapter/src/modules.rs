//! Module paths of the model classes that adapters are trained on, and what each names.

use std::fmt;

use lora_math::{LayerNorm, Module, NormSite, Site};

use crate::feature::Feature;

/// What a pair of tensors holds A and B of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Target {
    /// One site.
    Site(Site),
    /// Gate and up of one expert in one linear layer, interleaved: what gpt-oss is trained with in 4 bits.
    ExpertGateUp { layer: usize, expert: usize },
    /// A parameter that holds all experts of a layer. Which one is not in the name, only how many wrappers of other
    /// parameters stand outside of its own.
    Stacked { layer: usize, depth: usize },
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Site(site) => site.fmt(f),
            Target::ExpertGateUp { layer, expert } => write!(f, "layer {layer} expert {expert} gate_up_proj"),
            Target::Stacked { layer, depth } => write!(f, "layer {layer} experts{}", ".base_layer".repeat(*depth)),
        }
    }
}

/// What stands at a module path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Target(Target),
    Norm(NormSite),
    Unsupported(Feature),
}

/// What stands at a path in a causal language model, or which part of the path is not known.
pub(crate) fn place(path: &[&str]) -> Result<Place, &'static str> {
    let (index, module) = match path {
        ["lm_head"] => return Ok(Place::Target(Target::Site(Site::Vocabulary { module: Module::LmHead }))),
        ["model", "embed_tokens"] => {
            return Ok(Place::Target(Target::Site(Site::Vocabulary { module: Module::EmbedTokens })));
        }
        ["model", "norm"] => return Ok(Place::Norm(NormSite::Final)),
        ["model", "layers", index, module @ ..] => (*index, module),
        _ => return Err("module"),
    };
    let layer = plain_index(index).ok_or("layer index")?;
    if let Some(module) = layer_module(module) {
        return Ok(Place::Target(Target::Site(Site::layer(layer, module))));
    }
    let norm = match module {
        ["input_layernorm"] => Some(LayerNorm::Input),
        ["post_attention_layernorm"] => Some(LayerNorm::PostAttention),
        ["self_attn", "q_norm"] => Some(LayerNorm::Query),
        ["self_attn", "k_norm"] => Some(LayerNorm::Key),
        _ => None,
    };
    if let Some(norm) = norm {
        return Ok(Place::Norm(NormSite::Layer { layer, norm }));
    }
    match module {
        ["mlp" | "block_sparse_moe" | "feed_forward", "experts", rest @ ..] => {
            expert_target(layer, rest).map(Place::Target)
        }
        ["self_attn", "qkv_proj"] | ["mlp", "gate_up_proj"] => Ok(Place::Unsupported(Feature::FusedProjection)),
        _ => Err("module"),
    }
}

/// Every module of a layer outside of its experts. `mlp.gate` is always the router: the gate of a dense MLP is
/// `mlp.gate_proj`.
fn layer_module(path: &[&str]) -> Option<Module> {
    Some(match path {
        ["self_attn", "q_proj"] => Module::QProj,
        ["self_attn", "k_proj"] => Module::KProj,
        ["self_attn", "v_proj"] => Module::VProj,
        ["self_attn", "o_proj"] => Module::OProj,
        ["mlp" | "feed_forward", "gate_proj"] => Module::GateProj,
        ["mlp" | "feed_forward", "up_proj"] => Module::UpProj,
        ["mlp" | "feed_forward", "down_proj"] => Module::DownProj,
        ["linear_attn", "in_proj_qkvz"] => Module::InProjQkvz,
        ["linear_attn", "in_proj_ba"] => Module::InProjBa,
        ["linear_attn", "in_proj_qkv"] => Module::InProjQkv,
        ["linear_attn", "in_proj_z"] => Module::InProjZ,
        ["linear_attn", "in_proj_b"] => Module::InProjB,
        ["linear_attn", "in_proj_a"] => Module::InProjA,
        ["linear_attn", "out_proj"] => Module::LinearOutProj,
        ["mlp" | "block_sparse_moe", "gate"]
        | ["mlp" | "feed_forward", "router"]
        | ["mlp" | "feed_forward", "router", "linear"] => Module::Router,
        ["mlp" | "feed_forward", "shared_expert" | "shared_experts", "gate_proj"] => Module::SharedGateProj,
        ["mlp" | "feed_forward", "shared_expert" | "shared_experts", "up_proj"] => Module::SharedUpProj,
        ["mlp" | "feed_forward", "shared_expert" | "shared_experts", "down_proj"] => Module::SharedDownProj,
        ["mlp", "shared_expert_gate"] => Module::SharedExpertGate,
        _ => return None,
    })
}

/// What stands below `experts`: one linear layer of one expert, or all experts in one parameter.
fn expert_target(layer: usize, path: &[&str]) -> Result<Target, &'static str> {
    if path.iter().all(|segment| *segment == "base_layer") {
        return Ok(Target::Stacked { layer, depth: path.len() });
    }
    let (index, module) = match path {
        ["gate_up_projs", index] => {
            let expert = plain_index(index).ok_or("expert index")?;
            return Ok(Target::ExpertGateUp { layer, expert });
        }
        ["down_projs", index] => (index, Module::ExpertDownProj),
        [index, "gate_proj" | "w1"] => (index, Module::ExpertGateProj),
        [index, "up_proj" | "w3"] => (index, Module::ExpertUpProj),
        [index, "down_proj" | "w2"] => (index, Module::ExpertDownProj),
        _ => return Err("module"),
    };
    let expert = plain_index(index).ok_or("expert index")?;
    Ok(Target::Site(Site::Expert { layer, expert, module }))
}

/// Plain decimal without leading zeros, so that one layer has one name.
fn plain_index(text: &str) -> Option<usize> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    if plain { text.parse().ok() } else { None }
}
