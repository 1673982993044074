//! SmolLM2-135M-Instruct from its GGUF file: configuration, tokenizer and chat template against transformers'.
//!
//! The model is not in the tree. `cargo xtask demo` fetches it to `target/demo/models/`; without it each test says so
//! and checks nothing.

use std::fs;
use std::path::{Path, PathBuf};

use model_engine::checkpoint::gguf::GgufFile;
use model_engine::checkpoint::{Checkpoint, CheckpointInfo, LoadOptions};
use model_engine::tokenizer::{ChatMessage, Tokenizer};
use serde::Deserialize;

const FILE: &str = "target/demo/models/SmolLM2-135M-Instruct.Q4_1.gguf";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn model() -> Option<PathBuf> {
    let path = root().join(FILE);
    if !path.is_file() {
        println!("skipped: {FILE} is absent; `cargo xtask demo` fetches it");
        return None;
    }
    Some(path)
}

fn tokenizer(path: &Path) -> Tokenizer {
    let bytes = fs::read(path).unwrap();
    Tokenizer::from_gguf(&GgufFile::parse(&bytes).unwrap()).unwrap()
}

fn cases<T: for<'a> Deserialize<'a>>(name: &str) -> Vec<T> {
    let path = root().join("tests/golden/smollm2").join(name);
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

#[derive(Deserialize)]
struct TokenizerCase {
    text: String,
    ids: Vec<u32>,
}

#[derive(Deserialize)]
struct ChatCase {
    messages: Vec<ChatMessage>,
    text: String,
    ids: Vec<u32>,
}

#[test]
fn tokens_match_transformers_and_stream_back_to_the_text() {
    let Some(path) = model() else { return };
    let tokenizer = tokenizer(&path);
    let cases: Vec<TokenizerCase> = cases("tokenizer_cases.json");
    let mut num_whole = 0;
    for case in cases {
        assert_eq!(tokenizer.encode(&case.text, true).unwrap(), case.ids, "{:?}", case.text);
        let decoded = tokenizer.decode(&case.ids, false).unwrap();
        // The vocabulary lacks some bytes; a text that has them cannot come back whole.
        let is_whole = !decoded.contains(char::REPLACEMENT_CHARACTER);
        assert!(!is_whole || decoded == case.text, "{decoded:?} {:?}", case.text);
        num_whole += usize::from(is_whole);
        let mut stream = tokenizer.stream(false);
        let mut pieces = Vec::new();
        for &id in &case.ids {
            pieces.extend(stream.push(id).unwrap());
        }
        let held_back = pieces.iter().all(|piece: &String| !piece.contains(char::REPLACEMENT_CHARACTER));
        assert!(!is_whole || held_back, "{pieces:?}");
        pieces.extend(stream.finish().unwrap());
        assert_eq!(pieces.concat(), decoded);
    }
    assert!(num_whole > 20, "{num_whole}");
}

#[test]
fn an_unfinished_character_is_held_back_and_shown_at_the_end() {
    let Some(path) = model() else { return };
    let tokenizer = tokenizer(&path);
    // One emoji is several byte tokens.
    let ids = tokenizer.encode("\u{1fae0}", false).unwrap();
    assert!(ids.len() > 1, "{ids:?}");
    let mut stream = tokenizer.stream(false);
    for &id in &ids[..ids.len() - 1] {
        assert_eq!(stream.push(id).unwrap(), None);
    }
    assert!(stream.finish().unwrap().unwrap().contains(char::REPLACEMENT_CHARACTER));
}

#[test]
fn chats_match_transformers() {
    let Some(path) = model() else { return };
    let tokenizer = tokenizer(&path);
    let template = tokenizer.chat_template().unwrap();
    for case in cases::<ChatCase>("chat_cases.json") {
        let text = template.render(&case.messages, true).unwrap();
        assert_eq!(text, case.text);
        assert_eq!(tokenizer.encode(&text, false).unwrap(), case.ids);
    }
}

#[test]
fn the_model_loads_with_its_configuration() {
    let Some(path) = model() else { return };
    let info = CheckpointInfo::open(&path).unwrap();
    let config = &info.config;
    assert_eq!((config.num_layers(), config.hidden_size, config.vocab_size), (30, 576, 49152));
    assert_eq!((config.num_heads, config.num_kv_heads, config.head_dim), (9, 3, 64));
    assert_eq!((config.rope.theta, config.tie_word_embeddings), (100_000.0, true));
    assert_eq!((config.bos_token_id, &config.eos_token_ids[..]), (Some(1), &[2][..]));
    let checkpoint = Checkpoint::open(&path, LoadOptions::default()).unwrap();
    assert_eq!(checkpoint.config, info.config);
    assert_eq!(checkpoint.weights.layers[29].down.weight.in_features(), 1536);
    assert!(checkpoint.tokenizer.is_ok());
}
