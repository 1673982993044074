//! Golden data: logits that other implementations gave, and how far ours are from them.

use std::fs;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};

/// Largest difference of a logit that a correct f32 implementation shows on the tiny dense models.
pub const DENSE_BOUND: f32 = 1e-4;

/// The dense models of `golden/models`.
pub const DENSE_KINDS: [&str; 6] = ["llama", "llama_tied", "llama_bias", "qwen2", "qwen3", "qwen3_tied"];

/// The golden data of this package.
#[must_use]
pub fn golden_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden")
}

/// The root of the repository.
#[must_use]
pub fn repository_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The base model of a kind.
#[must_use]
pub fn model_dir(kind: &str) -> PathBuf {
    golden_dir().join("models").join(kind)
}

/// The directory of one golden adapter.
#[must_use]
pub fn adapter_dir(kind: &str, case: &str) -> PathBuf {
    golden_dir().join("adapters").join(kind).join(case)
}

/// The golden adapters of a kind, by name.
#[must_use]
pub fn adapter_cases(kind: &str) -> Vec<String> {
    sorted_names(&golden_dir().join("adapters").join(kind), |path| path.is_dir())
}

/// The mixed batches of a kind, by name: files `NAME.json` and `NAME.safetensors`.
#[must_use]
pub fn mixed_batches(kind: &str) -> Vec<String> {
    let is_batch = |path: &Path| path.extension().is_some_and(|extension| extension == "json");
    sorted_names(&golden_dir().join("adapters").join(kind), is_batch)
}

/// Stems of the entries of `directory` that `keep` accepts, sorted.
#[must_use]
pub fn sorted_names(directory: &Path, keep: impl Fn(&Path) -> bool) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
    let mut names: Vec<String> = entries
        .map(|entry| entry.expect("a readable directory").path())
        .filter(|path| keep(path))
        .map(|path| path.file_stem().expect("a name").to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// Tensors of a file in memory.
pub struct TensorFile {
    path: PathBuf,
    bytes: Vec<u8>,
}

/// Logits `[sequences, positions, vocabulary]`.
#[derive(Debug, Clone)]
pub struct Logits {
    /// The values, row-major.
    pub data: Vec<f32>,
    /// Positions of a sequence.
    pub num_positions: usize,
    /// Values at a position.
    pub vocab_size: usize,
}

impl TensorFile {
    /// Reads a safetensors file.
    #[must_use]
    pub fn open(path: &Path) -> Self {
        let bytes = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        TensorFile { path: path.to_owned(), bytes }
    }

    fn tensor(&self, name: &str, dtype: Dtype) -> (Vec<usize>, &[u8]) {
        let file = SafeTensors::deserialize(&self.bytes).expect("a safetensors file");
        let view = file.tensor(name).unwrap_or_else(|error| panic!("{}: {error}", self.path.display()));
        assert_eq!(view.dtype(), dtype, "{}: {name}", self.path.display());
        (view.shape().to_vec(), view.data())
    }

    /// An f32 tensor's shape and values.
    #[must_use]
    pub fn floats(&self, name: &str) -> (Vec<usize>, Vec<f32>) {
        let (shape, data) = self.tensor(name, Dtype::F32);
        let value = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().expect("four bytes"));
        (shape, data.chunks_exact(4).map(value).collect())
    }

    /// An i64 tensor of token ids, one vector for each row.
    #[must_use]
    pub fn token_rows(&self, name: &str) -> Vec<Vec<u32>> {
        let (shape, data) = self.tensor(name, Dtype::I64);
        let id = |bytes: &[u8]| i64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        let ids: Vec<u32> = data.chunks_exact(8).map(|bytes| u32::try_from(id(bytes)).expect("a token id")).collect();
        ids.chunks_exact(*shape.last().expect("a dimension")).map(<[u32]>::to_vec).collect()
    }

    /// Logits `[sequences, positions, vocabulary]`.
    #[must_use]
    pub fn logits(&self, name: &str) -> Logits {
        let (shape, data) = self.floats(name);
        let &[_, num_positions, vocab_size] = shape.as_slice() else { panic!("{name} has shape {shape:?}") };
        Logits { data, num_positions, vocab_size }
    }
}

impl Logits {
    /// The logits of one sequence, position after position.
    #[must_use]
    pub fn sequence(&self, index: usize) -> &[f32] {
        let len = self.num_positions * self.vocab_size;
        &self.data[index * len..(index + 1) * len]
    }
}

/// The largest absolute difference between positions' logits and the expected ones.
#[must_use]
pub fn largest_difference(found: &[Vec<f32>], expected: &[f32]) -> f32 {
    assert_eq!(found.iter().map(Vec::len).sum::<usize>(), expected.len(), "numbers of logits");
    largest(found.iter().flatten().zip(expected).map(|(found, expected)| (found - expected).abs()))
}

/// The largest of these differences, or NaN where one is: `f32::max` would drop it, and a bound would hold.
#[must_use]
pub fn largest(differences: impl IntoIterator<Item = f32>) -> f32 {
    let worse = |a: f32, b: f32| if a.is_nan() || b <= a { a } else { b };
    differences.into_iter().fold(0.0, worse)
}

#[cfg(test)]
mod tests {
    use super::{largest, largest_difference};

    #[test]
    fn a_nan_is_never_within_a_bound() {
        assert_eq!(largest([1.0, 3.0, 2.0]), 3.0);
        for differences in [[f32::NAN, 0.0, 0.0], [0.0, f32::NAN, 0.0], [0.0, 0.0, f32::NAN]] {
            assert!(largest(differences).is_nan());
        }
        assert!(largest_difference(&[vec![0.0, f32::NAN], vec![0.0, 0.0]], &[0.0; 4]).is_nan());
    }
}
