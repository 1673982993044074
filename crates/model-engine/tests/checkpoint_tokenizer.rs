//! Tokenizers from GGUF metadata and from `tokenizer.json` against the Python `tokenizers` package
//! (`golden/tokenizer/make.py` makes both), and what is refused.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use model_engine::checkpoint::gguf::GgufFile;
use model_engine::tokenizer::{ChatMessage, Tokenizer, TokenizerError};
use serde::Deserialize;

#[derive(Deserialize)]
struct Case {
    text: String,
    ids: Vec<u32>,
    decoded: String,
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/tokenizer")
}

fn cases() -> BTreeMap<String, Vec<Case>> {
    serde_json::from_str(&fs::read_to_string(golden().join("cases.json")).unwrap()).unwrap()
}

fn gguf_bytes(name: &str) -> Vec<u8> {
    fs::read(golden().join(name).with_extension("gguf")).unwrap()
}

fn from_gguf(bytes: &[u8]) -> Result<Tokenizer, TokenizerError> {
    Tokenizer::from_gguf(&GgufFile::parse(bytes).unwrap())
}

fn check(tokenizer: &Tokenizer, name: &str, cases: &[Case]) {
    for case in cases {
        assert_eq!(tokenizer.encode(&case.text, true).unwrap(), case.ids, "{name} {:?}", case.text);
        assert_eq!(tokenizer.decode(&case.ids, true).unwrap(), case.decoded, "{name}");
    }
}

#[test]
fn every_pre_tokenizer_gives_the_ids_of_python() {
    let cases = cases();
    assert_eq!(cases.keys().collect::<Vec<_>>(), ["gpt-2", "llama-bpe", "qwen2", "smollm"]);
    for (name, cases) in &cases {
        let tokenizer = from_gguf(&gguf_bytes(name)).unwrap();
        check(&tokenizer, name, cases);
        assert_eq!(tokenizer.token_to_id("<|im_end|>"), Some(2));
        assert_eq!(tokenizer.id_to_token(2).as_deref(), Some("<|im_end|>"));
    }
}

#[test]
fn a_hugging_face_directory_gives_tokenizer_and_template() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(directory.path().join(name), text).unwrap();
    assert!(matches!(Tokenizer::from_hf_dir(directory.path()), Err(TokenizerError::Absent { .. })));

    fs::copy(golden().join("tokenizer.json"), directory.path().join("tokenizer.json")).unwrap();
    let tokenizer = Tokenizer::from_hf_dir(directory.path()).unwrap();
    check(&tokenizer, "tokenizer.json", &cases()["qwen2"]);
    assert!(tokenizer.chat_template().is_none());

    let render = || {
        let tokenizer = Tokenizer::from_hf_dir(directory.path()).unwrap();
        tokenizer.chat_template().unwrap().render(&[ChatMessage::new("user", "hi")], false).unwrap()
    };
    write(
        "tokenizer_config.json",
        r#"{"bos_token": {"content": "<b>"}, "eos_token": "<e>",
        "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"}"#,
    );
    assert_eq!(render(), "<b>hi<e>");
    write(
        "tokenizer_config.json",
        r#"{"chat_template": [{"name": "tool_use", "template": "no"},
        {"name": "default", "template": "{{ messages[0].role }}"}]}"#,
    );
    assert_eq!(render(), "user");
    write("chat_template.jinja", "own file");
    assert_eq!(render(), "own file");
    write("tokenizer_config.json", "{");
    assert!(matches!(Tokenizer::from_hf_dir(directory.path()), Err(TokenizerError::Json { .. })));
}

#[test]
fn unknown_kinds_are_refused_by_name() {
    // Replacements of equal length keep the file well formed.
    let replaced = |from: &str, to: &str| {
        let mut bytes = gguf_bytes("qwen2");
        assert_eq!(from.len(), to.len());
        let place = bytes.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
        bytes[place..place + to.len()].copy_from_slice(to.as_bytes());
        from_gguf(&bytes).unwrap_err().to_string()
    };
    assert!(replaced("gpt2", "rwkv").contains(r#"tokenizer.ggml.model "rwkv" (supported: gpt2)"#));
    let message = replaced("qwen2", "other");
    assert!(message.contains(r#"tokenizer.ggml.pre "other""#) && message.contains("token ids"), "{message}");
    assert!(replaced("tokenizer.ggml.merges", "tokenizer.ggml.nerges").contains("tokenizer.ggml.merges is absent"));
}
