//! What a config says about experts: which parameters were trained, by which family of models and by whose layout.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use crate::config::{CONFIG_FILE, bad_field};
use crate::error::Reasons;

/// Families of models that lay their experts out in different ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    /// Parameters `[experts, in, out]`, gate and up interleaved.
    GptOss,
    /// Parameters `[experts, in, out]`, gate before up.
    Llama4,
    /// Parameters `[experts, out, in]`, gate before up: Qwen and Mixtral.
    Other,
}

/// Order of the columns of B in a stacked parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Columns {
    /// Column k · experts + e: as PEFT reads them.
    RankMajor,
    /// Column e · rank + k: as some versions of Unsloth write them.
    Grouped,
}

/// What a config says about experts.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    /// Entries of `target_parameters`.
    pub(crate) parameters: BTreeSet<String>,
    /// The family that the names in the config speak for.
    pub(crate) family: Option<Family>,
    /// Major and minor version of PEFT, from 0.18 on.
    pub(crate) peft: Option<(u64, u64)>,
    /// Whether Unsloth wrote the file.
    pub(crate) is_unsloth: bool,
    general: Option<Columns>,
    by_parameter: BTreeMap<String, Columns>,
}

impl Marks {
    /// Reads the marks; what they may not say is a reason.
    pub(crate) fn parse(object: &Map<String, Value>, reasons: &mut Reasons) -> Marks {
        let mut marks = Marks { family: family(object), peft: version(object), ..Marks::default() };
        match object.get("target_parameters") {
            None | Some(Value::Null) => {}
            Some(Value::Array(entries)) if entries.iter().all(Value::is_string) => {
                marks.parameters = entries.iter().filter_map(|entry| entry.as_str().map(str::to_owned)).collect();
            }
            Some(other) => {
                reasons.push(CONFIG_FILE, bad_field("target_parameters", "a list of names of parameters", other));
            }
        }
        let mapping = object.get("auto_mapping").and_then(Value::as_object);
        marks.is_unsloth = mapping.is_some_and(|mapping| mapping.get("unsloth_fixed") == Some(&Value::Bool(true)));
        // Unsloth writes its marks at the top, and in the mapping for readers that drop fields they do not know.
        for marked in [Some(object), mapping].into_iter().flatten() {
            marks.layouts(marked, reasons);
        }
        marks
    }

    /// Columns of B of the parameter with this last name, where a mark says so.
    pub(crate) fn columns(&self, parameter: &str) -> Option<Columns> {
        self.by_parameter.get(parameter).copied().or(self.general)
    }

    fn layouts(&mut self, object: &Map<String, Value>, reasons: &mut Reasons) {
        self.general = columns("lora_B_layout", object.get("lora_B_layout"), reasons).or(self.general);
        let Some(fused) = object.get("unsloth_fused_expert_lora") else { return };
        const FUSED: &str = "unsloth_fused_expert_lora";
        self.general = columns(FUSED, fused.get("lora_B_layout"), reasons).or(self.general);
        let mut rows = vec![fused.get("lora_A_layout")];
        if let Some(parameters) = fused.get("parameters").and_then(Value::as_object) {
            for (path, layout) in parameters {
                rows.push(layout.get("lora_A_layout"));
                if let Some(columns) = columns(FUSED, layout.get("lora_B_layout"), reasons) {
                    let name = path.rsplit('.').next().unwrap_or(path);
                    if self.by_parameter.insert(name.to_owned(), columns).is_some_and(|other| other != columns) {
                        reasons.push(CONFIG_FILE, bad_field(FUSED, "one layout for each parameter", fused));
                    }
                }
            }
        }
        for value in rows.into_iter().flatten().filter(|value| *value != "grouped_by_expert" && !value.is_null()) {
            reasons.push(CONFIG_FILE, bad_field(FUSED, "lora_A_layout \"grouped_by_expert\"", value));
        }
    }
}

fn columns(field: &str, value: Option<&Value>, reasons: &mut Reasons) -> Option<Columns> {
    match value? {
        Value::Null => None,
        value if value == "rank_major" => Some(Columns::RankMajor),
        value if value == "grouped_by_expert" => Some(Columns::Grouped),
        other => {
            let expected = "lora_B_layout \"rank_major\" or \"grouped_by_expert\"";
            reasons.push(CONFIG_FILE, bad_field(field, expected, other));
            None
        }
    }
}

/// The family by the class or the name of the base model. Only where tensors do not tell.
fn family(object: &Map<String, Value>) -> Option<Family> {
    const NAMES: [(&str, Family); 6] = [
        ("gptoss", Family::GptOss),
        ("llama4", Family::Llama4),
        ("qwen2", Family::Other),
        ("qwen3", Family::Other),
        ("mixtral", Family::Other),
        ("mistral", Family::Other),
    ];
    let class = object.get("auto_mapping").and_then(|mapping| mapping.get("base_model_class"));
    let texts = [class, object.get("base_model_name_or_path")];
    texts.into_iter().flatten().filter_map(Value::as_str).find_map(|text| {
        let plain: String = text.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_lowercase();
        NAMES.iter().find(|(name, _)| plain.contains(name)).map(|(_, family)| *family)
    })
}

/// The first two numbers of `peft_version`; PEFT before 0.18 does not write it.
pub(crate) fn version(object: &Map<String, Value>) -> Option<(u64, u64)> {
    let mut parts = object.get("peft_version")?.as_str()?.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}
