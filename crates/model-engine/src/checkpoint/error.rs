//! Why a checkpoint cannot be loaded.

use std::io;
use std::path::{Path, PathBuf};

use super::gguf::GgufError;
use crate::rope::RopeError;

/// Why a checkpoint cannot be loaded.
///
/// Only [`CheckpointError::Io`] can succeed on a retry with the same files; everything else names what the files
/// hold and what was expected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The file system refused; worth a retry once its cause is gone.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The path holds nothing that looks like a checkpoint.
    #[error("{}: not a checkpoint: {reason}", path.display())]
    NotACheckpoint {
        /// What was opened.
        path: PathBuf,
        /// What was looked for and what was found.
        reason: String,
    },
    /// A JSON file does not parse.
    #[error("{}: invalid JSON: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// A field is missing, of the wrong type or out of range.
    #[error("{}: {field} is {found}, expected {expected}", path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// The field, as the file spells it.
        field: String,
        /// What it holds.
        found: String,
        /// What it has to hold.
        expected: String,
    },
    /// The checkpoint asks for arithmetic that the engine does not do.
    #[error("{}: unsupported {what}: {found} (supported: {supported})", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// Which feature.
        what: String,
        /// What the file asks for.
        found: String,
        /// What the engine does.
        supported: String,
    },
    /// The rope numbers are outside the range of their rule.
    #[error("{}: {source}", path.display())]
    Rope {
        /// The file.
        path: PathBuf,
        /// Which number.
        source: RopeError,
    },
    /// A safetensors file is malformed.
    #[error("{}: {source}", path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// Why.
        source: safetensors::SafeTensorError,
    },
    /// A GGUF file is malformed.
    #[error("{}: {source}", path.display())]
    Gguf {
        /// The file.
        path: PathBuf,
        /// Why.
        source: GgufError,
    },
    /// The shard index contradicts itself or its files.
    #[error("{}: {reason}", path.display())]
    Index {
        /// The index.
        path: PathBuf,
        /// What is wrong with which entry.
        reason: String,
    },
    /// A tensor that the model needs is not there.
    #[error("{}: tensor {tensor} {expected:?} is missing", path.display())]
    MissingTensor {
        /// The file or directory.
        path: PathBuf,
        /// The name looked for.
        tensor: String,
        /// The shape it has to have.
        expected: Vec<usize>,
    },
    /// A tensor does not have the shape that the configuration gives it.
    #[error("{}: tensor {tensor} has shape {found:?}, expected {expected:?}", path.display())]
    WrongShape {
        /// The file.
        path: PathBuf,
        /// Its name.
        tensor: String,
        /// By the configuration.
        expected: Vec<usize>,
        /// In the file.
        found: Vec<usize>,
    },
    /// A tensor is stored in a form that is not read.
    #[error("{}: tensor {tensor} is stored as {found} (supported: {supported})", path.display())]
    TensorDtype {
        /// The file.
        path: PathBuf,
        /// Its name.
        tensor: String,
        /// The stored form.
        found: String,
        /// The forms that are read.
        supported: &'static str,
    },
    /// The file holds tensors that the model as configured does not use.
    #[error("{}: {} tensors are not used by this model: {}", path.display(), tensors.len(), first_names(tensors))]
    UnusedTensors {
        /// The file or directory.
        path: PathBuf,
        /// Every such name, sorted.
        tensors: Vec<String>,
    },
}

impl CheckpointError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }

    pub(crate) fn json(path: &Path) -> impl FnOnce(serde_json::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Json { path, source }
    }

    pub(crate) fn gguf(path: &Path) -> impl FnOnce(GgufError) -> Self {
        let path = path.to_owned();
        move |source| Self::Gguf { path, source }
    }

    pub(crate) fn unsupported(
        path: &Path,
        what: impl Into<String>,
        found: impl Into<String>,
        supported: impl Into<String>,
    ) -> Self {
        Self::Unsupported { path: path.to_owned(), what: what.into(), found: found.into(), supported: supported.into() }
    }

    pub(crate) fn field(
        path: &Path,
        field: impl Into<String>,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) -> Self {
        Self::Field { path: path.to_owned(), field: field.into(), found: found.into(), expected: expected.into() }
    }
}

/// The first few of `names`, so that one message stays one line.
fn first_names(names: &[String]) -> String {
    const SHOWN: usize = 8;
    let mut text = names[..names.len().min(SHOWN)].join(", ");
    if names.len() > SHOWN {
        text.push_str(", …");
    }
    text
}
