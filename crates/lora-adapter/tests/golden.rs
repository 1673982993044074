//! Every golden adapter of the dense models: it loads with the ranks and scalings that its config and the format's rules
//! give, or is refused for the one reason that the table names. What the loaded ones compute is tested with the engine.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use lora_adapter::{Adapter, BaseInit, Feature, LoadError, Reason, prepare};
use lora_math::shape::{AttentionSize, LayerShape, MlpSize};
use lora_math::{ModelShape, Module, Site};
use safetensors::SafeTensors;

fn golden() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/adapters")
}

fn open(case: &str) -> Result<Adapter, LoadError> {
    Adapter::open(&golden().join(case))
}

/// Cases that load: rank and scaling of all sites that no exception names.
const LOADS: [(&str, usize, f32); 20] = [
    ("llama/all_linear", 8, 2.0),
    ("llama/default_targets", 4, 2.0),
    ("llama/exclude", 4, 2.0),
    ("llama/init_gaussian", 4, 2.0),
    ("llama/init_orthogonal", 4, 2.0),
    ("llama/init_pissa_converted", 8, 2.0),
    ("llama/layers_pattern", 4, 2.0),
    ("llama/layers_to_transform", 4, 2.0),
    ("llama/mica", 4, 2.0),
    ("llama/monteclora", 4, 2.0),
    ("llama/patterns", 4, 2.0),
    ("llama/patterns_rslora", 4, 4.0),
    ("llama/qv", 4, 2.0),
    ("llama/rank_1", 1, 0.5),
    ("llama/regex", 4, 2.0),
    ("llama/rslora", 8, 4.242_640_5),
    ("llama/velora", 4, 2.0),
    ("qwen2/all_linear", 4, 2.0),
    ("qwen3/all_linear", 4, 2.0),
    ("qwen3_tied/all_linear", 4, 2.0),
];

/// Sites of the two pattern cases that differ from the rest of their adapter.
const EXCEPTIONS: [(&str, usize, Module, usize, f32); 10] = [
    ("llama/patterns", 0, Module::QProj, 2, 2.5),
    ("llama/patterns", 1, Module::QProj, 2, 3.5),
    ("llama/patterns", 0, Module::VProj, 4, 8.0),
    ("llama/patterns", 1, Module::VProj, 4, 8.0),
    ("llama/patterns", 0, Module::GateProj, 3, 8.0 / 3.0),
    ("llama/patterns", 1, Module::GateProj, 4, 2.0),
    ("llama/patterns", 0, Module::UpProj, 4, 2.0),
    ("llama/patterns", 1, Module::UpProj, 6, 8.0 / 6.0),
    ("llama/patterns_rslora", 0, Module::QProj, 9, 2.0),
    ("llama/patterns_rslora", 1, Module::QProj, 9, 2.0),
];

/// Kinds of tensors beside the pairs, and how many of each.
type Kinds = &'static [(&'static str, usize)];

/// Cases that hold more than pairs: the number of pairs, and of each kind of tensor beside them.
const CARRIES: [(&str, usize, Kinds); 33] = [
    ("llama/alora", 8, &[]),
    ("llama/bdlora", 8, &[]),
    ("llama/dora", 14, &[("DoRA magnitudes", 14)]),
    ("llama/dora_emb", 3, &[("DoRA magnitudes", 3), ("copy of the base weight", 1)]),
    ("llama/embed_head_lora", 4, &[("copy of the base weight", 2)]),
    ("llama/embed_lora", 3, &[("copy of the base weight", 1)]),
    ("llama/head_lora", 3, &[("copy of the base weight", 1)]),
    ("llama/init_olora", 4, &[]),
    ("llama/init_pissa", 4, &[]),
    ("llama/kasa", 8, &[("KaSA diagonal", 8)]),
    ("llama/layer_replication", 3, &[]),
    ("llama/lora_bias", 2, &[("bias of lora_B", 2)]),
    ("llama/mts_embed_head", 2, &[("whole weight", 2)]),
    ("llama/mts_norm", 2, &[("trained norm", 5)]),
    ("llama/resized_vocab", 2, &[("whole weight", 2)]),
    ("llama/tti_dict", 2, &[("token rows", 2)]),
    ("llama/tti_list", 2, &[("token rows", 1)]),
    ("llama_bias/bias_all", 2, &[("trained bias", 14)]),
    ("llama_bias/bias_lora_only", 4, &[("trained bias", 4)]),
    ("llama_bias/dora", 8, &[("DoRA magnitudes", 8)]),
    ("llama_bias/lora_bias", 14, &[("bias of lora_B", 14)]),
    ("llama_tied/embed_lora", 3, &[("copy of the base weight", 1)]),
    ("llama_tied/embed_lora_tied", 4, &[("copy of the base weight", 2)]),
    ("llama_tied/head_lora", 3, &[("copy of the base weight", 1)]),
    ("llama_tied/mts_embed", 2, &[("whole weight", 1)]),
    ("llama_tied/mts_embed_head", 2, &[("whole weight", 2)]),
    ("llama_tied/mts_embed_tied", 2, &[("whole weight", 2)]),
    ("llama_tied/mts_head", 2, &[("whole weight", 1)]),
    ("llama_tied/tti_dict_diff", 2, &[("token rows", 2)]),
    ("llama_tied/tti_dict_same", 2, &[("token rows", 1)]),
    ("llama_tied/tti_list", 2, &[("token rows", 1)]),
    ("qwen2/bias_lora_only", 2, &[("trained bias", 2)]),
    ("qwen3/norms_mts", 8, &[("trained norm", 4)]),
];

/// Cases that are refused, and every kind of reason that they give.
const REFUSED: [(&str, &[Feature]); 1] = [("llama/init_pissa_niter_4", &[Feature::AlteringInit])];

/// The feature that a reason names.
fn feature(reason: &Reason) -> Option<Feature> {
    match reason {
        Reason::UnsupportedField { feature, .. }
        | Reason::UnsupportedTensors { feature, .. }
        | Reason::UnsupportedFormat { feature } => Some(*feature),
        _ => None,
    }
}

#[test]
fn every_case_is_in_a_table() {
    let mut cases = BTreeSet::new();
    for model in golden().read_dir().unwrap() {
        for case in model.unwrap().path().read_dir().unwrap() {
            let case = case.unwrap().path();
            if case.is_dir() {
                let name = case.strip_prefix(golden()).unwrap();
                cases.insert(name.to_str().unwrap().to_owned());
            }
        }
    }
    let loads = LOADS.iter().map(|(case, ..)| case.to_string());
    let carries = CARRIES.iter().map(|(case, ..)| case.to_string());
    let refused = REFUSED.iter().map(|(case, _)| case.to_string());
    assert_eq!(cases, loads.chain(carries).chain(refused).collect());
}

#[test]
fn cases_in_scope_load_with_their_ranks_and_scalings() {
    for (case, rank, scaling) in LOADS {
        let adapter = open(case).unwrap_or_else(|error| panic!("{case}: {error}"));
        for (site, pair) in adapter.pairs() {
            let exception = EXCEPTIONS
                .iter()
                .find(|(other, layer, module, ..)| *other == case && site == Site::layer(*layer, *module));
            let (rank, scaling) = exception.map_or((rank, scaling), |(.., rank, scaling)| (*rank, *scaling));
            assert_eq!((pair.rank(), pair.scaling()), (rank, scaling), "{case} {site}");
        }
    }
}

#[test]
fn cases_out_of_scope_are_refused_by_name() {
    for (case, expected) in REFUSED {
        let error = open(case).expect_err(case);
        let found: Option<BTreeSet<Feature>> = error.reasons().map(feature).collect();
        assert_eq!(found, Some(expected.iter().copied().collect()), "{case}: {error}");
        assert_eq!(error.to_string().lines().count(), 1 + error.reasons().count(), "{case}: one line a reason");
    }
}

#[test]
fn loaded_pairs_are_the_tensors_of_the_file() {
    for (case, ..) in LOADS {
        let adapter = open(case).unwrap();
        let bytes = std::fs::read(golden().join(case).join("adapter_model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let halves: Vec<_> =
            file.iter().filter(|(name, _)| name.contains("lora_A") || name.contains("lora_B")).collect();
        assert_eq!(halves.len(), 2 * adapter.pairs().len(), "{case}");
        for (site, pair) in adapter.pairs() {
            for (half, matrix) in [("A", pair.a()), ("B", pair.b())] {
                let block = if matches!(site.module(), Module::GateProj | Module::UpProj | Module::DownProj) {
                    "mlp"
                } else {
                    "self_attn"
                };
                let layer = site.layer_index().unwrap();
                let name =
                    format!("base_model.model.model.layers.{layer}.{block}.{}.lora_{half}.weight", site.module());
                let tensor = file.tensor(&name).unwrap();
                assert_eq!(matrix.tensor(), name);
                assert_eq!(matrix.bytes(), tensor.data(), "{case} {name}");
                assert_eq!([matrix.rows(), matrix.cols()], tensor.shape());
            }
        }
    }
}

/// Bytes of a file's tensors, sorted.
fn sorted<T: AsRef<[u8]>>(tensors: impl Iterator<Item = T>) -> Vec<Vec<u8>> {
    let mut tensors: Vec<Vec<u8>> = tensors.map(|tensor| tensor.as_ref().to_vec()).collect();
    tensors.sort();
    tensors
}

/// What stands beside the pairs is what the file holds: as many of each kind, and the bytes of all tensors.
#[test]
fn nothing_beside_the_pairs_is_lost() {
    for (case, num_pairs, kinds) in CARRIES {
        let adapter = open(case).unwrap_or_else(|error| panic!("{case}: {error}"));
        assert_eq!(adapter.pairs().len(), num_pairs, "{case}");
        let mut found: BTreeMap<&str, usize> = BTreeMap::new();
        adapter.extras().for_each(|(extra, _)| *found.entry(extra.describe()).or_default() += 1);
        assert_eq!(found, kinds.iter().copied().collect(), "{case}");
        if case == "llama/bdlora" {
            continue;
        }
        let bytes = std::fs::read(golden().join(case).join("adapter_model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let halves = adapter.pairs().flat_map(|(_, pair)| [pair.a().bytes(), pair.b().bytes()]);
        let held = sorted(halves.chain(adapter.extras().map(|(_, matrix)| matrix.bytes())));
        assert!(held == sorted(file.iter().map(|(_, tensor)| tensor.data())), "{case}");
    }
}

#[test]
fn the_config_of_what_stands_beside_the_pairs_is_kept() {
    let settings = |case| open(case).unwrap().settings().clone();
    assert_eq!(settings("llama/alora").invocation_tokens, [40, 41]);
    assert_eq!(settings("llama/layer_replication").layer_replication, [(0, 2), (1, 2)]);
    for (case, init) in [
        ("llama/init_pissa", BaseInit::Pissa),
        ("llama/init_olora", BaseInit::Olora),
        ("llama/kasa", BaseInit::Kasa),
        ("llama/dora", BaseInit::Kept),
    ] {
        assert_eq!(settings(case).base_init, init, "{case}");
    }
    let tokens = |case| settings(case).token_ids;
    let (embed, head) = (Module::EmbedTokens, Module::LmHead);
    assert_eq!(tokens("llama/tti_list"), BTreeMap::from([(embed, vec![5, 9, 77])]));
    assert_eq!(tokens("llama/tti_dict"), BTreeMap::from([(embed, vec![3, 8]), (head, vec![11, 4, 90])]));
    assert_eq!(tokens("llama_tied/tti_dict_same"), BTreeMap::from([(embed, vec![3, 8])]));
    assert_eq!(tokens("llama_tied/tti_dict_diff"), BTreeMap::from([(embed, vec![3, 8]), (head, vec![11, 4])]));
}

/// Half of each pair is stored as two blocks below each other; they stand on the diagonal here, zeros elsewhere.
#[test]
fn blocks_stand_on_their_diagonal() {
    let adapter = open("llama/bdlora").unwrap();
    let bytes = std::fs::read(golden().join("llama/bdlora/adapter_model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for (site, pair) in adapter.pairs() {
        let is_a = site.module() == Module::OProj;
        let half = if is_a { pair.a() } else { pair.b() };
        let stored = file.tensor(half.tensor()).unwrap();
        let [rows, cols] = stored.shape() else { panic!("{site}") };
        let (rows, cols) = (*rows, *cols);
        assert_eq!([half.rows(), half.cols()], [rows, 2 * cols], "{site}");
        let stored: Vec<f32> = stored.data().as_chunks().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect();
        let dense = half.to_f32();
        for row in 0..rows {
            for col in 0..2 * cols {
                let block = usize::from(row >= rows / 2);
                let inside = col / cols == block;
                let expected = if inside { stored[row * cols + col % cols] } else { 0.0 };
                assert_eq!(dense[row * 2 * cols + col], expected, "{site} {row} {col}");
            }
        }
    }
}

#[test]
fn training_only_tensors_are_noted() {
    for (case, method, num_tensors) in [("llama/velora", "VeLoRA", 8), ("llama/monteclora", "MonteCLoRA", 32)] {
        let notes = open(case).unwrap().notes().to_vec();
        assert_eq!(notes, [lora_adapter::Note::TrainingOnlyTensors { method, num_tensors }], "{case}");
    }
}

#[test]
fn no_other_loading_case_has_notes() {
    for (case, ..) in LOADS.iter().filter(|(case, ..)| !case.contains("lora") || case.contains("rslora")) {
        assert_eq!(open(case).unwrap().notes(), [], "{case}");
    }
}

fn llama_shape() -> ModelShape {
    let layer = LayerShape::new()
        .with_attention(AttentionSize { hidden_size: 64, q_features: 64, kv_features: 32, o_features: 64 })
        .with_mlp(MlpSize { hidden_size: 64, intermediate_size: 96 });
    ModelShape::uniform(64, 128, 2, layer).unwrap()
}

#[test]
fn llama_cases_fit_their_model_and_no_other() {
    for (case, ..) in LOADS.iter().filter(|(case, ..)| case.starts_with("llama/")) {
        let prepared = prepare(open(case).unwrap(), &llama_shape());
        assert!(prepared.is_ok(), "{case}: {}", prepared.unwrap_err());
    }
    assert!(prepare(open("qwen3/all_linear").unwrap(), &llama_shape()).is_err());
}

#[test]
fn digests_tell_the_cases_apart() {
    let names: BTreeSet<_> = LOADS.iter().map(|(case, ..)| case).collect();
    let digests: BTreeSet<_> = names.iter().map(|case| open(case).unwrap().content()).collect();
    assert_eq!(digests.len(), names.len());
}
