//! What the loader asks of a file format: tensors by their Hugging Face names.

use std::path::{Path, PathBuf};

use half::{bf16, f16};

use super::error::CheckpointError;
use super::weights::{WeightData, WeightDtype};

/// A tensor as its file describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TensorInfo {
    /// The name in the file.
    pub name: String,
    /// Sizes, slowest first.
    pub shape: Vec<usize>,
    /// The stored form, as the format names it: `BF16`, `Q4_1`, …
    pub dtype: String,
    /// Bytes in the file.
    pub size_bytes: u64,
    /// The file.
    pub file: PathBuf,
}

/// An opened checkpoint, whatever its format.
pub(crate) trait TensorSource {
    /// The file or directory, for messages about no single tensor.
    fn path(&self) -> &Path;

    /// How the file spells the tensor that Hugging Face calls `name`.
    fn file_name(&self, name: &str) -> String;

    /// The entry of the tensor that the file calls `file_name`.
    fn find(&self, file_name: &str) -> Option<TensorInfo>;

    /// Every tensor of the checkpoint, sorted by name.
    fn tensors(&self) -> Vec<TensorInfo>;

    /// All elements of a tensor that [`TensorSource::find`] knows, by its Hugging Face name, row-major, in the
    /// layout that Hugging Face gives them; in `dtype`, or as close to the file as memory allows.
    fn read(&self, name: &str, dtype: Option<WeightDtype>) -> Result<WeightData, CheckpointError>;
}

/// The plain storage types that both formats know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoredFloat {
    F32,
    F16,
    Bf16,
}

/// Elements in little-endian `bytes` as `dtype`, or as the nearest type that memory holds.
pub(crate) fn convert(bytes: &[u8], stored: StoredFloat, dtype: Option<WeightDtype>) -> WeightData {
    let natural = if stored == StoredFloat::Bf16 { WeightDtype::Bf16 } else { WeightDtype::F32 };
    match (stored, dtype.unwrap_or(natural)) {
        (StoredFloat::F32, WeightDtype::F32) => WeightData::F32(decode(bytes, f32::from_le_bytes)),
        (StoredFloat::F32, WeightDtype::Bf16) => {
            WeightData::Bf16(decode(bytes, |element| bf16::from_f32(f32::from_le_bytes(element))))
        }
        (StoredFloat::F16, WeightDtype::F32) => {
            WeightData::F32(decode(bytes, |element| f16::from_le_bytes(element).to_f32()))
        }
        (StoredFloat::F16, WeightDtype::Bf16) => {
            WeightData::Bf16(decode(bytes, |element| bf16::from_f32(f16::from_le_bytes(element).to_f32())))
        }
        (StoredFloat::Bf16, WeightDtype::F32) => {
            WeightData::F32(decode(bytes, |element| bf16::from_le_bytes(element).to_f32()))
        }
        (StoredFloat::Bf16, WeightDtype::Bf16) => WeightData::Bf16(decode(bytes, bf16::from_le_bytes)),
    }
}

fn decode<const N: usize, T>(bytes: &[u8], element: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks().0.iter().map(|chunk| element(*chunk)).collect()
}
