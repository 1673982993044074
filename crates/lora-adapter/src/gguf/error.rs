//! What is wrong with a GGUF adapter, with the numbers.

use lora_math::Site;
use thiserror::Error;

/// Why a GGUF file is not read as an adapter. Never worth a retry with the same file.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum GgufError {
    /// Another format.
    #[error("not a GGUF file")]
    NotGguf,
    /// A version of the format that is not read, or a file of the other byte order.
    #[error("GGUF version {found}, read are 2 and 3, little-endian")]
    Version {
        /// As the file says.
        found: u32,
    },
    /// The file ends inside something.
    #[error("the file has {file_bytes} bytes, {what} needs {needed_bytes} from {offset} on")]
    Truncated {
        /// What was read.
        what: String,
        /// Where it begins.
        offset: u64,
        /// How long it says that it is.
        needed_bytes: u64,
        /// Bytes of the file.
        file_bytes: u64,
    },
    /// A part of the header that the format does not allow.
    #[error("{what}: expected {expected}, found {found}")]
    Bad {
        /// Which part.
        what: String,
        /// What it may be.
        expected: &'static str,
        /// What it is.
        found: String,
    },
    /// A key of the metadata stands twice.
    #[error("key {key} stands twice")]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// A key that says what the file is, and is missing.
    #[error("key {key} is missing, expected {expected}")]
    MissingKey {
        /// The key.
        key: &'static str,
        /// What it has to be.
        expected: &'static str,
    },
    /// A key about the adapter that is not known: it may change what the adapter does.
    #[error("key {key} is not known")]
    UnknownKey {
        /// The key.
        key: String,
    },
    /// A model of an architecture whose adapters are not read.
    #[error("general.architecture is {found}, read are {}", super::names::known())]
    Architecture {
        /// As the file says.
        found: String,
    },
    /// A tensor that is not where the one before it ends.
    #[error("tensor {tensor} begins at {found}, expected at {expected}")]
    Offset {
        /// The tensor.
        tensor: String,
        /// The first multiple of the alignment behind the tensor before it.
        expected: u64,
        /// Where it begins, in the data.
        found: u64,
    },
    /// Head counts that do not go with the rows of q or k.
    #[error("{site}: {out_features} rows are not {num_heads} heads of an even size")]
    Heads {
        /// The site.
        site: Site,
        /// Rows of B.
        out_features: usize,
        /// Heads of the base model.
        num_heads: usize,
    },
    /// A tensor without a place in models of this architecture.
    #[error("tensor {tensor}: {what} ({architecture})")]
    Tensor {
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        what: &'static str,
        /// The architecture.
        architecture: &'static str,
    },
}
