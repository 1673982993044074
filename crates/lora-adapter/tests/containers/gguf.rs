//! GGUF adapters written with llama.cpp's own package from golden adapters of PEFT: the same A, B and scaling at the same
//! sites; and hostile files, each refused for its own reason.

use std::path::Path;

use half::{bf16, f16};
use lora_adapter::{Adapter, AdapterSource, GgufError, Misfit, Note, Reason, prepare};
use lora_math::ModelShape;
use lora_math::shape::{AttentionSize, LayerShape};

use crate::support::{directory, golden, reason};

/// Opens both, and compares every pair by values rounded as the file's dtype does it.
fn same_as_peft(file: &str, original: &str, heads: Option<[usize; 2]>, rounded: fn(f32) -> f32) -> Adapter {
    let mut adapter = Adapter::open(&golden("gguf").join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
    let original = Adapter::open(&golden(original)).unwrap_or_else(|error| panic!("{original}: {error}"));
    assert_eq!(adapter.awaits_heads(), heads.is_some(), "{file}");
    assert_eq!(adapter.notes().contains(&Note::HeadsAwaited), heads.is_some(), "{file}");
    assert_eq!(adapter.origin().producer, Some("llama.cpp"), "{file}");
    if let Some([num_heads, num_kv_heads]) = heads {
        adapter = adapter.with_gguf_heads(num_heads, num_kv_heads).unwrap();
        assert!(!adapter.awaits_heads() && !adapter.notes().contains(&Note::HeadsAwaited));
    }
    let sites = |adapter: &Adapter| adapter.pairs().map(|(site, _)| site).collect::<Vec<_>>();
    assert_eq!(sites(&adapter), sites(&original), "{file}");
    for (site, pair) in adapter.pairs() {
        let expected = original.pair(site).unwrap();
        assert_eq!(pair.scaling(), expected.scaling(), "{file} {site}");
        for (found, expected) in [(pair.a(), expected.a()), (pair.b(), expected.b())] {
            let expected: Vec<f32> = expected.to_f32().into_iter().map(rounded).collect();
            assert_eq!(found.to_f32(), expected, "{file} {site}");
        }
    }
    adapter
}

#[test]
fn every_pair_is_that_of_the_original() {
    let heads = Some([4, 2]);
    let f16 = |value| f16::from_f32(value).to_f32();
    let bf16 = |value| bf16::from_f32(value).to_f32();
    let plain = same_as_peft("llama/qv.gguf", "adapters/llama/qv", heads, |value| value);
    assert_eq!(plain.content(), Adapter::open(&golden("adapters/llama/qv")).unwrap().content());
    same_as_peft("llama/all_linear.gguf", "adapters/llama/all_linear", heads, |value| value);
    same_as_peft("llama/all_linear_f16.gguf", "adapters/llama/all_linear", heads, f16);
    same_as_peft("llama/all_linear_bf16.gguf", "adapters/llama/all_linear", heads, bf16);
    same_as_peft("llama/embed_head_lora.gguf", "adapters/llama/embed_head_lora", heads, |value| value);
    same_as_peft("qwen3/all_linear.gguf", "adapters/qwen3/all_linear", None, |value| value);
    same_as_peft("qwen3moe/tp_both.gguf", "adapters_moe/qwen3_moe/tp_both", None, |value| value);
    same_as_peft("qwen3next/linear_attn.gguf", "adapters_moe/qwen3_next/linear_attn", None, |value| value);
    same_as_peft("qwen3next/tp_all_fused.gguf", "adapters_moe/qwen3_next/tp_all", None, |value| value);
}

#[test]
fn rows_of_llama_wait_for_head_counts() {
    let adapter = Adapter::open(&golden("gguf/llama/qv.gguf")).unwrap();
    let size = AttentionSize { hidden_size: 64, q_features: 64, kv_features: 32, o_features: 64 };
    let shape = ModelShape::new(64, 128, vec![LayerShape::new().with_attention(size); 2]).unwrap();
    let refusal = prepare(adapter.clone(), &shape).unwrap_err();
    assert!(refusal.reasons.contains(&Misfit::NeedsHeads), "{refusal}");
    let error = adapter.clone().with_gguf_heads(3, 2).unwrap_err();
    assert!(error.reasons().all(|reason| matches!(reason, Reason::Gguf(GgufError::Heads { num_heads: 3, .. }))));
    let wrong = adapter.clone().with_gguf_heads(2, 2).unwrap();
    let right = adapter.with_gguf_heads(4, 2).unwrap();
    assert_ne!(wrong.content(), right.content());
    assert!(prepare(right, &shape).is_ok());
}

/// In a directory alone, beside others, and as a link out of it.
#[test]
fn one_file_is_found_in_its_directory() {
    let bytes = std::fs::read(golden("gguf/qwen3/all_linear.gguf")).unwrap();
    let alone = directory(&[("any name.gguf", &bytes), ("README.md", b"")]);
    assert!(Adapter::open(alone.path()).is_ok());
    assert!(Adapter::open(&alone.path().join("any name.gguf")).is_ok());
    let missing = Adapter::open(&alone.path().join("README.md"));
    assert!(matches!(reason(missing), Reason::NotADirectory { .. }));
    let two = directory(&[("a.gguf", &bytes), ("b.gguf", &bytes)]);
    let expected = Reason::SeveralFiles { files: vec!["a.gguf".to_owned(), "b.gguf".to_owned()] };
    assert_eq!(reason(Adapter::open(two.path())), expected);
    assert!(Adapter::open(&two.path().join("b.gguf")).is_ok());
    let beside = directory(&[("adapter_config.json", crate::support::CONFIG.as_bytes()), ("a.gguf", &bytes)]);
    assert!(matches!(reason(Adapter::open(beside.path())), Reason::UnsupportedFormat { .. }));
}

#[cfg(unix)]
#[test]
fn links_of_the_hub_cache_are_followed_inside_it() {
    use std::os::unix::fs::symlink;
    let cache = tempfile::tempdir().unwrap();
    let repository = cache.path().join("models--owner--name");
    let snapshot = repository.join("snapshots").join("0123abcd");
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::create_dir_all(repository.join("blobs")).unwrap();
    for (name, blob) in [("adapter_config.json", "1"), ("adapter_model.safetensors", "2")] {
        std::fs::copy(golden("adapters/llama/qv").join(name), repository.join("blobs").join(blob)).unwrap();
        symlink(Path::new("../../blobs").join(blob), snapshot.join(name)).unwrap();
    }
    std::fs::copy(golden("gguf/qwen3/all_linear.gguf"), repository.join("blobs/3")).unwrap();
    symlink("../../blobs/3", snapshot.join("adapter.gguf")).unwrap();
    assert!(Adapter::open(&snapshot).is_err());
    for path in [snapshot.clone(), snapshot.join("adapter.gguf")] {
        let source = AdapterSource::in_hub_cache(&path).unwrap().expect("a snapshot");
        assert!(Adapter::read(&source).is_ok(), "{}", path.display());
    }
    // Out of the repository's folder, none is.
    std::fs::copy(golden("gguf/qwen3/all_linear.gguf"), cache.path().join("outside.gguf")).unwrap();
    symlink("../../../outside.gguf", snapshot.join("other.gguf")).unwrap();
    let source = AdapterSource::in_hub_cache(&snapshot.join("other.gguf")).unwrap().unwrap();
    assert_eq!(reason(Adapter::read(&source)), Reason::OutsideDirectory);
    let plain = AdapterSource::in_hub_cache(&golden("adapters/llama/qv")).unwrap();
    assert_eq!(plain, None);
    assert_eq!(AdapterSource::in_hub_cache(&repository).unwrap(), None);
}

/// A GGUF file that can be made wrong in one place.
#[derive(Clone)]
struct File {
    version: u32,
    keys: Vec<(String, Vec<u8>)>,
    tensors: Vec<(String, Vec<u64>, u32, u64)>,
    data_bytes: usize,
}

fn text(value: &str) -> Vec<u8> {
    [&8u32.to_le_bytes()[..], &(value.len() as u64).to_le_bytes(), value.as_bytes()].concat()
}

fn float(value: f32) -> Vec<u8> {
    [6u32.to_le_bytes(), value.to_le_bytes()].concat()
}

fn tokens(values: &[u32]) -> Vec<u8> {
    let values = values.iter().flat_map(|value| value.to_le_bytes());
    [9u32.to_le_bytes(), 4u32.to_le_bytes()].concat().into_iter().chain(2u64.to_le_bytes()).chain(values).collect()
}

/// q of one layer of `qwen3`, rank 2, in 8, out 4, alpha 4.
fn good() -> File {
    let key = |key: &str, value| (key.to_owned(), value);
    File {
        version: 3,
        keys: vec![
            key("general.architecture", text("qwen3")),
            key("general.type", text("adapter")),
            key("adapter.type", text("lora")),
            key("adapter.lora.alpha", float(4.0)),
        ],
        tensors: vec![
            ("blk.0.attn_q.weight.lora_a".to_owned(), vec![8, 2], 0, 0),
            ("blk.0.attn_q.weight.lora_b".to_owned(), vec![2, 4], 0, 64),
        ],
        data_bytes: 96,
    }
}

impl File {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend((self.tensors.len() as u64).to_le_bytes());
        bytes.extend((self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            bytes.extend((key.len() as u64).to_le_bytes());
            bytes.extend([key.as_bytes(), value].concat());
        }
        for (name, dims, code, offset) in &self.tensors {
            bytes.extend((name.len() as u64).to_le_bytes());
            bytes.extend(name.as_bytes());
            bytes.extend((dims.len() as u32).to_le_bytes());
            bytes.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
            bytes.extend(code.to_le_bytes());
            bytes.extend(offset.to_le_bytes());
        }
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.resize(bytes.len() + self.data_bytes, 0);
        bytes
    }

    fn open(&self) -> Result<Adapter, lora_adapter::LoadError> {
        Adapter::open(directory(&[("adapter.gguf", &self.bytes())]).path())
    }

    fn refused(&self) -> GgufError {
        match reason(self.open()) {
            Reason::Gguf(error) => error,
            other => panic!("{other}"),
        }
    }

    fn with_key(&self, key: &str, value: Vec<u8>) -> File {
        let mut file = self.clone();
        file.keys.retain(|(known, _)| known != key);
        file.keys.push((key.to_owned(), value));
        file
    }
}

#[test]
fn alpha_is_divided_by_the_rank_and_zero_means_one() {
    let scaling = |file: &File| file.open().unwrap().pairs().next().unwrap().1.scaling();
    assert_eq!(scaling(&good()), 2.0);
    assert_eq!(scaling(&good().with_key("adapter.lora.alpha", float(0.0))), 1.0);
    let mut without = good();
    without.keys.pop();
    assert_eq!(scaling(&without), 1.0);
    for value in [float(f32::NAN), float(f32::INFINITY), text("8")] {
        let error = good().with_key("adapter.lora.alpha", value).refused();
        assert!(matches!(&error, GgufError::Bad { what, .. } if what == "adapter.lora.alpha"), "{error}");
    }
}

#[test]
fn what_the_keys_say_is_kept_or_refused() {
    let adapter = good().with_key("adapter.alora.invocation_tokens", tokens(&[7, 9])).open().unwrap();
    assert_eq!(adapter.settings().invocation_tokens, [7, 9]);
    let adapter = good().with_key("adapter.lora.prompt_prefix", text("As a pirate:")).open().unwrap();
    let said = Note::Said { field: "adapter.lora.prompt_prefix".to_owned(), text: "As a pirate:".to_owned() };
    assert!(adapter.notes().contains(&said));
    let unknown = good().with_key("adapter.lora.dropout", float(1.0)).refused();
    assert_eq!(unknown, GgufError::UnknownKey { key: "adapter.lora.dropout".to_owned() });
    for (key, value) in [("general.type", "model"), ("adapter.type", "control"), ("general.type", "")] {
        let error = good().with_key(key, text(value)).refused();
        assert!(matches!(&error, GgufError::Bad { what, .. } if what == key), "{error}");
    }
    let error = good().with_key("general.architecture", text("falcon")).refused();
    assert_eq!(error, GgufError::Architecture { found: "falcon".to_owned() });
    let split = good().with_key("split.count", [&2u32.to_le_bytes()[..], &3u16.to_le_bytes()].concat()).refused();
    assert!(matches!(split, GgufError::Bad { .. }), "{split}");
    let mut twice = good();
    twice.keys.push(("adapter.type".to_owned(), text("lora")));
    assert_eq!(twice.refused(), GgufError::DuplicateKey { key: "adapter.type".to_owned() });
    let mut missing = good();
    missing.keys.remove(1);
    assert!(matches!(missing.refused(), GgufError::MissingKey { key: "general.type", .. }));
}

#[test]
fn tensors_stand_where_they_should() {
    let with = |change: fn(&mut File)| {
        let mut file = good();
        change(&mut file);
        file
    };
    let offset = |file: File| matches!(file.refused(), GgufError::Offset { .. });
    assert!(offset(with(|file| file.tensors[1].3 = 32)));
    assert!(offset(with(|file| file.tensors[1].3 = 128)));
    assert!(offset(with(|file| file.tensors[1].3 = u64::MAX)));
    assert!(offset(with(|file| file.tensors[0].3 = 64)));
    assert!(matches!(with(|file| file.data_bytes = 95).refused(), GgufError::Truncated { .. }));
    assert!(matches!(reason(with(|file| file.data_bytes = 128).open()), Reason::TrailingBytes { .. }));
    let name = |file: &mut File| file.tensors[1].0 = file.tensors[0].0.clone();
    assert!(matches!(reason(with(name).open()), Reason::DuplicateTensor { .. }));
    for (code, name) in [(8, "Q8_0"), (24, "I8"), (99, "ggml type 99")] {
        let mut file = good();
        file.tensors[1].2 = code;
        let Reason::UnsupportedDtype { dtype, .. } = reason(file.open()) else { panic!("{name}") };
        assert_eq!(dtype, name);
    }
    for dims in [vec![u64::MAX, 2], vec![1 << 40, 1 << 40]] {
        let mut file = good();
        file.tensors[1].1 = dims;
        assert!(matches!(file.refused(), GgufError::Bad { .. }));
    }
    for name in [
        "blk.0.attn_q.weight",
        "blk.0.attn_q.lora_b",
        "blk.x.attn_q.weight.lora_b",
        "blk.0.attn_norm.weight.lora_a",
        "blk.0.what.weight.lora_a",
    ] {
        let mut file = good();
        file.tensors[1].0 = name.to_owned();
        let error = file.open().unwrap_err();
        assert!(
            error.reasons().any(|reason| matches!(reason, Reason::Gguf(GgufError::Tensor { .. }))),
            "{name}: {error}"
        );
    }
    let qwen = with(|file| file.tensors[1].0 = "blk.0.ssm_out.weight.lora_b".to_owned());
    let error = qwen.with_key("general.architecture", text("qwen35")).open().unwrap_err();
    assert!(error.to_string().contains("another order"), "{error}");
}

/// A name costs more than an expert of a few bytes: the file's length bounds how many there are.
#[test]
fn experts_of_a_few_bytes_are_refused() {
    let stacked = |num_experts: u64, sizes: u64| {
        let mut file = good().with_key("general.architecture", text("qwen3moe"));
        let half_bytes = (num_experts * sizes * 4).next_multiple_of(32);
        for (index, half) in ["a", "b"].into_iter().enumerate() {
            let dims = if half == "a" { vec![sizes, 1, num_experts] } else { vec![1, sizes, num_experts] };
            let offset = index as u64 * half_bytes;
            file.tensors[index] = (format!("blk.0.ffn_gate_exps.weight.lora_{half}"), dims, 0, offset);
        }
        file.data_bytes = 2 * half_bytes as usize;
        file.open()
    };
    assert_eq!(stacked(100, 8).unwrap().pairs().len(), 100);
    let error = stacked(100, 1).unwrap_err();
    let mut reasons = error.reasons();
    let bounded =
        |reason: &Reason| matches!(reason, Reason::TooManyExperts { found: 100, max } if (1..100).contains(max));
    assert!(reasons.all(bounded), "{error}");
}

/// Every beginning of a good file, and headers that claim more than there is.
#[test]
fn cut_and_boastful_files_are_refused() {
    let bytes = good().bytes();
    for end in 0..bytes.len() {
        let result = Adapter::open(directory(&[("adapter.gguf", &bytes[..end])]).path());
        assert!(result.is_err(), "{end}");
    }
    for version in [0, 1, 4, 3u32.swap_bytes()] {
        let mut file = good();
        file.version = version;
        assert_eq!(file.refused(), GgufError::Version { found: version });
    }
    for (at, length) in [(8, 8), (16, 8), (24, 8)] {
        let mut boastful = bytes.clone();
        boastful[at..at + length].fill(0xff);
        let result = Adapter::open(directory(&[("adapter.gguf", &boastful)]).path());
        assert!(matches!(reason(result), Reason::Gguf(GgufError::Truncated { .. } | GgufError::Bad { .. })));
    }
    let nested = [9u32.to_le_bytes(), 9u32.to_le_bytes()].concat();
    let nested: Vec<u8> = nested.into_iter().chain(1u64.to_le_bytes()).collect();
    let nested = [&nested[..], &nested[4..], &nested[4..], &nested[4..], &nested[4..]].concat();
    assert!(matches!(
        good().with_key("general.tags", nested).refused(),
        GgufError::Bad { .. } | GgufError::Truncated { .. }
    ));
}
