//! The plan of a safetensors file: which tensor stands where, checked before a byte of data is read.
//!
//! An own reader of the header, since a refusal must name the tensor at fault, and since a name that stands twice must
//! be refused: the common readers keep the last. A plan that passes covers the data of its file exactly, without gaps
//! and without overlaps.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read};

use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, Visitor};

use crate::error::{Reasons, shown};
use crate::reason::Reason;

/// The longest header that the format allows.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Bytes before the header: its length.
const LENGTH_BYTES: u64 = 8;

/// Every dtype of the format with the bits of one element.
const DTYPES: [(&str, u64); 20] = [
    ("BOOL", 8),
    ("F4", 4),
    ("F6_E2M3", 6),
    ("F6_E3M2", 6),
    ("U8", 8),
    ("I8", 8),
    ("F8_E5M2", 8),
    ("F8_E4M3", 8),
    ("F8_E8M0", 8),
    ("I16", 16),
    ("U16", 16),
    ("F16", 16),
    ("BF16", 16),
    ("I32", 32),
    ("U32", 32),
    ("F32", 32),
    ("C64", 64),
    ("F64", 64),
    ("I64", 64),
    ("U64", 64),
];

/// One tensor of a file.
#[derive(Clone, Debug)]
pub(crate) struct TensorPlan {
    pub(crate) name: String,
    /// The name that PEFT gives such a tensor, where the file names it in another way.
    pub(crate) peft_name: Option<String>,
    /// Name of its dtype in the format.
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<u64>,
    /// The file holds the transpose: a matrix of `shape` stored column after column.
    pub(crate) transposed: bool,
    /// Offsets in the data.
    pub(crate) begin: u64,
    pub(crate) end: u64,
}

impl TensorPlan {
    /// The name by PEFT's naming.
    pub(crate) fn key(&self) -> &str {
        self.peft_name.as_deref().unwrap_or(&self.name)
    }
}

/// The tensors of a file, by name.
#[derive(Debug)]
pub(crate) struct FilePlan {
    /// The file's name in messages.
    pub(crate) file: &'static str,
    pub(crate) tensors: Vec<TensorPlan>,
    /// Where the data begins in the file.
    pub(crate) data_offset: u64,
}

/// Reads and checks the header at the start of `file`, a file of `file_bytes` bytes.
pub(crate) fn read_plan(
    file: &mut impl Read,
    file_bytes: u64,
    name: &'static str,
    reasons: &mut Reasons,
) -> Option<FilePlan> {
    let header = match read_header(file, file_bytes) {
        Ok(header) => header,
        Err(reason) => {
            reasons.push(name, reason);
            return None;
        }
    };
    let entries = match serde_json::from_slice::<Header>(&header) {
        Ok(Header(entries)) => entries,
        Err(error) => {
            reasons.push(name, Reason::BadHeader { message: shown(&error.to_string()) });
            return None;
        }
    };
    let data_offset = LENGTH_BYTES + header.len() as u64;
    let found = check(entries, file_bytes, data_offset);
    match found {
        Ok(tensors) => Some(FilePlan { file: name, tensors, data_offset }),
        Err(found) => {
            found.into_iter().for_each(|reason| reasons.push(name, reason));
            None
        }
    }
}

fn read_header(file: &mut impl Read, file_bytes: u64) -> Result<Vec<u8>, Reason> {
    let truncated = |expected_bytes| Reason::Truncated { expected_bytes, found_bytes: file_bytes };
    if file_bytes < LENGTH_BYTES {
        return Err(truncated(LENGTH_BYTES));
    }
    let unreadable = |error: io::Error| Reason::Unreadable { message: error.to_string() };
    let mut length = [0; LENGTH_BYTES as usize];
    file.read_exact(&mut length).map_err(unreadable)?;
    let header_bytes = u64::from_le_bytes(length);
    if header_bytes > MAX_HEADER_BYTES {
        return Err(Reason::HeaderTooLong { found_bytes: header_bytes, limit_bytes: MAX_HEADER_BYTES });
    }
    if header_bytes > file_bytes - LENGTH_BYTES {
        return Err(truncated(LENGTH_BYTES + header_bytes));
    }
    let mut header = Vec::new();
    file.take(header_bytes).read_to_end(&mut header).map_err(unreadable)?;
    if header.len() as u64 == header_bytes { Ok(header) } else { Err(truncated(LENGTH_BYTES + header_bytes)) }
}

/// Checks names, shapes and offsets; gives the tensors by name.
fn check(entries: Vec<(String, Entry)>, file_bytes: u64, data_offset: u64) -> Result<Vec<TensorPlan>, Vec<Reason>> {
    let mut reasons = Vec::new();
    let mut tensors = Vec::with_capacity(entries.len());
    for (name, entry) in entries {
        let Entry { dtype, shape, data_offsets: [begin, end] } = entry;
        let tensor = || shown(&name);
        let Some(&(known, bits)) = DTYPES.iter().find(|(known, _)| *known == dtype) else {
            reasons.push(Reason::UnsupportedDtype { tensor: tensor(), dtype: shown(&dtype) });
            continue;
        };
        match end.checked_sub(begin) {
            None => reasons.push(Reason::BadOffsets { tensor: tensor(), begin, end }),
            Some(found_bytes) if byte_count(&shape, bits) != Some(found_bytes) => {
                let shape = shape.iter().copied().take(MAX_SHOWN_DIMS).collect();
                reasons.push(Reason::WrongByteCount { tensor: tensor(), shape, dtype, found_bytes });
            }
            Some(_) => {}
        }
        tensors.push(TensorPlan { name, peft_name: None, dtype: known, shape, transposed: false, begin, end });
    }
    if !reasons.is_empty() {
        return Err(reasons);
    }
    tensors.sort_by(|a, b| (a.begin, a.end, &a.name).cmp(&(b.begin, b.end, &b.name)));
    let mut expected = 0;
    for tensor in &tensors {
        if tensor.begin != expected {
            reasons.push(Reason::BadStart { tensor: shown(&tensor.name), expected, found: tensor.begin });
        }
        expected = expected.max(tensor.end);
    }
    let expected_bytes = data_offset.saturating_add(expected);
    if expected_bytes > file_bytes {
        reasons.push(Reason::Truncated { expected_bytes, found_bytes: file_bytes });
    } else if expected_bytes < file_bytes {
        reasons.push(Reason::TrailingBytes { expected_bytes, found_bytes: file_bytes });
    }
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    for pair in tensors.windows(2) {
        if pair[0].name == pair[1].name {
            reasons.push(Reason::DuplicateTensor { tensor: shown(&pair[0].name) });
        }
    }
    if reasons.is_empty() { Ok(tensors) } else { Err(reasons) }
}

/// Dimensions of a wrong shape that a reason holds.
const MAX_SHOWN_DIMS: usize = 8;

fn byte_count(shape: &[u64], bits: u64) -> Option<u64> {
    let elements = shape.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim))?;
    let bits = elements.checked_mul(bits)?;
    bits.is_multiple_of(8).then_some(bits / 8)
}

/// One tensor as the header describes it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The header: tensors in the order of the file, duplicates included, so that they can be refused.
struct Header(Vec<(String, Entry)>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let mut entries = Vec::new();
        let mut has_metadata = false;
        while let Some(name) = map.next_key::<String>()? {
            if name != "__metadata__" {
                entries.push((name, map.next_value()?));
            } else if has_metadata {
                return Err(A::Error::custom("__metadata__ stands twice"));
            } else {
                // Says which framework wrote the file; nothing that an adapter means. mlx writes null.
                map.next_value::<Option<BTreeMap<String, String>>>()?;
                has_metadata = true;
            }
        }
        Ok(Header(entries))
    }
}
