//! llama.cpp's names of modules, and what each is in PEFT's naming.
//!
//! Only architectures are known whose conversion leaves every tensor that is mapped here as it is, up to the order of rows
//! in q and k of `llama`; read from llama.cpp's converters, which change weights in other ways for other architectures.

/// A model family by llama.cpp's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Architecture {
    /// Llama, Mistral and Mixtral. Rows of q and k are interleaved in each head.
    Llama,
    Llama4,
    Qwen2,
    Qwen3,
    Qwen3Moe,
    Qwen3Next,
    Qwen35,
    Qwen35Moe,
    GptOss,
}

const ARCHITECTURES: [(&str, Architecture); 9] = [
    ("llama", Architecture::Llama),
    ("llama4", Architecture::Llama4),
    ("qwen2", Architecture::Qwen2),
    ("qwen3", Architecture::Qwen3),
    ("qwen3moe", Architecture::Qwen3Moe),
    ("qwen3next", Architecture::Qwen3Next),
    ("qwen35", Architecture::Qwen35),
    ("qwen35moe", Architecture::Qwen35Moe),
    ("gpt-oss", Architecture::GptOss),
];

/// The names that are known, for messages.
pub(super) fn known() -> String {
    ARCHITECTURES.map(|(name, _)| name).join(", ")
}

impl Architecture {
    pub(super) fn from_name(name: &str) -> Option<Self> {
        ARCHITECTURES.iter().find(|(known, _)| *known == name).map(|(_, architecture)| *architecture)
    }

    pub(super) fn name(self) -> &'static str {
        ARCHITECTURES.iter().find(|(_, architecture)| *architecture == self).map_or("", |(name, _)| name)
    }

    /// Whether norms are stored with 1 added to every weight.
    fn adds_one_to_norms(self) -> bool {
        matches!(self, Architecture::Qwen3Next | Architecture::Qwen35 | Architecture::Qwen35Moe)
    }
}

/// What a name without `.weight` is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// A linear layer, by its path in the trained model class.
    Linear(String),
    Embedding,
    /// One linear layer of every expert: the path up to the experts, and the layer in an expert.
    Experts(String, &'static str),
    /// Gate and up of every expert in one matrix, gate first: the path up to the experts.
    GateUpExperts(String),
    Norm(String),
}

/// Linear layers and what they are in PEFT's naming.
const LINEAR: [(&str, &str); 12] = [
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
];

/// Those of linear attention in Qwen3-Next, as its converter wrote them when it kept their order.
const LINEAR_ATTENTION: [(&str, &str); 3] =
    [("ssm_in", "linear_attn.in_proj_qkvz"), ("ssm_ba", "linear_attn.in_proj_ba"), ("ssm_out", "linear_attn.out_proj")];

/// Layers of linear attention whose rows or columns the converters put in another order, by head counts.
const REORDERED: [&str; 7] = ["attn_qkv", "attn_gate", "ssm_in", "ssm_ba", "ssm_out", "ssm_alpha", "ssm_beta"];

const EXPERTS: [(&str, &str); 3] =
    [("ffn_gate_exps", "gate_proj"), ("ffn_up_exps", "up_proj"), ("ffn_down_exps", "down_proj")];

const NORMS: [(&str, &str); 5] = [
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
];

/// What stands under a name, which ends before `.weight`; or why nothing that is read does.
pub(super) fn place(architecture: Architecture, name: &str) -> Result<Place, &'static str> {
    const UNKNOWN: &str = "no module of this name is known";
    let norm = |path: String| match architecture.adds_one_to_norms() {
        false => Ok(Place::Norm(path)),
        true => Err("norms of this architecture are stored with 1 added, which is not read"),
    };
    let layer = match name {
        "token_embd" => return Ok(Place::Embedding),
        "output" => return Ok(Place::Linear("lm_head".to_owned())),
        "output_norm" => return norm("model.norm".to_owned()),
        _ => name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')).ok_or(UNKNOWN)?,
    };
    let (index, module) = layer;
    if index.is_empty() || index.len() > 9 || !index.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err("the number of the layer is not one");
    }
    let path = |module: &str| format!("model.layers.{index}.{module}");
    let find = |table: &[(&'static str, &'static str)]| {
        table.iter().find(|(known, _)| *known == module).map(|(_, module)| *module)
    };
    let kept_order = architecture == Architecture::Qwen3Next;
    if let Some(module) = find(&LINEAR).or_else(|| find(&LINEAR_ATTENTION).filter(|_| kept_order)) {
        Ok(Place::Linear(path(module)))
    } else if let Some(module) = find(&EXPERTS) {
        Ok(Place::Experts(path("mlp.experts"), module))
    } else if module == "ffn_gate_up_exps" {
        Ok(Place::GateUpExperts(path("mlp.experts")))
    } else if let Some(module) = find(&NORMS) {
        norm(path(module))
    } else if REORDERED.contains(&module) {
        Err("linear attention whose rows llama.cpp's converter puts in another order is not read")
    } else {
        Err(UNKNOWN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names of gguf's table (`gguf.constants.TENSOR_NAMES`) beside those of transformers.
    #[test]
    fn names_lead_to_the_modules_that_they_were_made_of() {
        for (name, module) in [
            ("attn_q", "self_attn.q_proj"),
            ("attn_k", "self_attn.k_proj"),
            ("attn_v", "self_attn.v_proj"),
            ("attn_output", "self_attn.o_proj"),
            ("ffn_gate", "mlp.gate_proj"),
            ("ffn_up", "mlp.up_proj"),
            ("ffn_down", "mlp.down_proj"),
            ("ffn_gate_inp", "mlp.gate"),
            ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
            ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
            ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
            ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
        ] {
            let path = format!("model.layers.3.{module}");
            assert_eq!(place(Architecture::Qwen2, &format!("blk.3.{name}")), Ok(Place::Linear(path)));
        }
        for (name, module) in [("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj")] {
            let experts = Place::Experts("model.layers.3.mlp.experts".to_owned(), module);
            assert_eq!(place(Architecture::Qwen3Moe, &format!("blk.3.ffn_{name}_exps")), Ok(experts));
        }
    }

    #[test]
    fn norms_that_are_stored_as_they_are_have_a_place() {
        for (name, path) in [
            ("output_norm", "model.norm"),
            ("blk.3.attn_norm", "model.layers.3.input_layernorm"),
            ("blk.3.ffn_norm", "model.layers.3.post_attention_layernorm"),
            ("blk.3.post_attention_norm", "model.layers.3.post_attention_layernorm"),
            ("blk.3.attn_q_norm", "model.layers.3.self_attn.q_norm"),
            ("blk.3.attn_k_norm", "model.layers.3.self_attn.k_norm"),
        ] {
            for (_, architecture) in ARCHITECTURES {
                let adds_one =
                    architecture.name().starts_with("qwen3next") || architecture.name().starts_with("qwen35");
                let place = place(architecture, name);
                if adds_one {
                    assert!(place.is_err_and(|what| what.contains("1 added")), "{name} of {}", architecture.name());
                } else {
                    assert_eq!(place, Ok(Place::Norm(path.to_owned())), "{}", architecture.name());
                }
            }
        }
    }
}
