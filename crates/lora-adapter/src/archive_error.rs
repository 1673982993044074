//! What is wrong with an archive of torch, with the numbers.

use thiserror::Error;

/// Why an archive of torch is not read. Never worth a retry with the same file.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ArchiveError {
    /// The format of torch before 1.6, which is one pickle after the other.
    #[error("the format of torch before 1.6 is not read; load it with torch and save it as safetensors")]
    OldTorch,
    /// Something else, or cut at the end.
    #[error("not a whole zip archive as torch.save writes it ({what})")]
    NotAnArchive {
        /// What is missing or wrong.
        what: &'static str,
    },
    /// An entry that torch did not write in this way.
    #[error("entry {entry} of the archive: {what}")]
    BadEntry {
        /// Its name.
        entry: String,
        /// What is wrong with it.
        what: &'static str,
    },
    /// The pickle, or the archive's directory, is longer than any adapter's.
    #[error("{what} has {found_bytes} bytes, at most {limit_bytes} are read")]
    TooLong {
        /// Which.
        what: &'static str,
        /// Its length.
        found_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// An entry of the archive that the pickle names is not there.
    #[error("tensor {tensor}: entry {entry} of the archive is missing")]
    MissingStorage {
        /// The tensor.
        tensor: String,
        /// The entry.
        entry: String,
    },
    /// An entry is not as long as the pickle says.
    #[error("tensor {tensor}: its storage has {found_bytes} bytes, the pickle says {expected_bytes:?}")]
    StorageBytes {
        /// The tensor.
        tensor: String,
        /// Bytes by the pickle; none where no number holds them.
        expected_bytes: Option<u64>,
        /// Bytes of the entry.
        found_bytes: u64,
    },
    /// A tensor goes on after the end of its storage.
    #[error(
        "tensor {tensor}: shape {shape:?} from element {offset} on does not fit a storage of {storage_bytes} bytes"
    )]
    OutsideStorage {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
        /// Its first element.
        offset: u64,
        /// Bytes of the storage.
        storage_bytes: u64,
    },
    /// Elements that do not stand one after the other.
    #[error("tensor {tensor}: shape {shape:?} with strides {strides:?} is a view with gaps; save it contiguous")]
    Strided {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
        /// Its strides in elements.
        strides: Vec<u64>,
    },
    /// Many tensors over the same bytes.
    #[error("the tensors have more bytes together than the file, {file_bytes}: too many share a storage")]
    Shared {
        /// Bytes of the file.
        file_bytes: u64,
    },
}
