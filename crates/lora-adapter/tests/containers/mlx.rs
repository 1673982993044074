//! Directories of mlx-lm: canonical pairs from transposed tensors, and what is refused by name.

use lora_adapter::{Adapter, Feature, Reason};
use lora_math::{Module, Site};
use safetensors::SafeTensors;
use tempfile::TempDir;

use crate::support::{directory, golden, reason};

const CONFIG: &str = r#"{"fine_tune_type": "lora", "lora_parameters": {"rank": 4, "scale": 2.5}}"#;

fn weights() -> Vec<u8> {
    std::fs::read(golden("mlx/llama/keys_1layer/adapters.safetensors")).unwrap()
}

fn with_config(config: &str) -> TempDir {
    directory(&[("adapter_config.json", config.as_bytes()), ("adapters.safetensors", &weights())])
}

#[test]
fn pairs_are_the_transposes_of_the_tensors() {
    for (case, num_pairs) in [("default", 14), ("keys_1layer", 2)] {
        let path = golden("mlx/llama").join(case);
        let adapter = Adapter::open(&path).unwrap_or_else(|error| panic!("{case}: {error}"));
        assert_eq!(adapter.pairs().len(), num_pairs, "{case}");
        assert_eq!(adapter.notes(), [], "{case}");
        assert_eq!(adapter.origin().producer, Some("mlx-lm"));
        let bytes = std::fs::read(path.join("adapters.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        for (site, pair) in adapter.pairs() {
            assert_eq!((pair.scaling(), pair.rank()), (2.5, 4), "{case} {site}");
            for (matrix, suffix) in [(pair.a(), ".lora_a"), (pair.b(), ".lora_b")] {
                assert!(matrix.tensor().ends_with(suffix), "{}", matrix.tensor());
                let tensor = file.tensor(matrix.tensor()).unwrap();
                assert_eq!(tensor.shape(), [matrix.cols(), matrix.rows()]);
                let stored = tensor.data().as_chunks::<4>().0;
                for (index, value) in matrix.bytes().as_chunks::<4>().0.iter().enumerate() {
                    let (row, col) = (index / matrix.cols(), index % matrix.cols());
                    assert_eq!(value, &stored[col * matrix.rows() + row], "{case} {site} [{row}, {col}]");
                }
            }
        }
    }
    let adapter = Adapter::open(&golden("mlx/llama/keys_1layer")).unwrap();
    let sites: Vec<Site> = adapter.pairs().map(|(site, _)| site).collect();
    assert_eq!(sites, [Site::layer(1, Module::QProj), Site::layer(1, Module::VProj)]);
}

/// Whatever the rank, and exact: 0.1 times 3 over 3 would not be.
#[test]
fn scale_is_used_as_it_stands() {
    for (scale, scaling) in [("20.0", 20.0), ("0.1", 0.1), ("-3", -3.0), ("0", 0.0)] {
        let adapter = Adapter::open(with_config(&CONFIG.replace("2.5", scale)).path()).unwrap();
        assert!(adapter.pairs().all(|(_, pair)| pair.scaling() == scaling), "{scale}");
    }
    let older = CONFIG.replace("\"fine_tune_type\": \"lora\", ", "");
    assert!(Adapter::open(with_config(&older).path()).is_ok());
}

#[test]
fn configs_that_say_something_else_are_refused() {
    let found = |from: &str, to: &str| reason(Adapter::open(with_config(&CONFIG.replace(from, to)).path()));
    let unsupported = |found: Reason, expected| matches!(found, Reason::UnsupportedField { field: "fine_tune_type", feature, .. } if feature == expected);
    let dora = Adapter::open(with_config(&CONFIG.replace("\"lora\"", "\"dora\"")).path()).unwrap_err();
    assert!(
        dora.to_string().contains("field `fine_tune_type` is switched on, and 2 magnitude vectors are missing"),
        "{dora}"
    );
    assert!(unsupported(found("\"lora\"", "\"full\""), Feature::ReplacedModule));
    let bad = |found: Reason, expected: &str| matches!(found, Reason::BadField { field, .. } if field == expected);
    assert!(bad(found("\"lora\"", "5"), "fine_tune_type"));
    assert!(bad(found("\"scale\": 2.5", "\"scale\": \"2.5\""), "lora_parameters.scale"));
    assert!(bad(found("\"rank\": 4", "\"rank\": 0"), "lora_parameters.rank"));
    assert!(bad(found("\"rank\": 4", "\"alpha\": 16, \"rank\": 4"), "lora_parameters.alpha"));
    assert!(bad(found("{\"rank\": 4, \"scale\": 2.5}", "[]"), "lora_parameters"));
    for (field, text) in [("rank", "\"rank\": 4, "), ("scale", ", \"scale\": 2.5")] {
        let found = found(text, "");
        assert!(matches!(found, Reason::MissingField { field: name, .. } if name.ends_with(field)), "{found}");
    }
    let missing = found(", \"lora_parameters\": {\"rank\": 4, \"scale\": 2.5}", "");
    assert!(matches!(missing, Reason::MissingField { field: "lora_parameters", .. }), "{missing}");
}

#[test]
fn another_rank_than_the_config_says_is_refused() {
    let error = Adapter::open(with_config(&CONFIG.replace("\"rank\": 4", "\"rank\": 8")).path()).unwrap_err();
    let disagrees = |reason: &Reason| {
        matches!(reason, Reason::RankDisagrees { found: 4, expected: 8, source_field, .. }
            if source_field == "lora_parameters.rank")
    };
    assert!(error.reasons().all(disagrees) && error.reasons().count() == 2, "{error}");
}

#[test]
fn files_of_one_tool_beside_the_config_of_another_are_refused() {
    let no_weights =
        directory(&[("adapter_config.json", CONFIG.as_bytes()), ("adapter_model.safetensors", &weights())]);
    assert_eq!(reason(Adapter::open(no_weights.path())), Reason::MissingFile);
    let peft = with_config(crate::support::CONFIG);
    assert_eq!(reason(Adapter::open(peft.path())), Reason::UnsupportedFormat { feature: Feature::Mlx });
}

#[test]
fn dora_carries_its_magnitudes() {
    let adapter = Adapter::open(&golden("mlx/llama/dora")).unwrap();
    for (site, pair) in adapter.pairs() {
        let magnitude = adapter.extra(lora_adapter::Extra::Magnitude(site)).unwrap();
        assert_eq!([magnitude.rows(), magnitude.cols()], [1, pair.out_features()], "{site}");
    }
    assert_eq!(adapter.extras().len(), adapter.pairs().len());
}

/// mlx-lm computes the logits of a tied model with the adapted embedding, PEFT with the base's.
#[test]
fn a_pair_of_the_embedding_serves_a_tied_head() {
    for (case, serves) in
        [("mlx/llama/embed", true), ("mlx/llama/default", false), ("adapters/llama/embed_lora", false)]
    {
        let adapter = Adapter::open(&golden(case)).unwrap();
        assert_eq!(adapter.settings().embedding_serves_head, serves, "{case}");
        assert_eq!(adapter.report().to_string().contains("acts on the head too"), serves, "{case}");
    }
}

#[test]
fn checkpoints_of_the_run_do_not_matter() {
    let good = with_config(CONFIG);
    let plain = Adapter::open(good.path()).unwrap();
    std::fs::write(good.path().join("0000100_adapters.safetensors"), b"not read").unwrap();
    assert_eq!(Adapter::open(good.path()).unwrap(), plain);
}
