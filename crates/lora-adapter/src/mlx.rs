//! Directories of mlx-lm: a config of its own under PEFT's file name, and tensors that are the transposes of PEFT's.
//!
//! `scale` multiplies B·A·x as it stands, whatever the rank. Tensors get the names that PEFT gives their places, so
//! everything behind this file sees one naming; messages keep the names of the file.

use lora_math::scaling::ScalingRule;
use serde_json::{Map, Value};

use crate::config::{CONFIG_FILE, Config, Tool, rank_value};
use crate::declared::Declared;
use crate::error::{Reasons, shown};
use crate::feature::Feature;
use crate::reason::Reason;
use crate::tensor_file::{FilePlan, TensorPlan};

/// Name of the tensor file.
pub(crate) const WEIGHTS_FILE: &str = "adapters.safetensors";

/// More than any model has in a layer: a small tensor could claim a million.
const MAX_EXPERTS: u64 = 4096;

/// Expert matrices of one file, A and B.
const MAX_EXPERT_TENSORS: u64 = 2 * crate::load::MAX_EXPERT_PAIRS as u64;

/// No expert has a matrix of fewer bytes: names for each would take many times the memory of the file.
pub(crate) const MIN_EXPERT_BYTES: u64 = 32;

/// Bytes of the name of a stack: it is repeated for each expert.
const MAX_STACK_NAME: usize = 512;

/// Whether a config is one of mlx-lm's.
pub(crate) fn is_config(object: &Map<String, Value>) -> bool {
    !object.contains_key("peft_type")
        && ["fine_tune_type", "lora_parameters"].iter().any(|key| object.contains_key(*key))
}

/// Reads the config. Its other fields are the arguments of the training run.
pub(crate) fn config(object: &Map<String, Value>, reasons: &mut Reasons) -> Option<Config> {
    let mut refuse = |reason| reasons.push(CONFIG_FILE, reason);
    let unsupported = |found: &Value, feature| {
        let field = "fine_tune_type";
        Reason::UnsupportedField { field, found: shown(&found.to_string()), feature }
    };
    let bad = |field: &str, expected: &str, found: &Value| Reason::BadField {
        field: field.to_owned(),
        expected: expected.to_owned(),
        found: shown(&found.to_string()),
    };
    let mut is_dora = false;
    match object.get("fine_tune_type") {
        // Older versions knew nothing else and did not say it.
        None => {}
        Some(Value::String(kind)) if kind == "lora" => {}
        Some(Value::String(kind)) if kind == "dora" => is_dora = true,
        Some(found) if found == "full" => refuse(unsupported(found, Feature::ReplacedModule)),
        Some(found) => refuse(bad("fine_tune_type", "\"lora\" or \"dora\"", found)),
    }
    let Some(parameters) = object.get("lora_parameters") else {
        refuse(Reason::MissingField { field: "lora_parameters", expected: "an object with rank and scale" });
        return None;
    };
    let Value::Object(parameters) = parameters else {
        refuse(bad("lora_parameters", "an object with rank and scale", parameters));
        return None;
    };
    // The first versions multiplied scale by alpha / rank; later ones wrote alpha and did not read it. The file does
    // not say which one trained the adapter.
    if let Some(alpha) = parameters.get("alpha") {
        refuse(bad("lora_parameters.alpha", "no alpha beside scale", alpha));
    }
    let mut number = |field: &'static str, expected: &'static str| {
        let value = parameters.get(field.rsplit('.').next()?);
        if value.is_none() {
            refuse(Reason::MissingField { field, expected });
        }
        value
    };
    let rank = number("lora_parameters.rank", "a whole number from 1 to 512");
    let scale = number("lora_parameters.scale", "a finite number");
    let rank = rank.and_then(|value| {
        let rank = rank_value(value);
        if rank.is_none() {
            refuse(bad("lora_parameters.rank", "a whole number from 1 to 512", value));
        }
        rank
    });
    let scale = scale.and_then(|value| {
        let scale = value.as_f64().filter(|scale| scale.is_finite());
        if scale.is_none() {
            refuse(bad("lora_parameters.scale", "a finite number", value));
        }
        scale
    });
    Some(Config::of_other_tool(Tool::Mlx { rank: rank? }, scale?, ScalingRule::Given, Declared::of_mlx(is_dora)))
}

/// The plan with PEFT's names and orientation. Stacked experts become one tensor for each expert.
///
/// What a header says in few bytes must not become much memory: a stack without elements, under a very long name, or
/// beyond the most expert matrices of a file stays one tensor, and is refused for its three dimensions.
pub(crate) fn translate(plan: FilePlan) -> FilePlan {
    let total_bytes = plan.tensors.iter().fold(0u64, |total, tensor| total.saturating_add(tensor.end - tensor.begin));
    let mut room = MAX_EXPERT_TENSORS.min(total_bytes / MIN_EXPERT_BYTES);
    let tensors = plan.tensors.into_iter().flat_map(|tensor| translate_tensor(tensor, &mut room)).collect();
    FilePlan { tensors, ..plan }
}

fn translate_tensor(tensor: TensorPlan, room: &mut u64) -> Vec<TensorPlan> {
    let Some((path, part)) = tensor.name.rsplit_once('.') else { return vec![named_alike(tensor)] };
    let half = match part {
        "lora_a" => "A",
        "lora_b" => "B",
        "m" => {
            let peft_name = Some(format!("base_model.model.{path}.lora_magnitude_vector"));
            return vec![TensorPlan { peft_name, ..tensor }];
        }
        _ => return vec![named_alike(tensor)],
    };
    if let ([num_experts, rows, cols], Some((layer, module))) = (&tensor.shape[..], path.split_once(".switch_mlp."))
        && (1..=MAX_EXPERTS.min(*room)).contains(num_experts)
        && *rows > 0
        && *cols > 0
        && tensor.name.len() <= MAX_STACK_NAME
    {
        *room -= num_experts;
        let expert_bytes = (tensor.end - tensor.begin) / num_experts;
        let expert = |index: u64| {
            let begin = tensor.begin + index * expert_bytes;
            TensorPlan {
                name: format!("{}[{index}]", tensor.name),
                peft_name: Some(format!("base_model.model.{layer}.experts.{index}.{module}.lora_{half}.weight")),
                dtype: tensor.dtype,
                shape: vec![*rows, *cols],
                transposed: false,
                begin,
                end: begin + expert_bytes,
            }
        };
        return (0..*num_experts).map(expert).collect();
    }
    let is_embedding = path == "embed_tokens" || path.ends_with(".embed_tokens");
    let suffix = if is_embedding { format!("lora_embedding_{half}") } else { format!("lora_{half}.weight") };
    let peft_name = Some(format!("base_model.model.{path}.{suffix}"));
    let mut tensor = TensorPlan { peft_name, ..tensor };
    if tensor.shape.len() == 2 {
        tensor.shape.reverse();
        tensor.transposed = true;
    }
    vec![tensor]
}

/// A tensor of the base model: mlx-lm names those as transformers does.
fn named_alike(tensor: TensorPlan) -> TensorPlan {
    TensorPlan { peft_name: Some(format!("base_model.model.{}", tensor.name)), ..tensor }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(name: &str, shape: &[u64]) -> Vec<TensorPlan> {
        let end = 100 + 4 * shape.iter().product::<u64>();
        let (name, shape) = (name.to_owned(), shape.to_vec());
        let tensor = TensorPlan { name, peft_name: None, dtype: "F32", shape, transposed: false, begin: 100, end };
        translate(FilePlan { file: WEIGHTS_FILE, tensors: vec![tensor], data_offset: 8 }).tensors
    }

    #[test]
    fn linear_pairs_are_transposed() {
        let [a] = &translated("model.layers.1.self_attn.q_proj.lora_a", &[64, 4])[..] else { panic!() };
        assert_eq!(a.key(), "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight");
        assert_eq!((&a.shape[..], a.transposed), (&[4, 64][..], true));
        let [b] = &translated("lm_head.lora_b", &[4, 128])[..] else { panic!() };
        assert_eq!((b.key(), &b.shape[..]), ("base_model.model.lm_head.lora_B.weight", &[128, 4][..]));
        let [a] = &translated("model.embed_tokens.lora_a", &[128, 4])[..] else { panic!() };
        assert_eq!((a.key(), &a.shape[..]), ("base_model.model.model.embed_tokens.lora_embedding_A", &[4, 128][..]));
    }

    #[test]
    fn stacked_experts_are_taken_apart() {
        let experts = translated("model.layers.0.mlp.switch_mlp.up_proj.lora_b", &[3, 48, 4]);
        let keys: Vec<&str> = experts.iter().map(TensorPlan::key).collect();
        let key = |index| format!("base_model.model.model.layers.0.mlp.experts.{index}.up_proj.lora_B.weight");
        assert_eq!(keys, [key(0), key(1), key(2)]);
        let ranges: Vec<_> = experts.iter().map(|expert| expert.begin..expert.end).collect();
        assert_eq!(ranges, [100..868, 868..1636, 1636..2404]);
        assert!(experts.iter().all(|expert| expert.shape == [48, 4] && !expert.transposed));
    }

    /// What is not taken apart has three dimensions, which no matrix has.
    #[test]
    fn a_short_header_does_not_become_many_tensors() {
        let name = "model.layers.0.mlp.switch_mlp.up_proj.lora_b";
        for shape in [[1 << 20, 1, 1], [4096, 0, 5], [4096, 5, 0], [0, 5, 5]] {
            assert_eq!(translated(name, &shape).len(), 1, "{shape:?}");
        }
        let long = format!("{}{name}", "x".repeat(1 << 20));
        assert_eq!(translated(&long, &[4096, 1, 1]).len(), 1);
        let stack = TensorPlan {
            name: name.to_owned(),
            peft_name: None,
            dtype: "F32",
            shape: vec![4096, 1, 8],
            transposed: false,
            begin: 0,
            end: 4096 * MIN_EXPERT_BYTES,
        };
        let plan = FilePlan { file: WEIGHTS_FILE, tensors: vec![stack; 200], data_offset: 8 };
        assert_eq!(translate(plan).tensors.len() as u64, MAX_EXPERT_TENSORS + 200 - MAX_EXPERT_TENSORS / 4096);
    }

    #[test]
    fn other_tensors_get_the_names_that_refuse_them() {
        let [m] = &translated("model.layers.0.mlp.up_proj.m", &[48])[..] else { panic!() };
        assert_eq!(m.key(), "base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector");
        let [weight] = &translated("model.layers.0.mlp.up_proj.weight", &[48, 64])[..] else { panic!() };
        assert_eq!(weight.key(), "base_model.model.model.layers.0.mlp.up_proj.weight");
        assert_eq!(translated("adapter", &[4]).len(), 1);
    }
}
