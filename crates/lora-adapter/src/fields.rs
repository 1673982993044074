//! Every field of PEFT's LoRA config, and what this crate does with it: one table, so that none is forgotten.
//!
//! The list is that of PEFT 0.21, which never dropped a field, with the few that other producers are known to write.

use serde_json::Value;

use crate::feature::Feature;

/// What is done with a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FieldClass {
    /// Its value is read and used, or refused.
    Handled,
    /// Its value asks for something that is not supported, unless it is neutral (what PEFT writes when the feature is
    /// off).
    RefusedUnlessNeutral(Feature),
    /// It does not change what the adapter computes: training only, or implied by the tensors.
    Harmless,
}

/// A field of the config.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Its name in `adapter_config.json`.
    pub name: &'static str,
    /// What is done with it.
    pub class: FieldClass,
    neutral: fn(&Value) -> bool,
}

/// The table, by name.
pub const FIELDS: &[Field] = &[
    handled("alora_invocation_tokens"),
    handled("alpha_pattern"),
    refused("arrow_config", Feature::Arrow, Value::is_null),
    handled("auto_mapping"),
    // A name only: adapters are moved between copies of one base, and `prepare` compares shapes.
    handled("base_model_name_or_path"),
    handled("bias"),
    harmless("corda_config"),
    // Old alpaca-lora files carry these two as null and false.
    refused("enable_lora", Feature::FusedProjection, Value::is_null),
    // Tied copies stand in the file as tensors, and are met there.
    harmless("ensure_weight_tying"),
    harmless("eva_config"),
    harmless("exclude_modules"),
    refused("fan_in_fan_out", Feature::FanInFanOut, off),
    harmless("inference_mode"),
    refused("init_lora_weights", Feature::AlteringInit, known_init),
    // What IBM's tools wrote for activated LoRA before PEFT had a field for it.
    refused("invocation_string", Feature::InvocationTokens, Value::is_null),
    handled("kasa_config"),
    handled("layer_replication"),
    harmless("layers_pattern"),
    harmless("layers_to_transform"),
    harmless("loftq_config"),
    // The order of columns in stacked experts, as Unsloth marks it.
    handled("lora_B_layout"),
    handled("lora_alpha"),
    handled("lora_bias"),
    harmless("lora_dropout"),
    harmless("lora_ga_config"),
    harmless("megatron_config"),
    harmless("megatron_core"),
    harmless("merge_weights"),
    handled("modules_to_save"),
    harmless("monteclora_config"),
    handled("peft_type"),
    handled("peft_version"),
    // Read only by `use_qalora`.
    harmless("qalora_group_size"),
    handled("r"),
    handled("rank_pattern"),
    harmless("revision"),
    harmless("runtime_config"),
    handled("target_modules"),
    handled("target_parameters"),
    harmless("task_type"),
    handled("trainable_token_indices"),
    handled("unsloth_fused_expert_lora"),
    handled("use_bdlora"),
    handled("use_dora"),
    refused("use_qalora", Feature::QaLora, off),
    handled("use_rslora"),
    harmless("velora_config"),
];

const fn handled(name: &'static str) -> Field {
    Field { name, class: FieldClass::Handled, neutral: |_| true }
}

const fn harmless(name: &'static str) -> Field {
    Field { name, class: FieldClass::Harmless, neutral: |_| true }
}

const fn refused(name: &'static str, feature: Feature, neutral: fn(&Value) -> bool) -> Field {
    Field { name, class: FieldClass::RefusedUnlessNeutral(feature), neutral }
}

impl Field {
    /// What `value` asks for and is not supported; none where the value can be read past or is handled elsewhere.
    pub(crate) fn refusal(&self, value: &Value) -> Option<Feature> {
        match self.class {
            FieldClass::RefusedUnlessNeutral(feature) if !(self.neutral)(value) => Some(feature),
            _ => None,
        }
    }
}

/// The field of this name.
pub(crate) fn find(name: &str) -> Option<&'static Field> {
    FIELDS.iter().find(|field| field.name == name)
}

fn off(value: &Value) -> bool {
    matches!(value, Value::Null | Value::Bool(false))
}

/// Initialisations after which W + scaling · B·A on the clean base is the trained model, and the two that subtract from the
/// base what can be worked out again exactly. The others subtract what depends on chance or on data.
fn known_init(value: &Value) -> bool {
    const PLAIN: [&str; 6] = ["gaussian", "eva", "orthogonal", "mica", "pissa", "olora"];
    match value {
        Value::Null | Value::Bool(_) => true,
        Value::String(name) => PLAIN.iter().any(|plain| plain.eq_ignore_ascii_case(name)),
        _ => false,
    }
}
