//! Makes the bad files that no tool would write.

use std::path::{Path, PathBuf};

use lora_adapter::{Adapter, LoadError, Reason};
use tempfile::TempDir;

/// The golden files in these containers.
pub(crate) fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)
}

/// The config of every adapter made here: rank 4, alpha 8.
pub(crate) const CONFIG: &str = r#"{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}"#;

/// A directory with these files.
pub(crate) fn directory(files: &[(&str, &[u8])]) -> TempDir {
    let directory = TempDir::new().unwrap();
    for (name, bytes) in files {
        std::fs::write(directory.path().join(name), bytes).unwrap();
    }
    directory
}

/// Reads an adapter whose weights are `adapter_model.bin` of these bytes.
pub(crate) fn open_bin(bytes: &[u8]) -> Result<Adapter, LoadError> {
    Adapter::open(directory(&[("adapter_config.json", CONFIG.as_bytes()), ("adapter_model.bin", bytes)]).path())
}

/// The only reason of a refusal.
#[track_caller]
pub(crate) fn reason(result: Result<Adapter, LoadError>) -> Reason {
    let error = result.expect_err("the adapter is refused");
    let mut reasons = error.reasons().cloned();
    let first = reasons.next().expect("a reason");
    assert_eq!(reasons.next(), None, "{error}");
    first
}

/// An entry of an archive, and how it is written.
#[derive(Clone)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) bytes: Vec<u8>,
    pub(crate) method: u16,
    pub(crate) flags: u16,
}

impl Entry {
    pub(crate) fn new(name: impl Into<String>, bytes: impl Into<Vec<u8>>) -> Self {
        Entry { name: name.into(), bytes: bytes.into(), method: 0, flags: 0 }
    }
}

/// A zip archive.
pub(crate) fn zip(entries: &[Entry]) -> Vec<u8> {
    let (mut file, mut directory) = (Vec::new(), Vec::new());
    for Entry { name, bytes, method, flags } in entries {
        let offset = file.len() as u32;
        let mut common = Vec::new();
        common.extend(flags.to_le_bytes());
        common.extend(method.to_le_bytes());
        common.extend([0; 8]);
        common.extend((bytes.len() as u32).to_le_bytes());
        common.extend((bytes.len() as u32).to_le_bytes());
        common.extend((name.len() as u16).to_le_bytes());
        common.extend([0; 2]);
        file.extend(b"PK\x03\x04\x14\x00");
        file.extend(&common);
        file.extend(name.as_bytes());
        file.extend(bytes);
        directory.extend(b"PK\x01\x02\x14\x00\x14\x00");
        directory.extend(&common);
        directory.extend([0; 10]);
        directory.extend(offset.to_le_bytes());
        directory.extend(name.as_bytes());
    }
    let offset = file.len() as u32;
    file.extend(&directory);
    file.extend(b"PK\x05\x06\x00\x00\x00\x00");
    file.extend((entries.len() as u16).to_le_bytes());
    file.extend((entries.len() as u16).to_le_bytes());
    file.extend((directory.len() as u32).to_le_bytes());
    file.extend(offset.to_le_bytes());
    file.extend([0; 2]);
    file
}

/// Builds a pickle opcode by opcode.
#[derive(Clone, Default)]
pub(crate) struct Pickle(pub(crate) Vec<u8>);

impl Pickle {
    pub(crate) fn op(mut self, bytes: impl AsRef<[u8]>) -> Self {
        self.0.extend(bytes.as_ref());
        self
    }

    pub(crate) fn text(self, text: &str) -> Self {
        self.op([b'X']).op((text.len() as u32).to_le_bytes()).op(text)
    }

    pub(crate) fn int(self, value: i32) -> Self {
        self.op([b'J']).op(value.to_le_bytes())
    }

    pub(crate) fn dims(self, dims: &[i32]) -> Self {
        dims.iter().fold(self.op(b"("), |pickle, dim| pickle.int(*dim)).op(b"t")
    }

    /// An f32 tensor over a storage of this many elements.
    pub(crate) fn tensor(self, key: &str, storage: i32, offset: i32, shape: &[i32], strides: &[i32]) -> Self {
        self.op(b"ctorch._utils\n_rebuild_tensor_v2\n((")
            .text("storage")
            .op(b"ctorch\nFloatStorage\n")
            .text(key)
            .text("cpu")
            .int(storage)
            .op(b"tQ")
            .int(offset)
            .dims(shape)
            .dims(strides)
            .op(b"\x89ccollections\nOrderedDict\n)RtR")
    }
}

/// A whole file: a dictionary of A and B of one projection, with `between` before its end.
pub(crate) fn good_pickle(between: impl FnOnce(Pickle) -> Pickle) -> Vec<u8> {
    let start = Pickle::default().op(b"\x80\x02}(");
    let start = start.text(&name("A")).tensor("0", 32, 0, &[4, 8], &[8, 1]);
    let start = start.text(&name("B")).tensor("1", 32, 0, &[8, 4], &[4, 1]);
    archive(&between(start).op(b"u.").0)
}

/// A tensor's name.
pub(crate) fn name(half: &str) -> String {
    format!("base_model.model.model.layers.0.self_attn.q_proj.lora_{half}.weight")
}

/// An archive with this pickle and two storages of 32 f32.
pub(crate) fn archive(pickle: &[u8]) -> Vec<u8> {
    let values: Vec<u8> = (0..32).flat_map(|index| (index as f32).to_le_bytes()).collect();
    zip(&[Entry::new("a/data.pkl", pickle), Entry::new("a/data/0", values.clone()), Entry::new("a/data/1", values)])
}
