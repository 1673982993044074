//! The tensors that a pickle of torch describes, read by a machine that can do nothing else.
//!
//! A pickle is a program. The opcodes here are those that `torch.save` writes for a dictionary of tensors; the names
//! that it may call are a list in `names`, and calling one makes a description of a tensor, never the thing itself. No
//! other opcode and no other name is followed, so no code of the file runs. Values live in flat tables: a value that
//! holds itself costs nothing, and nothing here recurses. Strings stay in the bytes of the file.
//! What the calls make is in `calls`.

mod calls;
mod error;
mod names;

use std::collections::HashMap;

pub use error::PickleError;

use crate::error::shown;
use names::{Dtype, Global};

/// Values on the stack at once: `torch.save` needs about two thousand, a batch of a thousand entries.
const MAX_STACK: usize = 10_000;

/// Bytes of a pickle for each value that is kept in tuples, dictionaries and the memo. `torch.save` writes three.
const BYTES_PER_VALUE: usize = 2;

/// A tensor as the pickle describes it. Nothing is checked against the archive.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PickledTensor<'a> {
    pub(crate) name: &'a str,
    pub(crate) tensor: Tensor<'a>,
}

/// Elements in a storage.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tensor<'a> {
    pub(crate) storage: Storage<'a>,
    pub(crate) dtype: Dtype,
    /// Index of the first element in the storage.
    pub(crate) offset: u64,
    pub(crate) shape: Vec<u64>,
    /// Elements from one index to the next, by dimension.
    pub(crate) strides: Vec<u64>,
}

/// An entry of the archive that holds elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Storage<'a> {
    pub(crate) key: &'a str,
    /// None for a storage of bytes.
    dtype: Option<Dtype>,
    num_elements: u64,
}

impl Storage<'_> {
    /// Its length by the pickle; none where no length can be that large.
    pub(crate) fn bytes(&self) -> Option<u64> {
        self.num_elements.checked_mul(self.dtype.map_or(1, |dtype| dtype.bytes))
    }
}

/// What the machine works on. Indices lead into its tables.
#[derive(Clone, Copy, Debug)]
enum Value<'a> {
    None,
    Bool,
    Int(i64),
    Float,
    Str(&'a str),
    /// First item and number of items.
    Tuple(usize, usize),
    /// What is in a list decides nothing.
    List,
    Dict(usize),
    Global(Global),
    Storage(usize),
    Tensor(usize),
}

impl Value<'_> {
    fn kind(self) -> &'static str {
        match self {
            Value::None => "None",
            Value::Bool => "a boolean",
            Value::Int(_) | Value::Float => "a number",
            Value::Str(_) => "a string",
            Value::Tuple(..) => "a tuple",
            Value::List => "a list",
            Value::Dict(_) => "a dictionary",
            Value::Global(_) => "a name of Python code",
            Value::Storage(_) => "a storage",
            Value::Tensor(_) => "a tensor",
        }
    }
}

/// Reads a pickle: the entries of its dictionary in the order of the file.
///
/// # Errors
/// Anything but a dictionary of named tensors, and any opcode or name that such a dictionary does not need.
pub(crate) fn read(bytes: &[u8]) -> Result<Vec<PickledTensor<'_>>, PickleError> {
    let mut machine = Machine {
        bytes,
        at: 0,
        opcode_at: 0,
        stack: Vec::new(),
        marks: Vec::new(),
        memo: HashMap::new(),
        items: Vec::new(),
        dicts: Vec::new(),
        tensors: Vec::new(),
        storages: Vec::new(),
        num_values: 0,
        max_values: 1000 + bytes.len() / BYTES_PER_VALUE,
    };
    let top = machine.run()?;
    let Value::Dict(dict) = top else { return Err(PickleError::NotADictionary { found: top.kind() }) };
    let entries = machine.dicts.get(dict).map(Vec::as_slice).unwrap_or_default();
    entries.iter().map(|&(key, value)| machine.named_tensor(key, value)).collect()
}

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Where the opcode under way stands, for messages.
    opcode_at: usize,
    stack: Vec<Value<'a>>,
    /// Heights of the stack at its marks.
    marks: Vec<usize>,
    memo: HashMap<u32, Value<'a>>,
    /// Items of all tuples.
    items: Vec<Value<'a>>,
    dicts: Vec<Vec<(Value<'a>, Value<'a>)>>,
    tensors: Vec<Tensor<'a>>,
    storages: Vec<Storage<'a>>,
    num_values: usize,
    max_values: usize,
}

impl<'a> Machine<'a> {
    fn named_tensor(&self, key: Value<'a>, value: Value<'a>) -> Result<PickledTensor<'a>, PickleError> {
        let Value::Str(name) = key else {
            return Err(PickleError::NotATensor { entry: key.kind().to_owned(), found: value.kind() });
        };
        match value {
            Value::Tensor(index) if let Some(tensor) = self.tensors.get(index) => {
                Ok(PickledTensor { name, tensor: tensor.clone() })
            }
            other => Err(PickleError::NotATensor { entry: shown(name), found: other.kind() }),
        }
    }

    /// Runs to the end mark; what is left on the stack.
    fn run(&mut self) -> Result<Value<'a>, PickleError> {
        loop {
            self.opcode_at = self.at;
            let [opcode] = self.array()?;
            match opcode {
                // PROTO, and FRAME: lengths of parts that are read one after the other anyway.
                0x80 => drop(self.array::<1>()?),
                0x95 => drop(self.array::<8>()?),
                b'(' => self.mark()?,
                b'N' => self.push(Value::None)?,
                0x88 | 0x89 => self.push(Value::Bool)?,
                b'K' => {
                    let [value] = self.array()?;
                    self.push(Value::Int(value.into()))?;
                }
                b'M' => {
                    let value = u16::from_le_bytes(self.array()?);
                    self.push(Value::Int(value.into()))?;
                }
                b'J' => {
                    let value = i32::from_le_bytes(self.array()?);
                    self.push(Value::Int(value.into()))?;
                }
                0x8a => {
                    let value = self.long()?;
                    self.push(Value::Int(value))?;
                }
                b'G' => {
                    self.array::<8>()?;
                    self.push(Value::Float)?;
                }
                b'X' => {
                    let length = u32::from_le_bytes(self.array()?);
                    self.text(length as usize)?;
                }
                0x8c => {
                    let [length] = self.array()?;
                    self.text(length.into())?;
                }
                b')' => self.tuple(0)?,
                0x85 => self.tuple(1)?,
                0x86 => self.tuple(2)?,
                0x87 => self.tuple(3)?,
                b't' => {
                    let count = self.since_mark()?;
                    self.tuple(count)?;
                }
                b']' => self.push(Value::List)?,
                b'a' => {
                    self.pop()?;
                    self.expect_list()?;
                }
                b'e' => {
                    let count = self.since_mark()?;
                    self.stack.truncate(self.stack.len() - count);
                    self.expect_list()?;
                }
                b'}' => self.dict()?,
                b's' => self.set_items(2)?,
                b'u' => {
                    let count = self.since_mark()?;
                    self.set_items(count)?;
                }
                b'q' => {
                    let [index] = self.array()?;
                    self.put(index.into())?;
                }
                b'r' => {
                    let index = u32::from_le_bytes(self.array()?);
                    self.put(index)?;
                }
                0x94 => self.put(u32::try_from(self.memo.len()).unwrap_or(u32::MAX))?,
                b'h' => {
                    let [index] = self.array()?;
                    self.get(index.into())?;
                }
                b'j' => {
                    let index = u32::from_le_bytes(self.array()?);
                    self.get(index)?;
                }
                b'c' => {
                    let (module, name) = (self.line()?, self.line()?);
                    self.global(module, name)?;
                }
                0x93 => match (self.pop()?, self.pop()?) {
                    (Value::Str(name), Value::Str(module)) => self.global(module, name)?,
                    _ => return Err(self.bad_stack()),
                },
                b'Q' => self.persistent()?,
                b'R' => self.reduce()?,
                b'b' => self.build()?,
                b'.' => return self.stop(),
                opcode => return Err(PickleError::ForbiddenOpcode { opcode, offset: self.opcode_at }),
            }
        }
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], PickleError> {
        let end = self.at.checked_add(length).filter(|end| *end <= self.bytes.len());
        let Some(end) = end else { return Err(PickleError::Truncated { offset: self.bytes.len() }) };
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn array<const SIZE: usize>(&mut self) -> Result<[u8; SIZE], PickleError> {
        let mut out = [0; SIZE];
        out.copy_from_slice(self.take(SIZE)?);
        Ok(out)
    }

    /// Text up to the end of the line.
    fn line(&mut self) -> Result<&'a str, PickleError> {
        let rest = &self.bytes[self.at..];
        let length = rest.iter().position(|byte| *byte == b'\n');
        let Some(length) = length else { return Err(PickleError::Truncated { offset: self.bytes.len() }) };
        let line = self.take(length)?;
        self.at += 1;
        self.utf8(line)
    }

    fn utf8(&self, bytes: &'a [u8]) -> Result<&'a str, PickleError> {
        std::str::from_utf8(bytes).map_err(|_| PickleError::BadValue { offset: self.opcode_at })
    }

    fn text(&mut self, length: usize) -> Result<(), PickleError> {
        let bytes = self.take(length)?;
        let text = self.utf8(bytes)?;
        self.push(Value::Str(text))
    }

    /// A little-endian number in two's complement, of as many bytes as it needs.
    fn long(&mut self) -> Result<i64, PickleError> {
        let [length] = self.array()?;
        let bytes = self.take(length.into())?;
        let negative = bytes.last().is_some_and(|byte| byte & 0x80 != 0);
        let mut raw = [if negative { 0xff } else { 0 }; 8];
        let Some(place) = raw.get_mut(..bytes.len()) else {
            return Err(PickleError::BadValue { offset: self.opcode_at });
        };
        place.copy_from_slice(bytes);
        Ok(i64::from_le_bytes(raw))
    }

    fn push(&mut self, value: Value<'a>) -> Result<(), PickleError> {
        if self.stack.len() + self.marks.len() >= MAX_STACK {
            return Err(PickleError::TooMany { limit: MAX_STACK, offset: self.opcode_at });
        }
        self.stack.push(value);
        Ok(())
    }

    fn mark(&mut self) -> Result<(), PickleError> {
        if self.stack.len() + self.marks.len() >= MAX_STACK {
            return Err(PickleError::TooMany { limit: MAX_STACK, offset: self.opcode_at });
        }
        self.marks.push(self.stack.len());
        Ok(())
    }

    /// Counts values that are kept after they left the stack.
    fn keep(&mut self, count: usize) -> Result<(), PickleError> {
        self.num_values += count;
        if self.num_values > self.max_values {
            return Err(PickleError::TooMany { limit: self.max_values, offset: self.opcode_at });
        }
        Ok(())
    }

    fn bad_stack(&self) -> PickleError {
        PickleError::BadStack { offset: self.opcode_at }
    }

    /// Values above the last mark.
    fn height(&self) -> usize {
        self.stack.len() - self.marks.last().copied().unwrap_or_default()
    }

    fn pop(&mut self) -> Result<Value<'a>, PickleError> {
        if self.height() == 0 {
            return Err(self.bad_stack());
        }
        self.stack.pop().ok_or(self.bad_stack())
    }

    fn top(&self) -> Result<Value<'a>, PickleError> {
        if self.height() == 0 {
            return Err(self.bad_stack());
        }
        self.stack.last().copied().ok_or(self.bad_stack())
    }

    /// Takes the last mark away; how many values were above it.
    fn since_mark(&mut self) -> Result<usize, PickleError> {
        let mark = self.marks.pop().ok_or(self.bad_stack())?;
        Ok(self.stack.len() - mark)
    }

    fn tuple(&mut self, count: usize) -> Result<(), PickleError> {
        if self.height() < count {
            return Err(self.bad_stack());
        }
        self.keep(1 + count)?;
        let first = self.items.len();
        self.items.extend(self.stack.drain(self.stack.len() - count..));
        self.push(Value::Tuple(first, count))
    }

    fn expect_list(&self) -> Result<(), PickleError> {
        if matches!(self.top()?, Value::List) { Ok(()) } else { Err(self.bad_stack()) }
    }

    fn dict(&mut self) -> Result<(), PickleError> {
        self.keep(1)?;
        self.dicts.push(Vec::new());
        self.push(Value::Dict(self.dicts.len() - 1))
    }

    /// Moves `count` values, keys and values in turn, into the dictionary below them.
    fn set_items(&mut self, count: usize) -> Result<(), PickleError> {
        if !count.is_multiple_of(2) || self.height() <= count {
            return Err(self.bad_stack());
        }
        self.keep(count)?;
        let dict = self.stack[self.stack.len() - count - 1];
        let Value::Dict(index) = dict else { return Err(self.bad_stack()) };
        let mut values = self.stack.drain(self.stack.len() - count..);
        while let (Some(key), Some(value)) = (values.next(), values.next()) {
            self.dicts[index].push((key, value));
        }
        Ok(())
    }

    fn put(&mut self, index: u32) -> Result<(), PickleError> {
        self.keep(1)?;
        self.memo.insert(index, self.top()?);
        Ok(())
    }

    fn get(&mut self, index: u32) -> Result<(), PickleError> {
        let missing = PickleError::BadMemo { index, offset: self.opcode_at };
        let value = *self.memo.get(&index).ok_or(missing)?;
        self.push(value)
    }

    fn items(&self, first: usize, count: usize) -> &[Value<'a>] {
        &self.items[first..first + count]
    }

    fn stop(&mut self) -> Result<Value<'a>, PickleError> {
        let top = self.pop()?;
        if !self.stack.is_empty() || !self.marks.is_empty() {
            return Err(self.bad_stack());
        }
        if self.at < self.bytes.len() {
            return Err(PickleError::TrailingBytes { offset: self.at });
        }
        Ok(top)
    }
}
