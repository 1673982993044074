//! Makes adapter directories, good and bad, without the writers that would refuse to make bad ones.

use std::fmt::Debug;
use std::path::Path;

use lora_adapter::{Adapter, LoadError, Reason};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A tensor to be written.
#[derive(Clone)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

/// A name as PEFT writes it.
pub(crate) fn name(layer: usize, module: &str, half: &str) -> String {
    format!("base_model.model.model.layers.{layer}.{module}.lora_{half}.weight")
}

/// An f32 tensor with values that depend on its name.
pub(crate) fn tensor(name: impl Into<String>, shape: &[usize]) -> Tensor {
    let name = name.into();
    let seed: usize = name.bytes().map(usize::from).sum();
    let values = (0..shape.iter().product()).map(|index: usize| ((index * 7 + seed) % 23) as f32 / 8.0 - 1.0);
    Tensor { name, dtype: "F32", shape: shape.to_vec(), bytes: values.flat_map(f32::to_le_bytes).collect() }
}

/// A and B of one projection.
pub(crate) fn pair(layer: usize, module: &str, [out, rank, input]: [usize; 3]) -> Vec<Tensor> {
    vec![tensor(name(layer, module, "A"), &[rank, input]), tensor(name(layer, module, "B"), &[out, rank])]
}

/// q and v of two layers, hidden size 8, KV size 4, rank 4.
pub(crate) fn qv() -> Vec<Tensor> {
    let layer = |layer| [pair(layer, "self_attn.q_proj", [8, 4, 8]), pair(layer, "self_attn.v_proj", [4, 4, 8])];
    (0..2).flat_map(layer).flatten().collect()
}

/// The config that goes with [`qv`].
pub(crate) fn config() -> Value {
    json!({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]})
}

/// The config with some fields replaced.
pub(crate) fn config_with(fields: Value) -> Value {
    let mut config = config();
    for (name, value) in fields.as_object().unwrap() {
        config[name] = value.clone();
    }
    config
}

/// A safetensors file with a header of the caller's own.
pub(crate) fn raw_file(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// A safetensors file, tensors in the order given.
pub(crate) fn file(tensors: &[Tensor]) -> Vec<u8> {
    let mut entries = vec![r#""__metadata__":{"format":"pt"}"#.to_owned()];
    let mut data = Vec::new();
    for Tensor { name, dtype, shape, bytes } in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": offsets});
        entries.push(format!("{}:{entry}", Value::from(name.as_str())));
        data.extend_from_slice(bytes);
    }
    raw_file(&format!("{{{}}}", entries.join(",")), &data)
}

/// A directory with the two files.
pub(crate) fn directory(config: &[u8], weights: &[u8]) -> TempDir {
    let directory = TempDir::new().unwrap();
    std::fs::write(directory.path().join("adapter_config.json"), config).unwrap();
    std::fs::write(directory.path().join("adapter_model.safetensors"), weights).unwrap();
    directory
}

/// Writes and reads an adapter.
pub(crate) fn load(config: &Value, tensors: &[Tensor]) -> Result<Adapter, LoadError> {
    load_bytes(config.to_string().as_bytes(), &file(tensors))
}

/// Writes and reads an adapter given as bytes.
pub(crate) fn load_bytes(config: &[u8], weights: &[u8]) -> Result<Adapter, LoadError> {
    Adapter::open(directory(config, weights).path())
}

/// The reasons of a refusal.
#[track_caller]
pub(crate) fn reasons<T: Debug>(result: Result<T, LoadError>) -> Vec<Reason> {
    result.expect_err("the adapter is refused").reasons().cloned().collect()
}

/// The reasons for refusing a directory.
#[track_caller]
pub(crate) fn reasons_of(directory: &Path) -> Vec<Reason> {
    reasons(Adapter::open(directory))
}
