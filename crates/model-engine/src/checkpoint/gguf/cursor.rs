//! Reading numbers, strings and values from untrusted bytes, never past their end.

use super::value::{MetadataArray, MetadataValue, ValueType};
use super::{GgufError, MAX_NAME_BYTES};

/// A position in the file's bytes.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, position: 0 }
    }

    pub(super) fn position(&self) -> usize {
        self.position
    }

    fn truncated(&self, needed: u64, what: &str) -> GgufError {
        GgufError::Truncated { what: what.to_owned(), offset: self.position, needed, file_bytes: self.bytes.len() }
    }

    pub(super) fn take(&mut self, num_bytes: u64, what: &str) -> Result<&'a [u8], GgufError> {
        let end = usize::try_from(num_bytes).ok().and_then(|len| self.position.checked_add(len));
        let slice = end.and_then(|end| self.bytes.get(self.position..end));
        let slice = slice.ok_or_else(|| self.truncated(num_bytes, what))?;
        self.position += slice.len();
        Ok(slice)
    }

    /// Refuses a list of `count` entries of `min_bytes` each that cannot fit in what is left.
    pub(super) fn check_count(&self, count: u64, min_bytes: u64, what: &str) -> Result<(), GgufError> {
        let needed = count.saturating_mul(min_bytes);
        let left = (self.bytes.len() - self.position) as u64;
        if needed > left { Err(self.truncated(needed, what)) } else { Ok(()) }
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], GgufError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64, what)?);
        Ok(array)
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    fn string(&mut self, what: &str) -> Result<&'a str, GgufError> {
        let num_bytes = self.u64(what)?;
        let bytes = self.take(num_bytes, what)?;
        std::str::from_utf8(bytes).map_err(|error| GgufError::invalid(what, error, "UTF-8"))
    }

    pub(super) fn name(&mut self, what: &str) -> Result<&'a str, GgufError> {
        let name = self.string(what)?;
        if name.is_empty() || name.len() > MAX_NAME_BYTES {
            let expected = format!("1 to {MAX_NAME_BYTES} bytes");
            return Err(GgufError::invalid(what, format!("{} bytes long", name.len()), expected));
        }
        Ok(name)
    }

    /// One value; arrays inside arrays use up `depth`.
    pub(super) fn value(
        &mut self,
        value_type: ValueType,
        key: &str,
        depth: u32,
    ) -> Result<MetadataValue<'a>, GgufError> {
        Ok(match value_type {
            ValueType::U8 => MetadataValue::Unsigned(u8::from_le_bytes(self.array(key)?).into()),
            ValueType::U16 => MetadataValue::Unsigned(u16::from_le_bytes(self.array(key)?).into()),
            ValueType::U32 => MetadataValue::Unsigned(self.u32(key)?.into()),
            ValueType::U64 => MetadataValue::Unsigned(self.u64(key)?),
            ValueType::I8 => MetadataValue::Signed(i8::from_le_bytes(self.array(key)?).into()),
            ValueType::I16 => MetadataValue::Signed(i16::from_le_bytes(self.array(key)?).into()),
            ValueType::I32 => MetadataValue::Signed(i32::from_le_bytes(self.array(key)?).into()),
            ValueType::I64 => MetadataValue::Signed(i64::from_le_bytes(self.array(key)?)),
            ValueType::F32 => MetadataValue::Float(f32::from_le_bytes(self.array(key)?).into()),
            ValueType::F64 => MetadataValue::Float(f64::from_le_bytes(self.array(key)?)),
            ValueType::Bool => match self.array(key)? {
                [0] => MetadataValue::Bool(false),
                [1] => MetadataValue::Bool(true),
                [other] => return Err(GgufError::invalid(key, other, "0 or 1")),
            },
            ValueType::String => MetadataValue::String(self.string(key)?),
            ValueType::Array => MetadataValue::Array(self.value_array(key, depth)?),
        })
    }

    fn value_array(&mut self, key: &str, depth: u32) -> Result<MetadataArray<'a>, GgufError> {
        let Some(depth) = depth.checked_sub(1) else {
            return Err(GgufError::invalid(key, "nested too deep", "at most 4 levels of arrays"));
        };
        let element = ValueType::from_code(self.u32(key)?, key)?;
        let count = self.u64(key)?;
        self.check_count(count, element.min_bytes(), key)?;
        let start = self.position;
        match element {
            // Their length is not fixed, or not every byte is a value: each has to be looked at.
            ValueType::String | ValueType::Array | ValueType::Bool => {
                for _ in 0..count {
                    self.value(element, key, depth)?;
                }
            }
            _ => {
                self.take(count * element.min_bytes(), key)?;
            }
        }
        // `check_count` bounds the count by the length of the file.
        Ok(MetadataArray { bytes: &self.bytes[start..self.position], element, len: count as usize })
    }
}
