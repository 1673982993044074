//! Tensors beside the pairs: each in every spelling, and each refusal with its numbers.

use lora_adapter::{Adapter, BaseInit, Extra, Reason};
use lora_math::{LayerNorm, Module, NormSite, Site};
use serde_json::{Value, json};

use crate::support::{Tensor, config_with, load, qv, reasons, tensor};

const LAYERS: &str = "base_model.model.model.layers.";

/// [`qv`] with some tensors more; names are those below the layers.
fn with(more: &[(&str, &[usize])]) -> Vec<Tensor> {
    let more = more.iter().map(|(name, shape)| tensor(named(name), shape));
    qv().into_iter().chain(more).collect()
}

/// A name below the layers, or below the model where it does not start with a number.
fn named(name: &str) -> String {
    let is_layer = name.starts_with(|first: char| first.is_ascii_digit());
    if is_layer { format!("{LAYERS}{name}") } else { format!("base_model.model.{name}") }
}

fn of_all(suffix: &str) -> Vec<Tensor> {
    let module =
        |layer: usize, module: &str, out| tensor(format!("{LAYERS}{layer}.self_attn.{module}.{suffix}"), &[out]);
    let layer = |layer| [module(layer, "q_proj", 8), module(layer, "v_proj", 4)];
    qv().into_iter().chain((0..2).flat_map(layer)).collect()
}

#[track_caller]
fn one_reason(config: &Value, tensors: &[Tensor]) -> Reason {
    let mut found = reasons(load(config, tensors));
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0)
}

fn q(layer: usize) -> Site {
    Site::layer(layer, Module::QProj)
}

fn extras(adapter: &Adapter) -> Vec<(Extra, [usize; 2])> {
    adapter.extras().map(|(extra, matrix)| (extra, [matrix.rows(), matrix.cols()])).collect()
}

#[test]
fn every_spelling_of_a_magnitude_is_the_same_adapter() {
    let dora = config_with(json!({"use_dora": true}));
    let plain = load(&dora, &of_all("lora_magnitude_vector")).unwrap();
    assert_eq!(extras(&plain)[0], (Extra::Magnitude(q(0)), [1, 8]));
    assert_eq!(plain.extras().len(), 4);
    for suffix in ["lora_magnitude_vector.weight", "lora_magnitude_vector.default", "lora_magnitude_vector.x.weight"] {
        let adapter = load(&dora, &of_all(suffix)).unwrap();
        assert_eq!(extras(&adapter), extras(&plain), "{suffix}");
    }
    // A switch that the config does not have is told by the tensors.
    let silent = load(&config_with(json!({})), &of_all("lora_magnitude_vector")).unwrap();
    assert_eq!(silent.content(), plain.content());
    assert_ne!(plain.content(), load(&config_with(json!({})), &qv()).unwrap().content());
}

#[test]
fn half_of_a_kind_is_refused() {
    for (field, suffix) in [("use_dora", "lora_magnitude_vector"), ("lora_bias", "lora_B.bias")] {
        let mut tensors = of_all(suffix);
        tensors.pop();
        let found = one_reason(&config_with(json!({field: true})), &tensors);
        let Reason::Missing { field: at, num_missing: 1, first, .. } = &found else { panic!("{found:?}") };
        assert_eq!((*at, first.as_str()), (field, "layer 1 v_proj"));
        let found = one_reason(&config_with(json!({field: false})), &of_all(suffix));
        assert!(matches!(found, Reason::Undeclared { num_tensors: 4, .. }), "{found:?}");
        let found = one_reason(&config_with(json!({field: "yes"})), &qv());
        assert!(matches!(found, Reason::BadField { .. }), "{found:?}");
    }
}

#[test]
fn sizes_follow_the_pair() {
    for (field, suffix) in [("use_dora", "lora_magnitude_vector"), ("lora_bias", "lora_B.bias")] {
        let mut tensors = of_all(suffix);
        *tensors.last_mut().unwrap() = tensor(named(&format!("1.self_attn.v_proj.{suffix}")), &[5]);
        let found = one_reason(&config_with(json!({field: true})), &tensors);
        let Reason::ExtraSize { found, expected, .. } = found else { panic!("{found:?}") };
        assert_eq!((found, expected), ([1, 5], [1, 4]));
    }
    let found = one_reason(&config_with(json!({})), &with(&[("0.self_attn.k_proj.lora_magnitude_vector", &[4])]));
    assert!(matches!(&found, Reason::WithoutPair { place, .. } if place.contains("k_proj")), "{found:?}");
    let found = one_reason(&config_with(json!({})), &with(&[("0.self_attn.q_proj.lora_magnitude_vector", &[1, 8])]));
    assert!(matches!(&found, Reason::ExtraDimensions { shape, .. } if *shape == [1, 8]), "{found:?}");
}

#[test]
fn kasa_needs_its_config_and_all_diagonals() {
    let diagonals = |n: usize| -> Vec<Tensor> {
        let names = ["0.self_attn.q_proj", "0.self_attn.v_proj", "1.self_attn.q_proj", "1.self_attn.v_proj"];
        let names = names.iter().take(n).map(|name| tensor(named(&format!("{name}.lora_diag")), &[4]));
        qv().into_iter().chain(names).collect()
    };
    let kasa = config_with(json!({"kasa_config": {"beta": 1e-4, "gamma": 1e-3}}));
    let adapter = load(&kasa, &diagonals(4)).unwrap();
    assert_eq!(adapter.settings().base_init, BaseInit::Kasa);
    assert_eq!(extras(&adapter)[0], (Extra::Diagonal(q(0)), [1, 4]));
    let missing = one_reason(&kasa, &diagonals(3));
    assert!(matches!(missing, Reason::Missing { field: "kasa_config", num_missing: 1, .. }), "{missing:?}");
    let undeclared = one_reason(&config_with(json!({})), &diagonals(4));
    assert!(matches!(undeclared, Reason::Undeclared { field: "kasa_config", num_tensors: 4, .. }), "{undeclared:?}");
    let both = config_with(json!({"kasa_config": {}, "init_lora_weights": "pissa"}));
    let found = one_reason(&both, &diagonals(4));
    assert!(matches!(found, Reason::BadField { .. }), "{found:?}");
}

#[test]
fn initialisations_that_can_be_redone_are_kept_whatever_their_case() {
    for (name, init) in [("PiSSA", BaseInit::Pissa), ("olora", BaseInit::Olora), ("gaussian", BaseInit::Kept)] {
        let adapter = load(&config_with(json!({"init_lora_weights": name})), &qv()).unwrap();
        assert_eq!(adapter.settings().base_init, init, "{name}");
    }
    for name in ["pissa_niter_16", "corda", "loftq"] {
        let found = one_reason(&config_with(json!({"init_lora_weights": name})), &qv());
        assert!(matches!(found, Reason::UnsupportedField { field: "init_lora_weights", .. }), "{name}: {found:?}");
    }
}

#[test]
fn trained_biases_in_both_spellings() {
    let all = config_with(json!({"bias": "all"}));
    let old = load(&all, &with(&[("0.self_attn.q_proj.bias", &[8]), ("0.mlp.up_proj.bias", &[16])])).unwrap();
    let up = Extra::Bias(Site::layer(0, Module::UpProj));
    assert_eq!(extras(&old), [(Extra::Bias(q(0)), [1, 8]), (up, [1, 16])]);
    let new =
        load(&all, &with(&[("0.self_attn.q_proj.base_layer.bias", &[8]), ("0.mlp.up_proj.bias", &[16])])).unwrap();
    assert_eq!(extras(&new), extras(&old));
    let twice = with(&[("0.self_attn.q_proj.base_layer.bias", &[8]), ("0.self_attn.q_proj.bias", &[8])]);
    let found = one_reason(&all, &twice);
    assert!(matches!(found, Reason::AmbiguousTensor { .. }), "{found:?}");
    // A model without biases has none to train.
    assert!(load(&all, &qv()).is_ok());
}

/// PEFT from 0.6 to 0.20 saves no bias for "lora_only": what was trained is lost. From 0.21 on a file without them comes
/// from a model without them.
#[test]
fn biases_that_were_not_saved_are_missed() {
    let found = one_reason(&config_with(json!({"bias": "lora_only"})), &qv());
    assert!(matches!(found, Reason::Missing { field: "bias", .. }), "{found:?}");
    let found = one_reason(&config_with(json!({"bias": "lora_only", "peft_version": "0.20.3"})), &qv());
    assert!(matches!(found, Reason::Missing { field: "bias", .. }), "{found:?}");
    assert!(load(&config_with(json!({"bias": "lora_only", "peft_version": "0.21.2"})), &qv()).is_ok());
    let found = one_reason(&config_with(json!({"bias": "some"})), &qv());
    assert!(matches!(found, Reason::BadField { .. }), "{found:?}");
}

#[test]
fn norms_and_whole_modules() {
    let config = config_with(json!({"modules_to_save": ["norm", "lm_head"]}));
    let tensors = with(&[
        ("0.input_layernorm.weight", &[8]),
        ("0.self_attn.q_norm.modules_to_save.weight", &[4]),
        ("model.norm.weight", &[8]),
        ("lm_head.weight", &[32, 8]),
    ]);
    let adapter = load(&config, &tensors).unwrap();
    let head = Site::Vocabulary { module: Module::LmHead };
    let norm = |norm| Extra::Norm(NormSite::Layer { layer: 0, norm });
    assert_eq!(adapter.extra(norm(LayerNorm::Input)).unwrap().cols(), 8);
    assert_eq!(adapter.extra(norm(LayerNorm::Query)).unwrap().cols(), 4);
    assert_eq!(adapter.extra(Extra::Norm(NormSite::Final)).unwrap().cols(), 8);
    assert_eq!(adapter.extra(Extra::Weight(head)).unwrap().rows(), 32);
    let found = one_reason(&config_with(json!({"modules_to_save": ["norm", "score"]})), &tensors);
    assert!(matches!(&found, Reason::Missing { first, .. } if first == "score"), "{found:?}");
    let found = one_reason(&config_with(json!({})), &with(&[("0.linear_attn.norm.weight", &[8])]));
    assert!(matches!(found, Reason::UnknownTensor { .. }), "{found:?}");
}

/// PEFT's LoRA always has a pair: without any they were lost on the way.
#[test]
fn norms_without_any_pair_are_refused() {
    let norms = [tensor(named("0.input_layernorm.weight"), &[8])];
    let found = one_reason(&config_with(json!({"modules_to_save": ["input_layernorm"]})), &norms);
    assert_eq!(found, Reason::NoPairs { num_tensors: 1 });
    let both = [&qv()[..], &norms].concat();
    let adapter = load(&config_with(json!({})), &both).unwrap();
    assert!(adapter.report().to_string().contains("trained norm × 1, layer 0"), "{}", adapter.report());
}

#[test]
fn token_rows_are_as_many_as_their_tokens() {
    let rows = |n| with(&[("model.embed_tokens.token_adapter.trainable_tokens_delta", &[n, 8])]);
    let list = |tokens: Value| config_with(json!({"trainable_token_indices": tokens}));
    let adapter = load(&list(json!([5, 2])), &rows(2)).unwrap();
    assert_eq!(adapter.settings().token_ids[&Module::EmbedTokens], [5, 2]);
    assert_eq!(load(&list(json!({"embed_tokens": [5, 2]})), &rows(2)).unwrap().content(), adapter.content());
    // A name ends at a dot: the end of a word is another module.
    for (name, names_it) in [("model.embed_tokens", true), ("tokens", false), ("d_tokens", false)] {
        let loaded = load(&list(json!({name: [5, 2]})), &rows(2));
        assert_eq!(loaded.is_ok(), names_it, "{name}: {loaded:?}");
    }
    let found = one_reason(&list(json!([5, 2, 9])), &rows(2));
    assert!(matches!(found, Reason::TokenCount { found: 2, expected: 3, .. }), "{found:?}");
    let found = one_reason(&list(json!([5, 2])), &qv());
    assert!(matches!(found, Reason::Missing { field: "trainable_token_indices", .. }), "{found:?}");
    let undeclared = one_reason(&config_with(json!({})), &rows(2));
    assert!(matches!(undeclared, Reason::Undeclared { num_tensors: 1, .. }), "{undeclared:?}");
    for bad in [json!([5, 5]), json!([-1]), json!("5"), json!({"embed_tokens": [1.5]})] {
        let found = reasons(load(&list(bad.clone()), &qv()));
        assert!(matches!(&found[..], [Reason::BadField { .. }]), "{bad}: {found:?}");
    }
}

#[test]
fn embedding_and_head_have_pairs() {
    let tensors = with(&[
        ("model.embed_tokens.lora_embedding_A", &[4, 32]),
        ("model.embed_tokens.lora_embedding_B", &[8, 4]),
        ("model.embed_tokens.base_layer.weight", &[32, 8]),
        ("lm_head.lora_A.weight", &[4, 8]),
        ("lm_head.lora_B.weight", &[32, 4]),
    ]);
    let adapter = load(&config_with(json!({})), &tensors).unwrap();
    let embedding = Site::Vocabulary { module: Module::EmbedTokens };
    let pair = adapter.pair(embedding).unwrap();
    assert_eq!([pair.in_features(), pair.out_features()], [32, 8]);
    assert_eq!(extras(&adapter), [(Extra::BaseCopy(embedding), [32, 8])]);
    // A and B as mergekit writes them: of a linear layer from the hidden size to the vocabulary.
    let flipped: Vec<Tensor> =
        with(&[("model.embed_tokens.lora_embedding_A", &[4, 8]), ("model.embed_tokens.lora_embedding_B", &[32, 4])]);
    let adapter = load(&config_with(json!({})), &flipped).unwrap();
    let pair = adapter.pair(embedding).unwrap();
    assert_eq!([pair.in_features(), pair.out_features()], [32, 8]);
    let half = one_reason(&config_with(json!({})), &with(&[("model.embed_tokens.lora_embedding_A", &[4, 32])]));
    let Reason::HalfPair { missing, .. } = &half else { panic!("{half:?}") };
    assert!(missing.ends_with("lora_embedding_B"), "{missing}");
    let mut resized = tensors;
    resized[10] = tensor(named("model.embed_tokens.base_layer.weight"), &[33, 8]);
    let found = one_reason(&config_with(json!({})), &resized);
    assert!(matches!(found, Reason::ExtraSize { found: [33, 8], expected: [32, 8], .. }), "{found:?}");
}

#[test]
fn blocks_that_do_not_divide_are_refused() {
    let blocks = |a: &[&str], b: &[&str], count: usize, strict: bool| {
        config_with(json!({"use_bdlora": {
            "target_modules_bd_a": a, "target_modules_bd_b": b, "nblocks": count, "match_strict": strict,
        }}))
    };
    // A of v_proj is [4, 8] as stored: two blocks of [2, 8], for 16 inputs.
    let adapter = load(&blocks(&["v_proj"], &[], 2, false), &qv()).unwrap();
    let a = adapter.pair(Site::layer(0, Module::VProj)).unwrap().a();
    let dense = a.to_f32();
    assert_eq!([a.rows(), a.cols()], [4, 16]);
    assert!((0..4).all(|row| (0..16).all(|col| (row / 2 == col / 8) || dense[row * 16 + col] == 0.0)));
    let found = reasons(load(&blocks(&["v_proj"], &[], 3, false), &qv()));
    let uneven = |reason: &Reason| matches!(reason, Reason::UnevenBlocks { rows: 4, num_blocks: 3, .. });
    assert!(found.len() == 2 && found.iter().all(uneven), "{found:?}");
    let strict = reasons(load(&blocks(&["v_proj"], &[], 2, true), &qv()));
    assert!(strict.len() == 2 && strict.iter().all(|r| matches!(r, Reason::BadField { .. })), "{strict:?}");
    for bad in [json!({"nblocks": 0}), json!({}), json!({"nblocks": 65}), json!([1])] {
        let found = reasons(load(&config_with(json!({"use_bdlora": bad.clone()})), &qv()));
        assert!(found.iter().any(|reason| matches!(reason, Reason::BadField { .. })), "{bad}: {found:?}");
    }
}

#[test]
fn what_changes_the_run_is_read_or_refused() {
    let fields = json!({"layer_replication": [[0, 2], [1, 2]], "alora_invocation_tokens": [7, 8]});
    let adapter = load(&config_with(fields), &qv()).unwrap();
    assert_eq!(adapter.settings().layer_replication, [(0, 2), (1, 2)]);
    assert_eq!(adapter.settings().invocation_tokens, [7, 8]);
    let text = adapter.report().to_string();
    assert!(text.contains("base layers 0..2, 1..2") && text.contains("from the last 7, 8 on"), "{text}");
    for (field, value) in [
        ("layer_replication", json!([[2, 1]])),
        ("layer_replication", json!([[0, 1, 2]])),
        ("layer_replication", json!([])),
        ("alora_invocation_tokens", json!([])),
        ("alora_invocation_tokens", json!([1, "a"])),
    ] {
        let found = one_reason(&config_with(json!({field: value.clone()})), &qv());
        assert!(matches!(found, Reason::BadField { .. }), "{field} {value}: {found:?}");
    }
}

#[test]
fn the_report_names_what_stands_beside() {
    let report = load(&config_with(json!({"use_dora": true})), &of_all("lora_magnitude_vector")).unwrap().report();
    assert_eq!(report.extras.len(), 4);
    let text = report.to_string();
    assert!(text.contains("beside      DoRA magnitudes × 4, first layer 0 q_proj [1, 8], 96 bytes"), "{text}");
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["extras"][0]["shape"], json!([1, 8]));
    assert_eq!(json["settings"]["base_init"], "kept");
}
