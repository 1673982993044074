//! Real checkpoints through the public API: the golden models, GGUF against what Python reads, and broken directories.

use std::fs;
use std::path::{Path, PathBuf};

use half::bf16;
use model_engine::checkpoint::gguf::{GgmlType, GgufFile};
use model_engine::checkpoint::weights::{WeightMatrix, WeightSlice};
use model_engine::checkpoint::{Checkpoint, CheckpointError, CheckpointInfo, LoadOptions, LoadProgress, WeightDtype};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/gguf").join(name)
}

fn model(kind: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models").join(kind)
}

fn open(path: &Path) -> Result<Checkpoint, CheckpointError> {
    Checkpoint::open(path, LoadOptions::default())
}

fn f32s(matrix: &WeightMatrix) -> Vec<f32> {
    match matrix.as_slice() {
        WeightSlice::F32(data) => data.to_vec(),
        other => panic!("expected f32, found {other:?}"),
    }
}

/// Elements of a little-endian f32 tensor.
fn elements(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    file.tensor(name).unwrap().data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// A copy of a golden model that a test may break.
fn scratch(kind: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(model(kind).join(name), directory.path().join(name)).unwrap();
    }
    directory
}

/// Rewrites `model.safetensors` of `directory` with the tensors that `edit` returns (name, dtype, shape, bytes).
fn rewrite(directory: &Path, file: &str, edit: impl Fn(Vec<Tensor>) -> Vec<Tensor>) {
    let bytes = fs::read(directory.join("model.safetensors")).unwrap();
    let stored = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = stored
        .iter()
        .map(|(name, view)| (name.to_owned(), view.dtype(), view.shape().to_vec(), view.data().to_vec()))
        .collect();
    let edited = edit(tensors);
    let views = edited
        .iter()
        .map(|(name, dtype, shape, data)| (name.as_str(), TensorView::new(*dtype, shape.clone(), data).unwrap()));
    serialize_to_file(views, None, &directory.join(file)).unwrap();
}

type Tensor = (String, Dtype, Vec<usize>, Vec<u8>);

#[test]
fn the_golden_models_load_with_their_own_values() {
    for kind in ["llama", "llama_bias", "llama_tied", "qwen2", "qwen3", "qwen3_tied"] {
        let checkpoint = open(&model(kind)).unwrap();
        let (config, weights) = (&checkpoint.config, &checkpoint.weights);
        let bytes = fs::read(model(kind).join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();

        assert_eq!(config.tie_word_embeddings, kind.ends_with("_tied"), "{kind}");
        assert_eq!(weights.lm_head.is_none(), config.tie_word_embeddings, "{kind}");
        assert_eq!(f32s(&weights.embed_tokens), elements(&file, "model.embed_tokens.weight"), "{kind}");
        assert_eq!(weights.final_norm, elements(&file, "model.norm.weight"), "{kind}");
        assert_eq!(config.num_layers(), weights.layers.len());
        for (index, layer) in weights.layers.iter().enumerate() {
            let stored = |name: &str| elements(&file, &format!("model.layers.{index}.{name}"));
            for (module, linear) in [
                ("self_attn.q_proj", &layer.q),
                ("self_attn.k_proj", &layer.k),
                ("self_attn.v_proj", &layer.v),
                ("self_attn.o_proj", &layer.o),
                ("mlp.gate_proj", &layer.gate),
                ("mlp.up_proj", &layer.up),
                ("mlp.down_proj", &layer.down),
            ] {
                assert_eq!(f32s(&linear.weight), stored(&format!("{module}.weight")), "{kind} {module}");
                let has_bias = kind == "llama_bias"
                    || kind == "qwen2" && "qkv".contains(&module[10..11]) && module.starts_with("self");
                assert_eq!(linear.bias.is_some(), has_bias, "{kind} {module}");
                if let Some(bias) = &linear.bias {
                    assert_eq!(*bias, stored(&format!("{module}.bias")), "{kind} {module}");
                }
            }
            assert_eq!(layer.input_norm, stored("input_layernorm.weight"));
            assert_eq!(layer.post_attention_norm, stored("post_attention_layernorm.weight"));
            if kind.starts_with("qwen3") {
                assert_eq!(layer.q_norm.as_ref().unwrap(), &stored("self_attn.q_norm.weight"));
                assert_eq!(layer.k_norm.as_ref().unwrap(), &stored("self_attn.k_norm.weight"));
            } else {
                assert!(layer.q_norm.is_none() && layer.k_norm.is_none());
            }
        }
    }
}

#[test]
fn progress_counts_every_tensor_and_info_lists_them() {
    let mut seen = Vec::new();
    let mut progress = |step: LoadProgress| seen.push((step.tensors_done, step.tensors_total));
    let options = LoadOptions { progress: Some(&mut progress), ..LoadOptions::default() };
    let checkpoint = Checkpoint::open(&model("qwen2"), options).unwrap();
    let info = CheckpointInfo::open(&model("qwen2")).unwrap();
    assert_eq!(info.config, checkpoint.config);
    assert_eq!(info.stored, checkpoint.stored);
    let total = info.tensors.len();
    let expected: Vec<_> = (1..=total).map(|done| (done, total)).collect();
    assert_eq!(seen, expected);
    assert_eq!((info.stored.len(), &*info.stored[0].dtype, info.stored[0].num_tensors), (1, "F32", total));
}

#[test]
fn weights_narrow_to_bf16_when_told() {
    let options = LoadOptions { weight_dtype: Some(WeightDtype::Bf16), ..LoadOptions::default() };
    let narrow = Checkpoint::open(&model("llama"), options).unwrap();
    let wide = open(&model("llama")).unwrap();
    let WeightSlice::Bf16(narrow_row) = narrow.weights.layers[1].down.weight.row(3).unwrap() else { panic!("bf16") };
    let WeightSlice::F32(wide_row) = wide.weights.layers[1].down.weight.row(3).unwrap() else { panic!("f32") };
    let rounded: Vec<bf16> = wide_row.iter().map(|element| bf16::from_f32(*element)).collect();
    assert_eq!(narrow_row, rounded);
    assert_eq!(narrow.weights.final_norm, wide.weights.final_norm);
    assert!(wide.weights.layers[1].down.weight.row(64).is_none());
}

#[test]
fn stored_halves_keep_bf16_and_widen_f16() {
    let directory = scratch("llama");
    for (dtype, expected) in [(Dtype::BF16, WeightDtype::Bf16), (Dtype::F16, WeightDtype::F32)] {
        fs::copy(model("llama").join("model.safetensors"), directory.path().join("model.safetensors")).unwrap();
        rewrite(directory.path(), "model.safetensors", |mut tensors| {
            for (_, stored, _, data) in &mut tensors {
                let wide = data.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
                *data = match dtype {
                    Dtype::BF16 => wide.flat_map(|element| bf16::from_f32(element).to_le_bytes()).collect(),
                    _ => wide.flat_map(|element| half::f16::from_f32(element).to_le_bytes()).collect(),
                };
                *stored = dtype;
            }
            tensors
        });
        let loaded = open(directory.path()).unwrap();
        assert_eq!(loaded.weights.embed_tokens.dtype(), expected);
        let first = match loaded.weights.embed_tokens.row(5).unwrap() {
            WeightSlice::F32(row) => row[7],
            WeightSlice::Bf16(row) => row[7].to_f32(),
            _ => panic!("unknown precision"),
        };
        let exact = f32s(&open(&model("llama")).unwrap().weights.embed_tokens)[5 * 64 + 7];
        assert!((first - exact).abs() <= exact.abs() / 128.0, "{first} {exact}");
    }
}

#[test]
fn a_tied_model_with_a_head_follows_its_values() {
    let directory = scratch("llama_tied");
    let with_head = |change: u8| {
        fs::copy(model("llama_tied").join("model.safetensors"), directory.path().join("model.safetensors")).unwrap();
        rewrite(directory.path(), "model.safetensors", |mut tensors| {
            let mut head = tensors.iter().find(|tensor| tensor.0 == "model.embed_tokens.weight").unwrap().clone();
            head.0 = "lm_head.weight".to_owned();
            head.3[0] ^= change;
            tensors.push(head);
            tensors
        });
        open(directory.path()).unwrap()
    };
    let equal = with_head(0);
    assert!(equal.config.tie_word_embeddings && equal.weights.lm_head.is_none());
    let different = with_head(1);
    assert!(!different.config.tie_word_embeddings);
    assert_ne!(f32s(different.weights.output_head()), f32s(&different.weights.embed_tokens));

    // Only the head is stored: it serves as both.
    fs::copy(model("llama_tied").join("model.safetensors"), directory.path().join("model.safetensors")).unwrap();
    rewrite(directory.path(), "model.safetensors", |mut tensors| {
        for tensor in &mut tensors {
            tensor.0 = tensor.0.replace("model.embed_tokens", "lm_head");
        }
        tensors
    });
    let head_only = open(directory.path()).unwrap();
    assert!(head_only.config.tie_word_embeddings);
    assert_eq!(f32s(head_only.weights.output_head()), f32s(&equal.weights.embed_tokens));
}

#[test]
fn tensors_that_do_not_fit_are_named() {
    let directory = scratch("llama");
    let attempt = |edit: &dyn Fn(Vec<Tensor>) -> Vec<Tensor>| {
        fs::copy(model("llama").join("model.safetensors"), directory.path().join("model.safetensors")).unwrap();
        rewrite(directory.path(), "model.safetensors", edit);
        open(directory.path())
    };
    let missing =
        attempt(&|tensors| tensors.into_iter().filter(|tensor| !tensor.0.ends_with("0.mlp.up_proj.weight")).collect());
    let message = missing.unwrap_err().to_string();
    assert!(message.contains("model.layers.0.mlp.up_proj.weight [96, 64] is missing"), "{message}");

    let shape = attempt(&|mut tensors| {
        let index = tensors.iter().position(|tensor| tensor.0.ends_with("1.self_attn.k_proj.weight")).unwrap();
        tensors[index].2 = vec![64, 32];
        tensors
    });
    let message = shape.unwrap_err().to_string();
    assert!(
        message.contains("model.layers.1.self_attn.k_proj.weight has shape [64, 32], expected [32, 64]"),
        "{message}"
    );

    let extra = |name: &'static str| {
        move |mut tensors: Vec<Tensor>| {
            tensors.push((name.to_owned(), Dtype::F32, vec![1], vec![0; 4]));
            tensors
        }
    };
    let message = attempt(&extra("model.layers.0.self_attn.q_norm.weight")).unwrap_err().to_string();
    assert!(
        message.contains("1 tensors are not used by this model: model.layers.0.self_attn.q_norm.weight"),
        "{message}"
    );
    attempt(&extra("model.layers.0.self_attn.rotary_emb.inv_freq")).unwrap();

    let dtype = attempt(&|mut tensors| {
        let index = tensors.iter().position(|tensor| tensor.0 == "model.norm.weight").unwrap();
        tensors[index].1 = Dtype::I32;
        tensors
    });
    assert!(matches!(dtype.unwrap_err(), CheckpointError::TensorDtype { tensor, .. } if tensor == "model.norm.weight"));

    fs::write(directory.path().join("model.safetensors"), b"\xff\xff\xff\xff\xff\xff\xff\xff{}").unwrap();
    assert!(matches!(open(directory.path()).unwrap_err(), CheckpointError::Safetensors { .. }));
}

#[test]
fn shards_follow_the_index() {
    let directory = scratch("llama");
    let path = directory.path();
    let in_first = |name: &str| name.contains("layers.0");
    rewrite(path, "a.safetensors", |tensors| tensors.into_iter().filter(|tensor| in_first(&tensor.0)).collect());
    rewrite(path, "b.safetensors", |tensors| tensors.into_iter().filter(|tensor| !in_first(&tensor.0)).collect());
    let names: Vec<String> =
        CheckpointInfo::open(path).unwrap().tensors.into_iter().map(|tensor| tensor.name).collect();
    fs::remove_file(path.join("model.safetensors")).unwrap();
    let index = |place: &dyn Fn(&str) -> String| {
        let map: serde_json::Map<_, _> = names.iter().map(|name| (name.clone(), place(name).into())).collect();
        let text = serde_json::json!({"metadata": {}, "weight_map": map}).to_string();
        fs::write(path.join("model.safetensors.index.json"), text).unwrap();
        open(path)
    };
    let right = |name: &str| if in_first(name) { "a.safetensors" } else { "b.safetensors" }.to_owned();
    let sharded = index(&right).unwrap();
    assert_eq!(sharded.weights, open(&model("llama")).unwrap().weights);

    let refusal = |place: &dyn Fn(&str) -> String| index(place).unwrap_err().to_string();
    let norm = |other: &'static str| {
        move |name: &str| if name == "model.norm.weight" { other.to_owned() } else { right(name) }
    };
    for outside in ["../b.safetensors", "/etc/passwd", "x/b.safetensors", "..", ""] {
        let message = refusal(&norm(outside));
        assert!(message.contains("no plain file name"), "{message}");
    }
    assert!(refusal(&norm("c.safetensors")).contains("which is not there"));
    assert!(
        refusal(&norm("a.safetensors")).contains("model.norm.weight is said to lie in a.safetensors, but does not")
    );
}

#[test]
fn what_is_no_checkpoint_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let message = open(directory.path()).unwrap_err().to_string();
    assert!(message.contains("no config.json, and 0 .gguf files"), "{message}");
    assert!(matches!(open(&directory.path().join("absent")).unwrap_err(), CheckpointError::Io { .. }));
    fs::write(directory.path().join("x.gguf"), b"hello").unwrap();
    assert!(matches!(open(directory.path()).unwrap_err(), CheckpointError::Gguf { .. }));
}

#[test]
fn every_storage_type_decodes_as_the_python_package_does() {
    let bytes = fs::read(golden("blocks.gguf")).unwrap();
    let file = GgufFile::parse(&bytes).unwrap();
    let expected = fs::read(golden("blocks.safetensors")).unwrap();
    let expected = SafeTensors::deserialize(&expected).unwrap();
    assert_eq!(file.tensors().count(), GgmlType::ALL.len());
    for ggml_type in GgmlType::ALL {
        let tensor = file.tensor(ggml_type.name()).unwrap();
        assert_eq!((tensor.ggml_type, &tensor.shape[..]), (ggml_type, &[2, 256][..]));
        assert_eq!(file.dequantize(tensor), elements(&expected, ggml_type.name()), "{}", ggml_type.name());
    }
}

#[test]
fn a_gguf_model_equals_the_model_it_was_converted_from() {
    let hf = open(&golden("tiny_llama")).unwrap();
    let gguf = open(&golden("tiny_llama.gguf")).unwrap();
    assert_eq!(gguf.config, hf.config);
    assert_eq!(gguf.weights, hf.weights);
    assert_eq!(gguf.config.eos_token_ids, [2, 5]);
    // Neither carries a tokenizer, and both say so.
    for checkpoint in [hf, gguf] {
        assert!(checkpoint.tokenizer.unwrap_err().to_string().contains("token ids"));
    }
}
