//! Metadata values, borrowed from the file's bytes.
//!
//! Numbers are widened to the largest type of their kind, and lists are decoded only when asked for: a vocabulary costs
//! nothing until a tokenizer is built.

use super::cursor::Cursor;
use super::{GgufError, MAX_ARRAY_DEPTH};

/// The scalar types of metadata, by their number in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    pub(super) fn from_code(code: u32, key: &str) -> Result<Self, GgufError> {
        Ok(match code {
            0 => Self::U8,
            1 => Self::I8,
            2 => Self::U16,
            3 => Self::I16,
            4 => Self::U32,
            5 => Self::I32,
            6 => Self::F32,
            7 => Self::Bool,
            8 => Self::String,
            9 => Self::Array,
            10 => Self::U64,
            11 => Self::I64,
            12 => Self::F64,
            _ => return Err(GgufError::invalid(format!("the value type of {key}"), code, "0 to 12")),
        })
    }

    /// The fewest bytes that one value takes in the file.
    pub(super) fn min_bytes(self) -> u64 {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::String => 8,
            Self::Array => 12,
        }
    }
}

/// A metadata value; numbers are widened to the largest type of their kind.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum MetadataValue<'a> {
    /// Any unsigned integer.
    Unsigned(u64),
    /// Any signed integer.
    Signed(i64),
    /// Any float.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// A string.
    String(&'a str),
    /// A list of values of one type, decoded when asked for.
    Array(MetadataArray<'a>),
}

impl<'a> MetadataValue<'a> {
    /// The value as a count or id, whatever integer type the file chose.
    #[must_use]
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::Unsigned(value) => Some(value),
            Self::Signed(value) => u64::try_from(value).ok(),
            _ => None,
        }
    }

    /// The value as a number.
    #[must_use]
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Self::Float(value) => Some(value),
            Self::Unsigned(value) => Some(value as f64),
            Self::Signed(value) => Some(value as f64),
            _ => None,
        }
    }

    /// The value as a truth value.
    #[must_use]
    pub fn as_bool(&self) -> Option<bool> {
        match *self {
            Self::Bool(value) => Some(value),
            _ => None,
        }
    }

    /// The value as a string.
    #[must_use]
    pub fn as_str(&self) -> Option<&'a str> {
        match *self {
            Self::String(value) => Some(value),
            _ => None,
        }
    }

    /// The value as a list.
    #[must_use]
    pub fn as_array(&self) -> Option<MetadataArray<'a>> {
        match self {
            Self::Array(array) => Some(array.clone()),
            _ => None,
        }
    }

    /// The value for a message, cut to one short line.
    #[must_use]
    pub fn summary(&self) -> String {
        match self {
            Self::Unsigned(value) => value.to_string(),
            Self::Signed(value) => value.to_string(),
            Self::Float(value) => value.to_string(),
            Self::Bool(value) => value.to_string(),
            Self::String(value) => value.chars().take(60).collect(),
            Self::Array(array) => format!("a list of {} values", array.len()),
        }
    }
}

/// A metadata list; its elements were checked when the file was parsed.
#[derive(Debug, Clone, PartialEq)]
pub struct MetadataArray<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) element: ValueType,
    pub(super) len: usize,
}

impl<'a> MetadataArray<'a> {
    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements in order.
    pub fn iter(&self) -> impl Iterator<Item = MetadataValue<'a>> + use<'a> {
        let mut cursor = Cursor::new(self.bytes);
        let element = self.element;
        // Checked at parse time: no element can fail here.
        (0..self.len).map_while(move |_| cursor.value(element, "an element", MAX_ARRAY_DEPTH).ok())
    }
}
