//! Metadata to configuration: what is refused, and where scaling comes from.

use std::path::Path;

use super::super::super::config::{Architecture, ModelConfig, RopeScaling};
use super::super::super::error::CheckpointError;
use super::super::GgufFile;
use super::parse;

enum Meta {
    U32(u32),
    F32(f32),
    Text(&'static str),
}

use Meta::{F32, Text, U32};

type Changes = Vec<(&'static str, Meta)>;

/// A file of `architecture` with the usual keys, `changes` in place of or beside them, and the F32 vectors `tensors`.
fn read(
    architecture: &'static str,
    changes: Changes,
    tensors: &[(&str, &[f32])],
) -> Result<ModelConfig, CheckpointError> {
    let usual = [
        ("embedding_length", U32(64)),
        ("block_count", U32(2)),
        ("feed_forward_length", U32(96)),
        ("attention.head_count", U32(4)),
        ("attention.head_count_kv", U32(2)),
        ("attention.layer_norm_rms_epsilon", F32(1e-5)),
        ("context_length", U32(256)),
        ("vocab_size", U32(128)),
    ];
    let mut keys = vec![("general.architecture".to_owned(), Text(architecture))];
    let is_changed = |name: &str| changes.iter().any(|(changed, _)| *changed == name);
    keys.extend(
        usual
            .into_iter()
            .filter(|(name, _)| !is_changed(name))
            .map(|(name, value)| (format!("{architecture}.{name}"), value)),
    );
    for (name, value) in changes {
        let full = if name.starts_with("general.") || name.starts_with("split.") || name.starts_with("tokenizer.") {
            name.to_owned()
        } else {
            format!("{architecture}.{name}")
        };
        keys.retain(|(known, _)| *known != full);
        keys.push((full, value));
    }
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    let string = |bytes: &mut Vec<u8>, text: &str| {
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.as_bytes());
    };
    bytes.extend((tensors.len() as u64).to_le_bytes());
    bytes.extend((keys.len() as u64).to_le_bytes());
    for (key, value) in keys {
        string(&mut bytes, &key);
        match value {
            U32(value) => bytes.extend([4u32, value].map(u32::to_le_bytes).concat()),
            F32(value) => {
                bytes.extend(6u32.to_le_bytes());
                bytes.extend(value.to_le_bytes());
            }
            Text(value) => {
                bytes.extend(8u32.to_le_bytes());
                string(&mut bytes, value);
            }
        }
    }
    for (name, data) in tensors {
        string(&mut bytes, name);
        bytes.extend(1u32.to_le_bytes());
        bytes.extend((data.len() as u64).to_le_bytes());
        bytes.extend([0u32, 0, 0].map(u32::to_le_bytes).concat());
    }
    bytes.resize(bytes.len().next_multiple_of(32), 0);
    for (_, data) in tensors {
        bytes.extend(data.iter().flat_map(|element| element.to_le_bytes()));
    }
    parse(Path::new("x.gguf"), &GgufFile::parse(&bytes).unwrap())
}

#[test]
fn the_usual_keys_are_enough() {
    let config =
        read("qwen3", vec![("attention.key_length", U32(32)), ("attention.value_length", U32(32))], &[]).unwrap();
    assert_eq!((config.architecture, config.head_dim, config.qk_norm), (Architecture::Qwen3, 32, true));
    assert_eq!((config.rope.theta, &config.rope.scaling), (10_000.0, &RopeScaling::Default));
    assert_eq!((config.num_layers(), config.tie_word_embeddings), (2, true));
    assert_eq!((config.bos_token_id, config.eos_token_ids.len()), (None, 0));
}

#[test]
fn scaling_comes_from_keys_or_from_divisors() {
    let linear = vec![("rope.scaling.type", Text("linear")), ("rope.scaling.factor", F32(4.0))];
    assert_eq!(read("llama", linear, &[]).unwrap().rope.scaling, RopeScaling::Linear { factor: 4.0 });
    let yarn = vec![
        ("rope.scaling.type", Text("yarn")),
        ("rope.scaling.factor", F32(4.0)),
        ("rope.scaling.original_context_length", U32(64)),
    ];
    let RopeScaling::Yarn(yarn) = read("qwen2", yarn, &[]).unwrap().rope.scaling else { panic!("yarn") };
    assert_eq!((yarn.factor, yarn.original_max_position_embeddings, yarn.beta_fast), (4.0, 64, 32.0));

    let divisors: &[f32] = &[1.0, 1.0, 1.0, 1.0, 2.0, 4.0, 8.0, 8.0];
    let config = read("llama", vec![], &[("rope_freqs.weight", divisors)]).unwrap();
    assert_eq!(config.rope.scaling, RopeScaling::Divisors(divisors.to_vec()));
    let message = read("llama", vec![], &[("rope_freqs.weight", &[1.0, 1.0])]).unwrap_err().to_string();
    assert!(message.contains("2 frequency divisors"), "{message}");
}

#[test]
fn other_arithmetic_is_refused_by_name() {
    let cases: Vec<(&'static str, Changes, [&str; 2])> = vec![
        ("gemma", vec![], ["general.architecture", "llama, qwen2, qwen3"]),
        ("llama", vec![("general.type", Text("adapter"))], ["general.type", "adapter"]),
        ("llama", vec![("split.count", U32(2))], ["split.count", "2 files"]),
        ("llama", vec![("expert_count", U32(8))], ["llama.expert_count", "8"]),
        ("qwen2", vec![("attention.sliding_window", U32(64))], ["qwen2.attention.sliding_window", "64"]),
        ("llama", vec![("logit_scale", F32(0.5))], ["llama.logit_scale", "0.5"]),
        ("llama", vec![("rope.dimension_count", U32(8))], ["llama.rope.dimension_count", "head width, 16"]),
        ("llama", vec![("rope.scaling.type", Text("longrope"))], ["rope.scaling.type", "longrope"]),
        ("llama", vec![("rope.scaling.attn_factor", F32(2.0))], ["rope.scaling.attn_factor", "2"]),
        ("llama", vec![("rope.scaling.yarn_ext_factor", F32(0.5))], ["yarn_ext_factor", "0.5"]),
        ("llama", vec![("embedding_length", Text("64"))], ["llama.embedding_length", "whole number"]),
        ("llama", vec![("attention.head_count_kv", U32(3))], ["attention heads", "3"]),
        ("llama", vec![("tokenizer.ggml.eos_token_id", Text("x"))], ["tokenizer.ggml.eos_token_id", "a token id"]),
    ];
    for (architecture, changes, words) in cases {
        let message = read(architecture, changes, &[]).unwrap_err().to_string();
        assert!(words.iter().all(|word| message.contains(word)), "{words:?} not in {message}");
    }
    read("llama", vec![("expert_count", U32(0))], &[]).unwrap();
}
