//! Dense models with everything that adapters of such models can hold: logits of transformers and PEFT, alone and in mixed
//! batches, by prefill and by decode.

use conformance::engines::{back_ends, golden_engine, load_model, load_prepared, named, small_options};
use conformance::golden::{DENSE_KINDS, TensorFile, adapter_cases, adapter_dir, golden_dir, mixed_batches, model_dir};
use conformance::rows::{Row, check, difference, file_rows};
use lora_math::AdapterSelection;

/// The golden adapters that are served, by kind.
const SERVED: [(&str, &[&str]); 6] = [
    (
        "llama",
        &[
            "all_linear",
            "bdlora",
            "default_targets",
            "dora",
            "dora_emb",
            "embed_head_lora",
            "embed_lora",
            "exclude",
            "head_lora",
            "init_gaussian",
            "init_olora",
            "init_orthogonal",
            "init_pissa",
            "init_pissa_converted",
            "kasa",
            "layers_pattern",
            "layers_to_transform",
            "lora_bias",
            "mica",
            "monteclora",
            "mts_norm",
            "patterns",
            "patterns_rslora",
            "qv",
            "rank_1",
            "regex",
            "rslora",
            "velora",
        ],
    ),
    ("llama_tied", &["embed_lora", "embed_lora_tied", "head_lora"]),
    ("llama_bias", &["bias_all", "bias_lora_only", "dora", "lora_bias"]),
    ("qwen2", &["all_linear", "bias_lora_only"]),
    ("qwen3", &["all_linear", "norms_mts"]),
    ("qwen3_tied", &["all_linear"]),
];

/// The others, with a part of what refuses each.
const REFUSED: [(&str, &[(&str, &str)]); 6] = [
    (
        "llama",
        &[
            ("alora", "activated LoRA"),
            ("init_pissa_niter_4", "an initialisation that alters the base weights"),
            ("layer_replication", "replicated base layers"),
            ("mts_embed_head", "whole modules"),
            ("resized_vocab", "whole modules"),
            ("tti_dict", "trainable tokens"),
            ("tti_list", "trainable tokens"),
        ],
    ),
    (
        "llama_tied",
        &[
            ("mts_embed", "whole modules"),
            ("mts_embed_head", "whole modules"),
            ("mts_embed_tied", "whole modules"),
            ("mts_head", "whole modules"),
            ("tti_dict_diff", "trainable tokens"),
            ("tti_dict_same", "trainable tokens"),
            ("tti_list", "trainable tokens"),
        ],
    ),
    ("llama_bias", &[]),
    ("qwen2", &[]),
    ("qwen3", &[]),
    ("qwen3_tied", &[]),
];

/// The rows of a case's golden file: under the adapter, or by the base.
fn case_rows(kind: &str, case: &str, with_adapter: bool) -> Vec<Row> {
    // The converted form of an adapter gives the logits of the form that it was converted from.
    let golden = case.trim_end_matches("_converted");
    let file = adapter_dir(kind, golden).join("golden.safetensors");
    let logits = if with_adapter { "logits_adapter" } else { "logits_base" };
    file_rows(&file, logits, &if with_adapter { named(case) } else { AdapterSelection::Base })
}

#[test]
fn base_models_give_the_logits_of_transformers() {
    for kind in DENSE_KINDS {
        let case = &adapter_cases(kind)[0];
        let rows = case_rows(kind, case, false);
        let mut engine = golden_engine(kind, &[], &small_options(2, back_ends()[1].1.clone()));
        check(&mut engine, &rows, kind);
    }
}

#[test]
fn every_adapter_alone_gives_the_logits_of_peft() {
    for (back_end, kernels) in back_ends() {
        for (kind, cases) in SERVED {
            let mut engine = golden_engine(kind, cases, &small_options(2, kernels.clone()));
            for case in cases {
                let rows = case_rows(kind, case, true);
                check(&mut engine, &rows, &format!("{kind} {case} on {back_end}"));
                // The adapter has to matter: its logits are not the base's.
                let as_base = |row: Row| Row { selection: AdapterSelection::Base, ..row };
                let base: Vec<Row> = case_rows(kind, case, true).into_iter().map(as_base).collect();
                let moved = difference(&mut engine, &base, false);
                assert!(moved > 0.05, "{kind} {case}: base logits differ by {moved:e} only");
            }
        }
    }
}

#[test]
fn mixed_batches_give_the_logits_of_peft() {
    let mut num_adapted = 0;
    for (back_end, kernels) in back_ends() {
        for (kind, cases) in SERVED {
            let mut engine = golden_engine(kind, cases, &small_options(2, kernels.clone()));
            for batch in mixed_batches(kind) {
                let rows = mixed_rows(kind, &batch, cases);
                assert!(!rows.is_empty(), "{kind} {batch} has no row in scope");
                num_adapted += rows.iter().filter(|row| row.selection != AdapterSelection::Base).count();
                check(&mut engine, &rows, &format!("{kind} {batch} on {back_end}"));
            }
        }
    }
    assert!(num_adapted >= 2 * 20, "{num_adapted} adapted rows");
}

/// The rows of a mixed batch whose adapters are served, and its base rows.
fn mixed_rows(kind: &str, batch: &str, served: &[&str]) -> Vec<Row> {
    let path = golden_dir().join("adapters").join(kind).join(batch);
    let names = std::fs::read_to_string(path.with_extension("json")).expect("row names");
    let names: Vec<String> = serde_json::from_str(&names).expect("a list of names");
    let file = TensorFile::open(&path.with_extension("safetensors"));
    let (logits, tokens) = (file.logits("logits"), file.token_rows("input_ids"));
    assert_eq!(names.len(), tokens.len(), "{kind} {batch}");
    let rows = names.iter().zip(tokens).enumerate();
    rows.filter_map(|(index, (name, token_ids))| {
        let selection = match name.as_str() {
            "__base__" => AdapterSelection::Base,
            name if served.contains(&name) => named(name),
            _ => return None,
        };
        Some(Row { selection, token_ids, expected: logits.sequence(index).to_vec() })
    })
    .collect()
}

#[test]
fn every_other_adapter_is_refused_by_name() {
    for ((kind, served), (_, refused)) in SERVED.into_iter().zip(REFUSED) {
        let model = load_model(&model_dir(kind));
        for (case, part) in refused {
            let reason = load_prepared(kind, case, &model).expect_err(case);
            assert!(reason.contains(part), "{kind} {case} is refused by: {reason}");
        }
        let mut known: Vec<&str> = refused.iter().map(|(case, _)| *case).chain(served.iter().copied()).collect();
        known.sort_unstable();
        assert_eq!(adapter_cases(kind), known, "{kind}");
    }
}
