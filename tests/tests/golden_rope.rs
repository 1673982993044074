//! Rotary scaling, biases, bf16 and sharded files: base logits of transformers on tiny models made for each feature.

use std::path::PathBuf;

use conformance::engines::{back_ends, load_model, small_options};
use conformance::golden::{DENSE_BOUND, TensorFile, golden_dir, largest, largest_difference, sorted_names};
use lora_math::AdapterSelection;
use model_engine::Engine;
use model_engine::score::{ScoreRequest, score};

fn case_dir(case: &str) -> PathBuf {
    golden_dir().join("rope").join(case)
}

fn engine(case: &str) -> Engine {
    let [_, (_, kernels)] = back_ends();
    Engine::new(load_model(&case_dir(case)), None, &small_options(2, kernels)).expect("an engine")
}

/// The largest difference over the sequences of one golden batch, the last `num_decoded` tokens by decode steps.
fn difference(engine: &mut Engine, file: &TensorFile, prefix: &str, num_decoded: usize) -> f32 {
    let tokens = file.token_rows(&format!("{prefix}input_ids"));
    let expected = file.logits(&format!("{prefix}logits"));
    let request = |ids: &Vec<u32>| {
        let (prompt, decode) = ids.split_at(ids.len() - num_decoded);
        let (token_ids, decode) = (prompt.to_vec(), decode.to_vec());
        ScoreRequest { selection: AdapterSelection::Base, token_ids, decode }
    };
    let requests: Vec<ScoreRequest> = tokens.iter().map(request).collect();
    let found = score(engine, &requests).expect("logits");
    let differences = found.iter().enumerate().map(|(row, found)| largest_difference(found, expected.sequence(row)));
    largest(differences)
}

#[test]
fn every_feature_gives_the_logits_of_transformers() {
    let cases = sorted_names(&golden_dir().join("rope"), |path| path.is_dir());
    let expected = [
        "bias_bf16",
        "dynamic",
        "head_dim_sharded",
        "linear",
        "llama3",
        "llama3_v4_config",
        "qwen2_window_off",
        "yarn",
        "yarn_options",
    ];
    assert!(cases.iter().map(String::as_str).eq(expected), "{cases:?}");
    for case in &cases {
        let file = TensorFile::open(&case_dir(case).join("golden.safetensors"));
        let mut engine = engine(case);
        // Under dynamic scaling the golden logits are those of one forward for each length.
        let num_decoded: &[usize] = if case == "dynamic" { &[0] } else { &[0, 12] };
        for num_decoded in num_decoded {
            let found = difference(&mut engine, &file, "", *num_decoded);
            assert!(found <= DENSE_BOUND, "{case}: logits differ by {found:e}, {num_decoded} decode steps");
        }
    }
}

#[test]
fn dynamic_scaling_takes_the_length_of_the_prompt() {
    let file = TensorFile::open(&case_dir("dynamic").join("golden.safetensors"));
    let mut engine = engine("dynamic");
    for (prefix, num_decoded) in [("length6.", 0), ("length6.", 3), ("length12.", 0)] {
        let found = difference(&mut engine, &file, prefix, num_decoded);
        assert!(found <= DENSE_BOUND, "{prefix}: logits differ by {found:e}");
    }
    // Cut into steps the prompt's rotations are still those of its whole length.
    let tokens = &file.token_rows("input_ids")[0];
    let cut = |max_step_rows: usize| {
        let [_, (_, kernels)] = back_ends();
        let options = model_engine::EngineOptions { max_step_rows, ..small_options(1, kernels) };
        let mut engine = Engine::new(load_model(&case_dir("dynamic")), None, &options).expect("an engine");
        let request = ScoreRequest { token_ids: tokens.clone(), ..ScoreRequest::default() };
        score(&mut engine, &[request]).expect("logits")
    };
    assert_eq!(cut(24), cut(5));
}
