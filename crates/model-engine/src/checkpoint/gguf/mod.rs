//! GGUF files: metadata and tensors, versions 2 and 3, little endian.
//!
//! The layout is the one described in ggml's `docs/gguf.md`. A file is untrusted: [`GgufFile::parse`] walks all of it
//! once and checks every length against the bytes that are there before anything is allocated, so that what it
//! returns can be read without further doubt. Big-endian files, version 1 and split files are refused by name.

mod block;
pub(crate) mod config;
mod cursor;
pub(crate) mod source;
mod value;

use std::collections::BTreeMap;
use std::ops::Range;

pub use block::GgmlType;
use cursor::Cursor;
use value::ValueType;
pub use value::{MetadataArray, MetadataValue};

const MAGIC: &[u8; 4] = b"GGUF";
const DEFAULT_ALIGNMENT: u64 = 32;
/// Every dimension count that ggml can hold.
const MAX_DIMENSIONS: u32 = 4;
/// Arrays nest this deep at most; no file in use nests at all.
const MAX_ARRAY_DEPTH: u32 = 4;
/// Far above every name in use; keeps messages readable.
const MAX_NAME_BYTES: usize = 1024;

/// Why a file is not GGUF, or is GGUF of a kind that is not read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The first bytes are another format's.
    #[error("not a GGUF file: it begins with \"{}\"", found.escape_ascii())]
    Magic {
        /// The first bytes, at most four.
        found: Vec<u8>,
    },
    /// Another version of the format.
    #[error("GGUF version {found} (supported: 2 and 3, little endian)")]
    Version {
        /// The version that the file names.
        found: u32,
    },
    /// The file ends inside something.
    #[error("the file ends at byte {file_bytes} inside {what}, which needs {needed} bytes from byte {offset} on")]
    Truncated {
        /// What was being read.
        what: String,
        /// Where it begins.
        offset: usize,
        /// How long it says it is.
        needed: u64,
        /// How long the file is.
        file_bytes: usize,
    },
    /// Something is not as the format demands.
    #[error("{what} is {found}, expected {expected}")]
    Invalid {
        /// Which part.
        what: String,
        /// What it is.
        found: String,
        /// What it has to be.
        expected: String,
    },
    /// Two entries of one name.
    #[error("{what} {name} occurs twice")]
    Duplicate {
        /// Key or tensor.
        what: &'static str,
        /// Its name.
        name: String,
    },
}

impl GgufError {
    fn invalid(what: impl Into<String>, found: impl ToString, expected: impl Into<String>) -> Self {
        Self::Invalid { what: what.into(), found: found.to_string(), expected: expected.into() }
    }
}

/// A tensor's entry in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GgufTensor {
    /// Sizes, slowest first (the file writes the fastest first).
    pub shape: Vec<usize>,
    /// How the elements are stored.
    pub ggml_type: GgmlType,
    /// Number of elements.
    pub num_elements: usize,
    /// Where the data lie in the file.
    range: Range<usize>,
}

/// A parsed file over its bytes.
#[derive(Debug)]
pub struct GgufFile<'a> {
    bytes: &'a [u8],
    metadata: BTreeMap<&'a str, MetadataValue<'a>>,
    tensors: BTreeMap<&'a str, GgufTensor>,
}

impl<'a> GgufFile<'a> {
    /// Parses and checks `bytes`, the whole file.
    ///
    /// # Errors
    /// [`GgufError`] for whatever contradicts the format or the length of the file.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, GgufError> {
        let mut cursor = Cursor::new(bytes);
        if !bytes.starts_with(MAGIC) {
            return Err(GgufError::Magic { found: bytes[..bytes.len().min(MAGIC.len())].to_vec() });
        }
        cursor.take(MAGIC.len() as u64, "the magic")?;
        let version = cursor.u32("the version")?;
        if !(2..=3).contains(&version) {
            return Err(GgufError::Version { found: version });
        }
        let num_tensors = cursor.u64("the number of tensors")?;
        let num_keys = cursor.u64("the number of metadata keys")?;
        // The fewest bytes of an entry: name length, type, value; name length, dimensions, type, offset.
        cursor.check_count(num_keys, 8 + 4 + 1, "the metadata")?;
        cursor.check_count(num_tensors, 8 + 4 + 4 + 8, "the tensor list")?;

        let mut metadata = BTreeMap::new();
        for _ in 0..num_keys {
            let key = cursor.name("a metadata key")?;
            let value_type = ValueType::from_code(cursor.u32(key)?, key)?;
            let value = cursor.value(value_type, key, MAX_ARRAY_DEPTH)?;
            if metadata.insert(key, value).is_some() {
                return Err(GgufError::Duplicate { what: "metadata key", name: key.to_owned() });
            }
        }
        let alignment = match metadata.get("general.alignment") {
            None => DEFAULT_ALIGNMENT,
            Some(value) => match value.as_u64() {
                Some(alignment) if alignment.is_power_of_two() && alignment <= 1 << 30 => alignment,
                _ => return Err(GgufError::invalid("general.alignment", value.summary(), "a power of two")),
            },
        };
        let mut entries = BTreeMap::new();
        for _ in 0..num_tensors {
            let name = cursor.name("a tensor name")?;
            let entry = Entry::read(&mut cursor, name)?;
            if entries.insert(name, entry).is_some() {
                return Err(GgufError::Duplicate { what: "tensor", name: name.to_owned() });
            }
        }
        let data_offset = (cursor.position() as u64).next_multiple_of(alignment);
        let tensors = entries
            .into_iter()
            .map(|(name, entry)| Ok((name, entry.place(name, data_offset, alignment, bytes.len())?)))
            .collect::<Result<BTreeMap<_, _>, GgufError>>()?;
        refuse_overlaps(&tensors)?;
        Ok(Self { bytes, metadata, tensors })
    }

    /// The metadata value under `key`.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&MetadataValue<'a>> {
        self.metadata.get(key)
    }

    /// All metadata, sorted by key.
    pub fn metadata(&self) -> impl Iterator<Item = (&'a str, &MetadataValue<'a>)> {
        self.metadata.iter().map(|(key, value)| (*key, value))
    }

    /// The entry of tensor `name`.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&GgufTensor> {
        self.tensors.get(name)
    }

    /// All tensors, sorted by name.
    pub fn tensors(&self) -> impl Iterator<Item = (&'a str, &GgufTensor)> {
        self.tensors.iter().map(|(name, tensor)| (*name, tensor))
    }

    /// The stored bytes of `tensor`, an entry of this file.
    #[must_use]
    pub fn data(&self, tensor: &GgufTensor) -> &'a [u8] {
        &self.bytes[tensor.range.clone()]
    }

    /// All elements of `tensor`, an entry of this file, as f32 in storage order.
    #[must_use]
    pub fn dequantize(&self, tensor: &GgufTensor) -> Vec<f32> {
        tensor.ggml_type.dequantize(self.data(tensor), tensor.num_elements)
    }
}

/// A tensor's entry as written, before its data are found in the file.
struct Entry {
    shape: Vec<usize>,
    num_elements: usize,
    ggml_type: GgmlType,
    offset: u64,
}

impl Entry {
    fn read(cursor: &mut Cursor<'_>, name: &str) -> Result<Self, GgufError> {
        let num_dimensions = cursor.u32(name)?;
        if !(1..=MAX_DIMENSIONS).contains(&num_dimensions) {
            let what = format!("the number of dimensions of {name}");
            return Err(GgufError::invalid(what, num_dimensions, format!("1 to {MAX_DIMENSIONS}")));
        }
        let mut sizes = Vec::new();
        for _ in 0..num_dimensions {
            sizes.push(cursor.u64(name)?);
        }
        let num_elements = sizes
            .iter()
            .try_fold(1usize, |product, &size| product.checked_mul(usize::try_from(size).ok()?))
            .ok_or_else(|| {
                GgufError::invalid(format!("the shape of {name}"), format!("{sizes:?}"), "a size that fits")
            })?;
        let code = cursor.u32(name)?;
        let ggml_type = GgmlType::from_code(code)
            .ok_or_else(|| GgufError::invalid(format!("the type of tensor {name}"), code, GgmlType::supported()))?;
        let offset = cursor.u64(name)?;
        let shape = sizes.iter().rev().map(|&size| size as usize).collect();
        Ok(Self { shape, num_elements, ggml_type, offset })
    }

    fn place(self, name: &str, data_offset: u64, alignment: u64, file_bytes: usize) -> Result<GgufTensor, GgufError> {
        let Self { shape, num_elements, ggml_type, offset } = self;
        if !offset.is_multiple_of(alignment) {
            let expected = format!("a multiple of {alignment}");
            return Err(GgufError::invalid(format!("the offset of {name}"), offset, expected));
        }
        let row = shape.last().copied().unwrap_or_default();
        if !row.is_multiple_of(ggml_type.block_elements()) {
            let expected = format!("a multiple of {} ({})", ggml_type.block_elements(), ggml_type.name());
            return Err(GgufError::invalid(format!("the row length of {name}"), row, expected));
        }
        let num_blocks = num_elements / ggml_type.block_elements();
        let size_bytes = (num_blocks as u64).checked_mul(ggml_type.block_bytes() as u64);
        let start = data_offset.checked_add(offset);
        let truncated = |needed: u64| GgufError::Truncated {
            what: format!("tensor {name}"),
            offset: start.and_then(|start| usize::try_from(start).ok()).unwrap_or(usize::MAX),
            needed,
            file_bytes,
        };
        let size_bytes = size_bytes.ok_or_else(|| truncated(u64::MAX))?;
        let end = start.and_then(|start| start.checked_add(size_bytes));
        match (start, end) {
            (Some(start), Some(end)) if end <= file_bytes as u64 => {
                Ok(GgufTensor { shape, ggml_type, num_elements, range: start as usize..end as usize })
            }
            _ => Err(truncated(size_bytes)),
        }
    }
}

/// No writer lays two tensors over each other; a file that does is not what it says.
fn refuse_overlaps(tensors: &BTreeMap<&str, GgufTensor>) -> Result<(), GgufError> {
    let mut ranges: Vec<_> =
        tensors.iter().map(|(name, tensor)| (tensor.range.start, tensor.range.end, name)).collect();
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        let ((_, end, first), (start, _, second)) = (pair[0], pair[1]);
        if start < end {
            let expected = format!("at least {end}, where {first} ends");
            return Err(GgufError::invalid(format!("the start of {second}"), start, expected));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
