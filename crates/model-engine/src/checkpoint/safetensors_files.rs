//! The safetensors files of a Hugging Face directory: one `model.safetensors`, or shards behind an index.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

use super::error::CheckpointError;
use super::map::map;
use super::source::{StoredFloat, TensorInfo, TensorSource, convert};
use super::weights::{WeightData, WeightDtype};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const SUPPORTED: &str = "F32, F16, BF16";

/// The opened files of one directory.
pub(crate) struct SafetensorsFiles {
    directory: PathBuf,
    files: Vec<(PathBuf, Mmap)>,
    tensors: BTreeMap<String, Entry>,
}

struct Entry {
    file: usize,
    shape: Vec<usize>,
    dtype: Dtype,
    range: Range<usize>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl SafetensorsFiles {
    /// Opens `model.safetensors`, else the shards that `model.safetensors.index.json` names, in `directory`.
    pub(crate) fn open(directory: &Path) -> Result<Self, CheckpointError> {
        let mut opened = Self { directory: directory.to_owned(), files: Vec::new(), tensors: BTreeMap::new() };
        let single = directory.join(SINGLE);
        let index = directory.join(INDEX);
        if single.is_file() {
            opened.add(single)?;
        } else if index.is_file() {
            opened.add_shards(&index)?;
        } else {
            let reason = format!("neither {SINGLE} nor {INDEX} is there");
            return Err(CheckpointError::NotACheckpoint { path: directory.to_owned(), reason });
        }
        Ok(opened)
    }

    fn add(&mut self, path: PathBuf) -> Result<(), CheckpointError> {
        let file = self.files.len();
        let map = map(&path)?;
        let malformed = |source| CheckpointError::Safetensors { path: path.clone(), source };
        let (header_bytes, metadata) = SafeTensors::read_metadata(&map).map_err(malformed)?;
        // The header follows its own length, eight bytes; `read_metadata` has checked every offset against the file.
        let data_offset = header_bytes + 8;
        for (name, info) in metadata.tensors() {
            let (start, end) = info.data_offsets;
            let range = data_offset + start..data_offset + end;
            let entry = Entry { file, shape: info.shape.clone(), dtype: info.dtype, range };
            if let Some(other) = self.tensors.insert(name.clone(), entry) {
                let other = self.files.get(other.file).map_or(&path, |file| &file.0).display();
                let reason = format!("tensor {name} is also in {other}");
                return Err(CheckpointError::Index { path, reason });
            }
        }
        self.files.push((path, map));
        Ok(())
    }

    fn add_shards(&mut self, path: &Path) -> Result<(), CheckpointError> {
        let text = std::fs::read_to_string(path).map_err(CheckpointError::io(path))?;
        let index: Index = serde_json::from_str(&text).map_err(CheckpointError::json(path))?;
        let refuse = |reason| CheckpointError::Index { path: path.to_owned(), reason };
        let mut shards = BTreeMap::new();
        for (tensor, shard) in &index.weight_map {
            let mut components = Path::new(shard).components();
            if !matches!((components.next(), components.next()), (Some(Component::Normal(_)), None)) {
                return Err(refuse(format!(
                    "tensor {tensor} is said to lie in {shard:?}, which is no plain file name"
                )));
            }
            shards.entry(shard).or_insert(tensor);
        }
        let mut number = BTreeMap::new();
        for (shard, tensor) in shards {
            let file = self.directory.join(shard);
            if !file.is_file() {
                return Err(refuse(format!("tensor {tensor} is said to lie in {shard}, which is not there")));
            }
            number.insert(shard, self.files.len());
            self.add(file)?;
        }
        for (tensor, shard) in &index.weight_map {
            if self.tensors.get(tensor).map(|entry| entry.file) != number.get(shard).copied() {
                return Err(refuse(format!("tensor {tensor} is said to lie in {shard}, but does not")));
            }
        }
        Ok(())
    }

    fn info(&self, name: &str, entry: &Entry) -> TensorInfo {
        TensorInfo {
            name: name.to_owned(),
            shape: entry.shape.clone(),
            dtype: entry.dtype.to_string(),
            size_bytes: entry.range.len() as u64,
            file: self.files[entry.file].0.clone(),
        }
    }
}

impl TensorSource for SafetensorsFiles {
    fn path(&self) -> &Path {
        &self.directory
    }

    fn file_name(&self, name: &str) -> String {
        name.to_owned()
    }

    fn find(&self, file_name: &str) -> Option<TensorInfo> {
        self.tensors.get(file_name).map(|entry| self.info(file_name, entry))
    }

    fn tensors(&self) -> Vec<TensorInfo> {
        self.tensors.iter().map(|(name, entry)| self.info(name, entry)).collect()
    }

    fn read(&self, name: &str, dtype: Option<WeightDtype>) -> Result<WeightData, CheckpointError> {
        let Some(entry) = self.tensors.get(name) else {
            let (path, tensor) = (self.directory.clone(), name.to_owned());
            return Err(CheckpointError::MissingTensor { path, tensor, expected: Vec::new() });
        };
        let (path, map) = &self.files[entry.file];
        let stored = match entry.dtype {
            Dtype::F32 => StoredFloat::F32,
            Dtype::F16 => StoredFloat::F16,
            Dtype::BF16 => StoredFloat::Bf16,
            other => {
                return Err(CheckpointError::TensorDtype {
                    path: path.clone(),
                    tensor: name.to_owned(),
                    found: other.to_string(),
                    supported: SUPPORTED,
                });
            }
        };
        Ok(convert(&map[entry.range.clone()], stored, dtype))
    }
}
