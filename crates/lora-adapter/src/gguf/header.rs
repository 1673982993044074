//! The header of a GGUF file: its metadata and which tensor stands where, read in one pass.
//!
//! The layout is that of ggml's `docs/gguf.md`. Nothing is believed before it is compared with the bytes that are left,
//! and nothing is kept that an adapter has no use for: an array of a million strings costs its reading only. The model
//! engine has a reader of its own, which borrows from a mapped file and knows quantised types; this one reads through a
//! file that may change under it.

use std::collections::BTreeMap;
use std::io::{BufReader, Read};

use super::error::GgufError;
use crate::error::shown;
use crate::reason::Reason;

/// Longest key or name of a tensor, in bytes. ggml's own limits are smaller.
const MAX_NAME_BYTES: u64 = 1024;

/// Longest text of the metadata that is kept. Longer ones are read over.
const MAX_TEXT_BYTES: u64 = 64 << 10;

/// Most tokens of a list that are kept. Longer ones are read over.
const MAX_TOKENS: u64 = 64 << 10;

/// Lists in lists: no file in use has any.
const MAX_DEPTH: usize = 4;

/// Dimensions of a tensor in ggml.
const MAX_DIMS: u32 = 4;

const ALIGNMENT: &str = "general.alignment";
const DEFAULT_ALIGNMENT: u64 = 32;

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    Integer(i128),
    Float(f64),
    Bool(bool),
    Text(String),
    /// A list of unsigned 32-bit numbers: tokens.
    Tokens(Vec<u32>),
    /// A long text or list, or a list of anything else.
    Other,
}

impl Value {
    /// For messages.
    pub(super) fn show(&self) -> String {
        match self {
            Value::Integer(value) => value.to_string(),
            Value::Float(value) => value.to_string(),
            Value::Bool(value) => value.to_string(),
            Value::Text(text) => shown(text),
            Value::Tokens(tokens) => format!("a list of {} numbers", tokens.len()),
            Value::Other => "a list or a long text".to_owned(),
        }
    }
}

/// A tensor as the header describes it.
#[derive(Clone, Debug)]
pub(super) struct Tensor {
    pub(super) name: String,
    /// Slowest first; the file has the fastest first.
    pub(super) shape: Vec<u64>,
    /// ggml's number of the type.
    pub(super) code: u32,
    /// In the data.
    pub(super) offset: u64,
}

/// Everything before the data.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) values: BTreeMap<String, Value>,
    pub(super) tensors: Vec<Tensor>,
    pub(super) alignment: u64,
    /// Where the data begins.
    pub(super) data_offset: u64,
}

impl Header {
    pub(super) fn read(file: &mut impl Read, file_bytes: u64) -> Result<Header, Reason> {
        let mut input = Input { reader: BufReader::with_capacity(64 << 10, file), position: 0, file_bytes };
        if file_bytes < 4 || &input.array::<4>(&"the magic")? != b"GGUF" {
            return Err(GgufError::NotGguf.into());
        }
        let version = input.u32(&"the version")?;
        if !(2..=3).contains(&version) {
            return Err(GgufError::Version { found: version }.into());
        }
        let num_tensors = input.u64(&"the number of tensors")?;
        let num_keys = input.u64(&"the number of keys")?;
        // The least that an entry takes: length of its name, type, value; and length, dimensions, type, offset.
        input.expect(num_keys.saturating_mul(8 + 4 + 1), &"the metadata")?;
        input.expect(num_tensors.saturating_mul(8 + 4 + 4 + 8), &"the list of tensors")?;
        let mut values = BTreeMap::new();
        for _ in 0..num_keys {
            let key = input.name(&"a key")?;
            let code = input.u32(&key)?;
            let value = input.value(code, &key, MAX_DEPTH)?;
            if values.contains_key(&key) {
                return Err(GgufError::DuplicateKey { key: shown(&key) }.into());
            }
            values.insert(key, value);
        }
        let alignment = match values.get(ALIGNMENT) {
            None => DEFAULT_ALIGNMENT,
            Some(Value::Integer(value)) if (1..=1 << 20).contains(value) && value.count_ones() == 1 => *value as u64,
            Some(other) => return Err(bad(&ALIGNMENT, "a power of two up to 2^20", other.show())),
        };
        let mut tensors = Vec::new();
        for _ in 0..num_tensors {
            tensors.push(input.tensor()?);
        }
        let data_offset = input.position.next_multiple_of(alignment);
        Ok(Header { values, tensors, alignment, data_offset })
    }
}

/// What a part of the header is called in messages, put together only when it is needed.
trait What {
    fn text(&self) -> String;
}

impl What for &str {
    fn text(&self) -> String {
        (*self).to_owned()
    }
}

impl What for String {
    fn text(&self) -> String {
        shown(self)
    }
}

fn bad(what: &dyn What, expected: &'static str, found: String) -> Reason {
    GgufError::Bad { what: what.text(), expected, found }.into()
}

/// The bytes from a position on.
struct Input<R> {
    reader: BufReader<R>,
    position: u64,
    file_bytes: u64,
}

impl<R: Read> Input<R> {
    /// Refuses what is longer than the rest of the file.
    fn expect(&self, needed_bytes: u64, what: &dyn What) -> Result<(), Reason> {
        if needed_bytes <= self.file_bytes.saturating_sub(self.position) {
            return Ok(());
        }
        let (offset, file_bytes) = (self.position, self.file_bytes);
        Err(GgufError::Truncated { what: what.text(), offset, needed_bytes, file_bytes }.into())
    }

    fn fill(&mut self, buffer: &mut [u8], what: &dyn What) -> Result<(), Reason> {
        self.expect(buffer.len() as u64, what)?;
        self.reader.read_exact(buffer).map_err(|error| Reason::Unreadable { message: error.to_string() })?;
        self.position += buffer.len() as u64;
        Ok(())
    }

    fn skip(&mut self, num_bytes: u64, what: &dyn What) -> Result<(), Reason> {
        self.expect(num_bytes, what)?;
        let mut rest = self.reader.by_ref().take(num_bytes);
        match std::io::copy(&mut rest, &mut std::io::sink()) {
            Ok(found) if found == num_bytes => self.position += num_bytes,
            // The file was as long as it said a moment ago.
            Ok(found) => {
                let (expected_bytes, found_bytes) = (self.position + num_bytes, self.position + found);
                return Err(Reason::Truncated { expected_bytes, found_bytes });
            }
            Err(error) => return Err(Reason::Unreadable { message: error.to_string() }),
        }
        Ok(())
    }

    fn array<const N: usize>(&mut self, what: &dyn What) -> Result<[u8; N], Reason> {
        let mut bytes = [0; N];
        self.fill(&mut bytes, what)?;
        Ok(bytes)
    }

    fn u32(&mut self, what: &dyn What) -> Result<u32, Reason> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &dyn What) -> Result<u64, Reason> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A text of at most `max_bytes`; none where it is longer, and then it is read over.
    fn text(&mut self, max_bytes: u64, what: &dyn What) -> Result<Option<String>, Reason> {
        let num_bytes = self.u64(what)?;
        if num_bytes > max_bytes {
            self.skip(num_bytes, what)?;
            return Ok(None);
        }
        self.expect(num_bytes, what)?;
        let mut bytes = vec![0; num_bytes as usize];
        self.fill(&mut bytes, what)?;
        let text = String::from_utf8(bytes);
        text.map(Some).map_err(|_| bad(what, "UTF-8", "other bytes".to_owned()))
    }

    fn name(&mut self, what: &dyn What) -> Result<String, Reason> {
        let name = self.text(MAX_NAME_BYTES, what)?;
        name.filter(|name| !name.is_empty())
            .ok_or_else(|| bad(what, "a name of 1 to 1024 bytes", "an empty or a longer one".to_owned()))
    }

    fn value(&mut self, code: u32, key: &String, depth: usize) -> Result<Value, Reason> {
        Ok(match code {
            0..=5 | 10 | 11 => Value::Integer(self.integer(code, key)?),
            6 => Value::Float(f32::from_le_bytes(self.array(key)?).into()),
            12 => Value::Float(f64::from_le_bytes(self.array(key)?)),
            7 => match self.array(key)? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [other] => return Err(bad(key, "0 or 1", other.to_string())),
            },
            8 => self.text(MAX_TEXT_BYTES, key)?.map_or(Value::Other, Value::Text),
            9 => self.list(key, depth)?,
            other => return Err(bad(key, "a type of value from 0 to 12", other.to_string())),
        })
    }

    fn integer(&mut self, code: u32, key: &String) -> Result<i128, Reason> {
        Ok(match code {
            0 => u8::from_le_bytes(self.array(key)?).into(),
            1 => i8::from_le_bytes(self.array(key)?).into(),
            2 => u16::from_le_bytes(self.array(key)?).into(),
            3 => i16::from_le_bytes(self.array(key)?).into(),
            4 => self.u32(key)?.into(),
            5 => i32::from_le_bytes(self.array(key)?).into(),
            10 => self.u64(key)?.into(),
            _ => i64::from_le_bytes(self.array(key)?).into(),
        })
    }

    fn list(&mut self, key: &String, depth: usize) -> Result<Value, Reason> {
        let Some(depth) = depth.checked_sub(1) else {
            return Err(bad(key, "at most 4 lists in each other", "more".to_owned()));
        };
        let code = self.u32(key)?;
        let length = self.u64(key)?;
        let element_bytes = match code {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            10..=12 => 8,
            // At least the length of a text, and type and length of a list.
            8 => 8,
            9 => 12,
            other => return Err(bad(key, "a type of value from 0 to 12", other.to_string())),
        };
        let num_bytes = length.saturating_mul(element_bytes);
        self.expect(num_bytes, key)?;
        match code {
            8 | 9 => {
                for _ in 0..length {
                    match code {
                        8 => drop(self.text(0, key)?),
                        _ => drop(self.list(key, depth)?),
                    }
                }
                Ok(Value::Other)
            }
            4 if length <= MAX_TOKENS => {
                let tokens: Result<_, Reason> = (0..length).map(|_| self.u32(key)).collect();
                Ok(Value::Tokens(tokens?))
            }
            _ => {
                self.skip(num_bytes, key)?;
                Ok(Value::Other)
            }
        }
    }

    fn tensor(&mut self) -> Result<Tensor, Reason> {
        let name = self.name(&"the name of a tensor")?;
        let num_dims = self.u32(&name)?;
        if !(1..=MAX_DIMS).contains(&num_dims) {
            return Err(bad(&name, "1 to 4 dimensions", num_dims.to_string()));
        }
        let mut shape = Vec::with_capacity(num_dims as usize);
        for _ in 0..num_dims {
            shape.push(self.u64(&name)?);
        }
        shape.reverse();
        Ok(Tensor { code: self.u32(&name)?, offset: self.u64(&name)?, name, shape })
    }
}
