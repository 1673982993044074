//! Every golden adapter of the dense models: it loads with the ranks and scalings that its config and the format's rules
//! give, or is refused for the one reason that the table names. What the loaded ones compute is tested with the engine.

use std::collections::BTreeSet;
use std::path::PathBuf;

use lora_adapter::{Adapter, Feature, LoadError, Reason, prepare};
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

/// Cases that are refused, and every kind of reason that they give.
const REFUSED: [(&str, &[Feature]); 34] = [
    ("llama/alora", &[Feature::InvocationTokens]),
    ("llama/bdlora", &[Feature::BlockDiagonal]),
    ("llama/dora", &[Feature::Dora]),
    ("llama/dora_emb", &[Feature::Dora, Feature::EmbeddingLora, Feature::BaseWeightCopy]),
    ("llama/embed_head_lora", &[Feature::EmbeddingLora, Feature::HeadLora, Feature::BaseWeightCopy]),
    ("llama/embed_lora", &[Feature::EmbeddingLora, Feature::BaseWeightCopy]),
    ("llama/head_lora", &[Feature::HeadLora, Feature::BaseWeightCopy]),
    ("llama/init_olora", &[Feature::AlteringInit]),
    ("llama/init_pissa", &[Feature::AlteringInit]),
    ("llama/init_pissa_niter_4", &[Feature::AlteringInit]),
    ("llama/kasa", &[Feature::Kasa]),
    ("llama/layer_replication", &[Feature::LayerReplication]),
    ("llama/lora_bias", &[Feature::LoraBias]),
    ("llama/mts_embed_head", &[Feature::ReplacedModule]),
    ("llama/mts_norm", &[Feature::ReplacedModule]),
    ("llama/resized_vocab", &[Feature::ReplacedModule]),
    ("llama/tti_dict", &[Feature::TrainableTokens]),
    ("llama/tti_list", &[Feature::TrainableTokens]),
    ("llama_bias/bias_all", &[Feature::TrainedBias]),
    ("llama_bias/bias_lora_only", &[Feature::TrainedBias]),
    ("llama_bias/dora", &[Feature::Dora]),
    ("llama_bias/lora_bias", &[Feature::LoraBias]),
    ("llama_tied/embed_lora", &[Feature::EmbeddingLora, Feature::BaseWeightCopy]),
    ("llama_tied/embed_lora_tied", &[Feature::EmbeddingLora, Feature::HeadLora, Feature::BaseWeightCopy]),
    ("llama_tied/head_lora", &[Feature::HeadLora, Feature::BaseWeightCopy]),
    ("llama_tied/mts_embed", &[Feature::ReplacedModule]),
    ("llama_tied/mts_embed_head", &[Feature::ReplacedModule]),
    ("llama_tied/mts_embed_tied", &[Feature::ReplacedModule]),
    ("llama_tied/mts_head", &[Feature::ReplacedModule]),
    ("llama_tied/tti_dict_diff", &[Feature::TrainableTokens]),
    ("llama_tied/tti_dict_same", &[Feature::TrainableTokens]),
    ("llama_tied/tti_list", &[Feature::TrainableTokens]),
    ("qwen2/bias_lora_only", &[Feature::TrainedBias]),
    ("qwen3/norms_mts", &[Feature::ReplacedModule]),
];

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
    let refused = REFUSED.iter().map(|(case, _)| case.to_string());
    assert_eq!(cases, loads.chain(refused).collect());
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
        // Packed blocks make B narrower than A is high, which is said too.
        let packed = |reason: &&Reason| case.ends_with("bdlora") && matches!(reason, Reason::PairMismatch { .. });
        let reasons = error.reasons().filter(|reason| !packed(reason));
        let found: Option<BTreeSet<Feature>> = reasons.map(feature).collect();
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
