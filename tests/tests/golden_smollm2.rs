//! SmolLM2-135M-Instruct against transformers on the same GGUF, plain and under the demo adapters.
//!
//! The model is fetched by `cargo xtask demo`; without it these tests say that they were skipped.

use std::path::{Path, PathBuf};

use conformance::engines::{back_ends, named, open_pool};
use conformance::golden::{TensorFile, golden_dir, largest, largest_difference, repository_dir, sorted_names};
use lora_adapter::{Adapter, PreparedAdapter};
use lora_math::AdapterSelection;
use model_engine::checkpoint::{Checkpoint, LoadOptions, WeightDtype};
use model_engine::generate::{Generator, Request};
use model_engine::score::{ScoreRequest, score};
use model_engine::{Engine, EngineOptions, TransformerModel};

/// Largest difference of a logit.
const BOUND: f32 = 1e-3;

/// The model, or none with a word on why the test does nothing.
fn model_path() -> Option<PathBuf> {
    let path = repository_dir().join("target/demo/models/SmolLM2-135M-Instruct.Q4_1.gguf");
    if !path.is_file() {
        println!("skipped: {} is not there; `cargo xtask demo` fetches it", path.display());
        return None;
    }
    Some(path)
}

fn open(path: &Path, weight_dtype: WeightDtype) -> Checkpoint {
    Checkpoint::open(path, LoadOptions { weight_dtype: Some(weight_dtype), ..LoadOptions::default() }).expect("a model")
}

/// Every demo adapter; each has golden logits.
fn demo_adapters(model: &TransformerModel) -> Vec<(String, PreparedAdapter)> {
    let directory = repository_dir().join("demo/adapters");
    let names = sorted_names(&directory, |path| path.join("adapter_config.json").is_file());
    let prepare = |name: String| {
        let adapter = Adapter::open(&directory.join(&name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        let prepared = lora_adapter::prepare(adapter, model.shape()).unwrap_or_else(|error| panic!("{name}: {error}"));
        (name, prepared)
    };
    assert!(names.len() >= 3, "{names:?}");
    names.into_iter().map(prepare).collect()
}

/// The two golden prompts of a file: their tokens, the vocabulary entries kept, and the logits there.
fn prompts(name: &str) -> Vec<(Vec<u32>, Vec<u32>, Vec<f32>)> {
    let file = TensorFile::open(&golden_dir().join("smollm2").join(format!("{name}.safetensors")));
    let ids = |name: String| file.token_rows(&name).concat();
    let prompt = |at: usize| {
        let (tokens, kept) = (ids(format!("prompt{at}.input_ids")), ids(format!("prompt{at}.vocab_ids")));
        (tokens, kept, file.floats(&format!("prompt{at}.logits")).1)
    };
    (0..2).map(prompt).collect()
}

/// Runs the golden prompts of every file in one mixed batch, and gives the largest difference of each file.
fn differences(engine: &mut Engine, files: &[(String, AdapterSelection)], by_decode: bool) -> Vec<f32> {
    let goldens: Vec<_> = files.iter().map(|(name, _)| prompts(name)).collect();
    let requests: Vec<ScoreRequest> = files
        .iter()
        .zip(&goldens)
        .flat_map(|((_, selection), prompts)| prompts.iter().map(move |(tokens, ..)| (selection.clone(), tokens)))
        .map(|(selection, tokens)| {
            let split = if by_decode { tokens.len() - 5 } else { tokens.len() };
            let (token_ids, decode) = tokens.split_at(split);
            ScoreRequest { selection, token_ids: token_ids.to_vec(), decode: decode.to_vec() }
        })
        .collect();
    let logits = score(engine, &requests).expect("logits");
    let difference = |(_, kept, expected): &(Vec<u32>, Vec<u32>, Vec<f32>), found: &Vec<Vec<f32>>| {
        let found: Vec<Vec<f32>> = found.iter().map(|row| kept.iter().map(|id| row[*id as usize]).collect()).collect();
        largest_difference(&found, expected)
    };
    assert_eq!(logits.len(), 2 * goldens.len());
    goldens
        .iter()
        .zip(logits.chunks_exact(2))
        .map(|(prompts, found)| largest(prompts.iter().zip(found).map(|(prompt, found)| difference(prompt, found))))
        .collect()
}

fn options() -> EngineOptions {
    let [_, (_, kernels)] = back_ends();
    EngineOptions { kernels, ..EngineOptions::default() }
}

#[test]
fn base_and_demo_adapters_in_one_batch_at_f32() {
    let Some(path) = model_path() else { return };
    let checkpoint = open(&path, WeightDtype::F32);
    let model = TransformerModel::new(checkpoint.config, checkpoint.weights).expect("a model");
    let adapters = demo_adapters(&model);
    let mut files = vec![("base_f32".to_owned(), AdapterSelection::Base)];
    files.extend(adapters.iter().map(|(name, _)| (format!("{name}_f32"), named(name))));
    let pool = open_pool(model.shape(), &adapters);
    let mut engine = Engine::new(model, Some(pool), &options()).expect("an engine");
    for by_decode in [false, true] {
        let found = differences(&mut engine, &files, by_decode);
        println!("largest differences by file {files:?}: {found:?}");
        assert!(found.iter().all(|found| *found <= BOUND), "{files:?}: {found:?}, decode steps: {by_decode}");
    }
}

#[test]
fn base_at_bf16() {
    let Some(path) = model_path() else { return };
    let checkpoint = open(&path, WeightDtype::Bf16);
    let tokenizer = checkpoint.tokenizer.expect("a tokenizer");
    let model = TransformerModel::new(checkpoint.config, checkpoint.weights).expect("a model");
    let mut engine = Engine::new(model, None, &options()).expect("an engine");
    let files = [("base_bf16".to_owned(), AdapterSelection::Base)];
    let found = differences(&mut engine, &files, false);
    assert!(found[0] <= BOUND, "logits differ by {}", found[0]);

    // Text as it streams is the text of the tokens.
    let prompt = prompts("base_bf16")[0].0.clone();
    let request = Request { prompt, max_new_tokens: 12, ..Request::default() };
    let mut streamed = String::new();
    let report = Generator::new(&mut engine, Some(&tokenizer))
        .run(&[request], |event| streamed.push_str(event.text))
        .expect("an answer");
    let completion = &report.completions[0];
    assert_eq!(streamed, completion.text);
    assert_eq!(tokenizer.decode(&completion.token_ids, true).expect("text"), completion.text);
    assert!(!completion.text.is_empty());
}
