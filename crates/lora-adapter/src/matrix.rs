//! A or B of one site: a row-major matrix of finite numbers, and its conversion to the dtype of a slot.
//!
//! Every [`Matrix`] is checked and digested when it is made, in one pass over its bytes, so nothing behind it has to ask
//! again whether a value is finite. It shares its bytes with the buffer that was read from the file and never copies
//! them.

mod convert;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};
use lora_math::SlotDtype;
use serde::Serialize;
use thiserror::Error;

pub(crate) use convert::row_major;
use convert::{convert, element, first_non_finite, widened};

/// Bytes that are digested and checked together: small enough to be in cache for the second look.
const BLOCK_BYTES: usize = 64 * 1024;

/// Element type of a matrix as it stands in a file. All are little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum FileDtype {
    /// IEEE double precision.
    F64,
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// 8 bits with 4 of exponent and 3 of mantissa, no infinity ("fn" in ml_dtypes; OCP 8-bit floating point, E4M3).
    #[serde(rename = "f8_e4m3")]
    F8E4m3,
    /// 8 bits with 5 of exponent and 2 of mantissa: the upper half of an f16 (OCP 8-bit floating point, E5M2).
    #[serde(rename = "f8_e5m2")]
    F8E5m2,
}

impl FileDtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            FileDtype::F64 => 8,
            FileDtype::F32 => 4,
            FileDtype::F16 | FileDtype::Bf16 => 2,
            FileDtype::F8E4m3 | FileDtype::F8E5m2 => 1,
        }
    }

    /// The name in reports and digests.
    pub const fn name(self) -> &'static str {
        match self {
            FileDtype::F64 => "f64",
            FileDtype::F32 => "f32",
            FileDtype::F16 => "f16",
            FileDtype::Bf16 => "bf16",
            FileDtype::F8E4m3 => "f8_e4m3",
            FileDtype::F8E5m2 => "f8_e5m2",
        }
    }
}

impl fmt::Display for FileDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why a matrix cannot be made or converted. Never worth a retry: the bytes themselves are at fault.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum MatrixError {
    /// A side is 0.
    #[error("{tensor}: shape [{rows}, {cols}] holds nothing")]
    Empty {
        /// The matrix.
        tensor: Arc<str>,
        /// Its rows.
        rows: usize,
        /// Its columns.
        cols: usize,
    },
    /// Shape and number of elements disagree.
    #[error("{tensor}: shape [{rows}, {cols}] does not fit {found} elements")]
    WrongLength {
        /// The matrix.
        tensor: Arc<str>,
        /// Its rows.
        rows: usize,
        /// Its columns.
        cols: usize,
        /// Elements given.
        found: usize,
    },
    /// An element is infinite or not a number.
    #[error("{tensor}: element [{row}, {col}] is {value}; every element must be finite")]
    NonFinite {
        /// The matrix.
        tensor: Arc<str>,
        /// Row of the first such element.
        row: usize,
        /// Its column.
        col: usize,
        /// Its value.
        value: f64,
    },
    /// An element is finite in the file and infinite in the slot's dtype.
    #[error("{tensor}: element [{row}, {col}] is {value}, which {} cannot hold (largest {})", .dtype.name(), largest(*.dtype))]
    Overflow {
        /// The matrix.
        tensor: Arc<str>,
        /// Row of the first such element.
        row: usize,
        /// Its column.
        col: usize,
        /// Its value.
        value: f64,
        /// The dtype that cannot hold it.
        dtype: SlotDtype,
    },
    /// The destination has the wrong size.
    #[error("{tensor}: the destination has {found} bytes, {expected} are needed")]
    WrongDestination {
        /// The matrix.
        tensor: Arc<str>,
        /// Bytes needed.
        expected: usize,
        /// Bytes given.
        found: usize,
    },
}

/// The largest finite value of a slot's dtype.
fn largest(dtype: SlotDtype) -> f64 {
    match dtype {
        SlotDtype::F16 => f16::MAX.to_f64(),
        SlotDtype::Bf16 => bf16::MAX.to_f64(),
        SlotDtype::F32 => f64::from(f32::MAX),
    }
}

/// A row-major matrix of finite numbers in the dtype of its file. Cloning shares the bytes.
#[derive(Clone)]
pub struct Matrix {
    tensor: Arc<str>,
    rows: usize,
    cols: usize,
    dtype: FileDtype,
    buffer: Arc<Vec<u8>>,
    range: Range<usize>,
    digest: [u8; 32],
}

impl Matrix {
    /// A matrix in memory, f32. For adapters that do not come from files.
    ///
    /// # Errors
    /// A side of 0, `values` of another length than `rows * cols`, or a value that is not finite.
    pub fn from_f32(rows: usize, cols: usize, values: &[f32]) -> Result<Self, MatrixError> {
        let tensor: Arc<str> = "matrix in memory".into();
        if rows.checked_mul(cols) != Some(values.len()) {
            return Err(MatrixError::WrongLength { tensor, rows, cols, found: values.len() });
        }
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let range = 0..bytes.len();
        Self::from_bytes(tensor, [rows, cols], FileDtype::F32, Arc::new(bytes), range)
    }

    /// The matrix at `range` of `buffer`. `tensor` is its name in messages.
    pub(crate) fn from_bytes(
        tensor: Arc<str>,
        [rows, cols]: [usize; 2],
        dtype: FileDtype,
        buffer: Arc<Vec<u8>>,
        range: Range<usize>,
    ) -> Result<Self, MatrixError> {
        if rows == 0 || cols == 0 {
            return Err(MatrixError::Empty { tensor, rows, cols });
        }
        let bytes = buffer.get(range.clone()).unwrap_or_default();
        let expected = rows.checked_mul(cols).and_then(|elements| elements.checked_mul(dtype.bytes()));
        if expected != Some(bytes.len()) {
            return Err(MatrixError::WrongLength { tensor, rows, cols, found: bytes.len() / dtype.bytes() });
        }
        let mut hasher = blake3::Hasher::new();
        for (block, part) in bytes.chunks(BLOCK_BYTES).enumerate() {
            hasher.update(part);
            if let Some((index, value)) = first_non_finite(dtype, part) {
                let index = block * (BLOCK_BYTES / dtype.bytes()) + index;
                return Err(MatrixError::NonFinite { tensor, row: index / cols, col: index % cols, value });
            }
        }
        let digest = *hasher.finalize().as_bytes();
        Ok(Matrix { tensor, rows, cols, dtype, buffer, range, digest })
    }

    /// Some of its rows, as a matrix that shares its bytes.
    pub(crate) fn row_range(&self, rows: Range<usize>) -> Result<Self, MatrixError> {
        let row_bytes = self.cols * self.dtype.bytes();
        let range = self.range.start + rows.start * row_bytes..self.range.start + rows.end * row_bytes;
        let buffer = Arc::clone(&self.buffer);
        Self::from_bytes(self.tensor.clone(), [rows.len(), self.cols], self.dtype, buffer, range)
    }

    /// Whether both stand at one place in memory.
    pub(crate) fn shares_bytes(&self, other: &Matrix) -> bool {
        Arc::ptr_eq(&self.buffer, &other.buffer) && self.range == other.range
    }

    /// The same matrix under another name in messages.
    pub(crate) fn renamed(self, tensor: Arc<str>) -> Self {
        Matrix { tensor, ..self }
    }

    /// Its name in messages: the tensor of the file it came from.
    pub fn tensor(&self) -> &str {
        &self.tensor
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Number of elements.
    pub fn num_elements(&self) -> usize {
        self.rows * self.cols
    }

    /// Element type of [`Matrix::bytes`].
    pub fn dtype(&self) -> FileDtype {
        self.dtype
    }

    /// The elements, row-major and little-endian, as they stand in the file.
    pub fn bytes(&self) -> &[u8] {
        &self.buffer[self.range.clone()]
    }

    /// BLAKE3 digest of [`Matrix::bytes`].
    pub fn digest(&self) -> &[u8; 32] {
        &self.digest
    }

    /// The elements as f32, rounded to nearest, ties to even. An f64 beyond the range of f32 becomes infinite here;
    /// [`Matrix::write_as`] refuses it.
    pub fn to_f32(&self) -> Vec<f32> {
        widened(self.dtype, self.bytes())
    }

    /// Some of its rows as f32, rounded as by [`Matrix::to_f32`].
    pub(crate) fn row_f32(&self, rows: Range<usize>) -> Vec<f32> {
        let row_bytes = self.cols * self.dtype.bytes();
        widened(self.dtype, &self.bytes()[rows.start * row_bytes..rows.end * row_bytes])
    }

    /// The same elements with rows and columns changed over.
    pub fn transposed(&self) -> Self {
        let shape = [self.cols, self.rows];
        let bytes = row_major(self.bytes(), shape, self.dtype);
        let range = 0..bytes.len();
        let transposed = Self::from_bytes(self.tensor.clone(), shape, self.dtype, Arc::new(bytes), range);
        transposed.expect("the elements of a checked matrix")
    }

    /// Writes the elements as `dtype`, little-endian, rounded to nearest, ties to even. What is below the smallest
    /// number of `dtype` becomes 0.
    ///
    /// # Errors
    /// `out` is not exactly `rows * cols * dtype.bytes()` long, or an element becomes infinite in `dtype`. After an
    /// error the contents of `out` mean nothing.
    pub fn write_as(&self, dtype: SlotDtype, out: &mut [u8]) -> Result<(), MatrixError> {
        let expected = self.num_elements() * dtype.bytes();
        if out.len() != expected {
            return Err(MatrixError::WrongDestination { tensor: self.tensor.clone(), expected, found: out.len() });
        }
        let finite = convert(self.dtype, self.bytes(), dtype, out);
        if finite { Ok(()) } else { Err(self.overflow(dtype)) }
    }

    /// The element at a row-major index. f64 holds every file dtype exactly.
    fn value(&self, index: usize) -> f64 {
        let size = self.dtype.bytes();
        element(self.dtype, &self.bytes()[index * size..(index + 1) * size])
    }

    fn overflow(&self, dtype: SlotDtype) -> MatrixError {
        let too_large = |raw: &[u8]| !convert(self.dtype, raw, dtype, &mut [0; 4][..dtype.bytes()]);
        let index = self.bytes().chunks_exact(self.dtype.bytes()).position(too_large).unwrap_or_default();
        MatrixError::Overflow {
            tensor: self.tensor.clone(),
            row: index / self.cols,
            col: index % self.cols,
            value: self.value(index),
            dtype,
        }
    }
}

impl PartialEq for Matrix {
    /// Equal shapes, dtypes and bytes; the name does not count.
    fn eq(&self, other: &Self) -> bool {
        (self.rows, self.cols, self.dtype) == (other.rows, other.cols, other.dtype) && self.bytes() == other.bytes()
    }
}

impl fmt::Debug for Matrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Matrix({}, [{}, {}] {})", self.tensor, self.rows, self.cols, self.dtype)
    }
}

#[cfg(test)]
mod tests;
