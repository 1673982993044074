//! The config: scaling, edge values, fields of newer and older trainers, and JSON that is none.

use std::collections::BTreeSet;

use lora_adapter::fields::{FIELDS, FieldClass};
use lora_adapter::{Feature, Note, Reason};
use lora_math::{Module, Site};
use serde_json::{Value, json};

use crate::support::{config, config_with, file, load, load_bytes, name, pair, qv, reasons, tensor};

fn scaling(fields: Value, rank: usize) -> f32 {
    let tensors = pair(0, "self_attn.q_proj", [8, rank, 8]);
    let adapter = load(&config_with(fields), &tensors).unwrap();
    adapter.pair(Site::layer(0, Module::QProj)).unwrap().scaling()
}

#[test]
fn scaling_follows_alpha_rank_and_rslora() {
    assert_eq!(scaling(json!({"r": 16, "lora_alpha": 16, "use_rslora": true}), 16), 4.0);
    assert_eq!(scaling(json!({"r": 16, "lora_alpha": 64, "use_rslora": false}), 16), 4.0);
    assert_eq!(scaling(json!({"lora_alpha": 3.5}), 4), 0.875);
    assert_eq!(scaling(json!({"r": 8, "lora_alpha": 16.0, "inference_mode": false}), 8), 2.0);
    let pattern = json!({"rank_pattern": {"q_proj": 2}, "use_rslora": true});
    assert_eq!(scaling(pattern, 2), 8.0 / 2f32.sqrt());
}

#[test]
fn alpha_of_zero_or_below_loads_with_a_note() {
    let adapter = load(&config_with(json!({"lora_alpha": 0})), &qv()).unwrap();
    assert!(adapter.pairs().all(|(_, pair)| pair.scaling() == 0.0));
    assert_eq!(adapter.notes(), [Note::ZeroAlpha { num_pairs: 4 }]);
    let adapter = load(&config_with(json!({"lora_alpha": -8})), &qv()).unwrap();
    assert!(adapter.pairs().all(|(_, pair)| pair.scaling() == -2.0));
    assert_eq!(adapter.notes(), [Note::NegativeAlpha { num_pairs: 4 }]);
}

#[test]
fn rank_and_alpha_that_are_no_numbers_are_refused() {
    for value in [json!(0), json!(-5), json!(1.5), json!("8"), json!(null), json!(1_000_000_000), json!(4.0)] {
        let (found, value) = (reasons(load(&config_with(json!({"r": value})), &qv())), value.to_string());
        assert!(
            matches!(&found[..], [Reason::BadField { field, found, .. }] if field == "r" && *found == value),
            "{found:?}"
        );
    }
    for value in [json!("16"), json!(null), json!([8]), json!(true)] {
        let found = reasons(load(&config_with(json!({"lora_alpha": value})), &qv()));
        assert!(matches!(&found[..], [Reason::BadField { field, .. }] if field == "lora_alpha"), "{found:?}");
    }
    for (text, part) in [("NaN", "expected"), ("1e999", "number out of range"), ("Infinity", "expected")] {
        let bytes = config().to_string().replace("\"lora_alpha\":8", &format!("\"lora_alpha\":{text}"));
        let found = reasons(load_bytes(bytes.as_bytes(), &file(&qv())));
        assert!(matches!(&found[..], [Reason::NotJson { message }] if message.contains(part)), "{found:?}");
    }
    let found = reasons(load(&config_with(json!({"lora_alpha": 1e300})), &qv()));
    assert!(matches!(&found[..], [Reason::Scaling { .. }, ..]) && found.len() == 4, "{found:?}");
}

#[test]
fn missing_numbers_are_refused() {
    for field in ["r", "lora_alpha", "peft_type"] {
        let mut config = config();
        config.as_object_mut().unwrap().remove(field);
        let found = reasons(load(&config, &qv()));
        assert!(matches!(&found[..], [Reason::MissingField { field: name, .. }] if *name == field), "{found:?}");
    }
}

#[test]
fn patterns_that_are_no_patterns_are_refused() {
    for (field, value) in [
        ("rank_pattern", json!({"q_proj": 0})),
        ("rank_pattern", json!({"q_proj": 2.5})),
        ("rank_pattern", json!(["q_proj"])),
        ("alpha_pattern", json!({"q_proj": "8"})),
        ("alpha_pattern", json!(8)),
        ("use_rslora", json!("yes")),
    ] {
        let found = reasons(load(&config_with(json!({field: value})), &qv()));
        assert!(matches!(&found[..], [Reason::BadField { field: name, .. }] if name.starts_with(field)), "{found:?}");
    }
    let found = reasons(load(&config_with(json!({"alpha_pattern": {"(?!x)q_proj": 8}})), &qv()));
    assert!(matches!(&found[..], [Reason::BadPattern { field: "alpha_pattern", .. }]), "{found:?}");
    assert!(load(&config_with(json!({"rank_pattern": null, "alpha_pattern": null})), &qv()).is_ok());
}

#[test]
fn rank_that_disagrees_with_the_config_is_refused_with_numbers() {
    let found = reasons(load(&config_with(json!({"r": 8})), &qv()));
    assert_eq!(found.len(), 4);
    let expected = Reason::RankDisagrees {
        tensor: name(0, "self_attn.q_proj", "A"),
        found: 4,
        expected: 8,
        source_field: "r".into(),
    };
    assert_eq!(found[0], expected);
    let found = reasons(load(&config_with(json!({"rank_pattern": {"v_proj": 2}})), &qv()));
    assert!(
        matches!(&found[..], [Reason::RankDisagrees { found: 4, expected: 2, source_field, .. }, _]
            if source_field == "rank_pattern v_proj"),
        "{found:?}"
    );
}

/// Before 0.14 a key that begins with `^` never matched, and a rank's key decided the alpha too.
#[test]
fn ranks_of_old_files_are_read_by_the_old_rule() {
    let patterns = json!({
        "rank_pattern": {"^model.layers.0.self_attn.q_proj": 2, "v_proj": 4},
        "alpha_pattern": {"self_attn.v_proj": 100},
    });
    let adapter = load(&config_with(patterns.clone()), &qv()).unwrap();
    assert_eq!(adapter.notes(), [Note::OldPatternRule]);
    assert!(adapter.pairs().all(|(_, pair)| pair.scaling() == 2.0));
    let mut config = config_with(patterns);
    config["peft_version"] = json!("0.21.2");
    let found = reasons(load(&config, &qv()));
    assert!(matches!(&found[..], [Reason::RankDisagrees { found: 4, expected: 2, .. }]), "{found:?}");
}

#[test]
fn patterns_that_decide_nothing_are_noted() {
    let patterns = json!({"rank_pattern": {"k_proj": 2}, "alpha_pattern": {"q_proj": 16, "^q_proj": 3}});
    let adapter = load(&config_with(patterns), &qv()).unwrap();
    let unused = |field, pattern: &str| Note::UnusedPattern { field, pattern: pattern.into() };
    assert_eq!(adapter.notes(), [unused("rank_pattern", "k_proj"), unused("alpha_pattern", "^q_proj")]);
    assert_eq!(adapter.pair(Site::layer(1, Module::QProj)).unwrap().scaling(), 4.0);
}

/// The tensors are the truth, whatever form the list of targets has.
#[test]
fn target_modules_do_not_change_what_loads() {
    let plain = load(&config(), &qv()).unwrap();
    for targets in [
        json!(["v_proj", "q_proj"]),
        json!(".*layers\\.[01]\\.self_attn\\.(q|v)_proj$"),
        json!("(?!x)unreadable"),
        json!("all-linear"),
        json!(["model.layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj", "v_proj"]),
        json!(null),
    ] {
        let adapter = load(&config_with(json!({"target_modules": targets})), &qv()).unwrap();
        assert_eq!(adapter.content(), plain.content());
        assert_eq!(adapter.notes(), []);
    }
    let narrower = load(&config_with(json!({"target_modules": ["q_proj"]})), &qv()).unwrap();
    assert_eq!(narrower.content(), plain.content());
    let module = "model.layers.0.self_attn.v_proj".to_owned();
    assert_eq!(narrower.notes(), [Note::NotTargeted { num_pairs: 2, module }]);
}

/// Every field of PEFT 0.21's LoRA config, as that version writes it.
const PEFT_FIELDS: &str = "alora_invocation_tokens alpha_pattern arrow_config auto_mapping base_model_name_or_path bias \
    corda_config ensure_weight_tying eva_config exclude_modules fan_in_fan_out inference_mode init_lora_weights \
    kasa_config layer_replication layers_pattern layers_to_transform loftq_config lora_alpha lora_bias lora_dropout \
    lora_ga_config megatron_config megatron_core modules_to_save monteclora_config peft_type peft_version \
    qalora_group_size r rank_pattern revision target_modules target_parameters task_type trainable_token_indices \
    use_bdlora use_dora use_qalora use_rslora velora_config";

#[test]
fn every_field_of_peft_is_in_the_table_once() {
    let names: Vec<&str> = FIELDS.iter().map(|field| field.name).collect();
    let unique: BTreeSet<&str> = names.iter().copied().collect();
    assert_eq!(unique.len(), names.len());
    for field in PEFT_FIELDS.split_whitespace() {
        assert!(unique.contains(field), "{field} is neither handled nor refused");
    }
    assert_eq!(PEFT_FIELDS.split_whitespace().count(), 41);
}

#[test]
fn neutral_and_unknown_fields_are_read_past() {
    let mut config = config_with(json!({"some_new_field": {"a": 1}, "runtime_config": {}, "enable_lora": null}));
    for field in FIELDS.iter().filter(|field| field.class != FieldClass::Handled) {
        config[field.name] = Value::Null;
    }
    for (field, value) in [
        ("use_dora", json!(false)),
        ("bias", json!("none")),
        ("modules_to_save", json!([])),
        ("megatron_core", json!("megatron.core")),
        ("loftq_config", json!({})),
        ("merge_weights", json!(false)),
        ("init_lora_weights", json!("gaussian")),
        ("velora_config", json!({"num_groups": 8})),
    ] {
        config[field] = value;
    }
    let adapter = load(&config, &qv()).unwrap();
    let note = Note::UnknownField { field: "some_new_field".into(), value: "{\"a\":1}".into() };
    assert_eq!(adapter.notes(), [note]);
}

#[test]
fn fields_that_change_the_arithmetic_are_refused_by_name() {
    for (field, value, expected) in [
        ("invocation_string", json!("<go>"), Feature::InvocationTokens),
        ("arrow_config", json!({}), Feature::Arrow),
        ("use_qalora", json!(true), Feature::QaLora),
        ("fan_in_fan_out", json!(true), Feature::FanInFanOut),
        ("enable_lora", json!([true, false, true]), Feature::FusedProjection),
        ("init_lora_weights", json!("pissa_niter_16"), Feature::AlteringInit),
        ("init_lora_weights", json!("corda"), Feature::AlteringInit),
        ("init_lora_weights", json!("lora_ga"), Feature::AlteringInit),
        ("init_lora_weights", json!("loftq"), Feature::AlteringInit),
        ("init_lora_weights", json!("a new one"), Feature::AlteringInit),
        ("peft_type", json!("IA3"), Feature::OtherPeftMethod),
        ("peft_type", json!("ADALORA"), Feature::OtherPeftMethod),
        ("peft_type", json!(null), Feature::OtherPeftMethod),
    ] {
        let found = reasons(load(&config_with(json!({field: value.clone()})), &qv()));
        let refused = Reason::UnsupportedField {
            field: FIELDS.iter().find(|known| known.name == field).unwrap().name,
            found: value.to_string(),
            feature: expected,
        };
        assert_eq!(found, [refused]);
    }
}

#[test]
fn all_reasons_come_at_once() {
    let config = json!({"peft_type": "LORA", "r": 8, "use_dora": true, "bias": "lora_only", "alpha_pattern": []});
    let mut tensors = qv();
    tensors.remove(0);
    tensors[1].bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    tensors.push(tensor("base_model.model.lm_head.weight", &[2]));
    let error = load(&config, &tensors).unwrap_err();
    let text = error.to_string();
    for part in [
        "adapter_config.json: field `bias` is \"lora_only\", and 1 trained biases",
        "adapter_config.json: field `use_dora` is switched on, and 3 magnitude vectors are missing",
        "adapter_config.json: field `lora_alpha` is missing",
        "adapter_config.json: field `alpha_pattern`: expected an object of patterns, found []",
        "adapter_model.safetensors: tensor base_model.model.lm_head.weight: expected two dimensions, found shape [2]",
        "layers.0.self_attn.q_proj.lora_B.weight: its other half",
        "layers.0.self_attn.v_proj.lora_A.weight: element [0, 0] is NaN",
        "layers.1.self_attn.v_proj.lora_A.weight: rank 4, expected 8 by the config's r",
    ] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
    assert_eq!(text.lines().count(), 11);
}

#[test]
fn configs_that_are_no_config_are_refused() {
    let deep = "[".repeat(100_000);
    for (bytes, part) in [
        (&b"{"[..], "EOF"),
        (b"", "EOF"),
        (b"\xff\xfe", "expected value"),
        (br#"{"r": 4, "r": 8}"#, "\"r\" stands twice"),
        (br#"{"a": {"b": 1, "b": 2}}"#, "\"b\" stands twice"),
        (deep.as_bytes(), "recursion limit"),
    ] {
        let found = reasons(load_bytes(bytes, &file(&qv())));
        assert!(matches!(&found[..], [Reason::NotJson { message }] if message.contains(part)), "{found:?}");
    }
    for (bytes, kind) in [(&b"[]"[..], "an array"), (b"null", "null"), (b"\"LORA\"", "a string")] {
        let found = reasons(load_bytes(bytes, &file(&qv())));
        assert_eq!(found, [Reason::NotAnObject { found: kind }]);
    }
}

#[test]
fn text_of_the_file_is_escaped_and_cut_in_messages() {
    let hostile = format!("\u{1b}[2J\n{}", "x".repeat(5000));
    let error = load(&config_with(json!({"peft_type": hostile})), &qv()).unwrap_err().to_string();
    assert_eq!(error.lines().count(), 2);
    assert!(!error.contains('\u{1b}') && error.len() < 600, "{error}");
    let mut tensors = qv();
    tensors.push(tensor(format!("base_model.model.\u{202e}\n{hostile}.weird"), &[1]));
    let error = load(&config(), &tensors).unwrap_err().to_string();
    assert_eq!(error.lines().count(), 2);
    assert!(!error.contains('\u{1b}') && !error.contains('\u{202e}') && error.len() < 600, "{error}");
}

#[test]
fn the_origin_is_kept() {
    let fields = json!({"peft_version": "0.21.2", "base_model_name_or_path": "org/base", "auto_mapping":
        {"unsloth_fixed": true}});
    let report = load(&config_with(fields), &qv()).unwrap().report();
    assert_eq!(report.origin.peft_version.as_deref(), Some("0.21.2"));
    assert_eq!(report.origin.base_model.as_deref(), Some("org/base"));
    assert_eq!(report.origin.producer, Some("Unsloth"));
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["sites"][0]["module"], "q_proj");
    assert_eq!(json["sites"][0]["a_dtype"], "f32");
    assert_eq!(json["max_rank"], 4);
}
