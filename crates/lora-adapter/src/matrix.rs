//! A or B of one site: a row-major matrix of finite numbers, and its conversion to the dtype of a slot.
//!
//! Every [`Matrix`] is checked and digested when it is made, in one pass over its bytes, so nothing behind it has to ask
//! again whether a value is finite. It shares its bytes with the buffer that was read from the file and never copies
//! them.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use lora_math::SlotDtype;
use serde::Serialize;
use thiserror::Error;

/// Bytes that are digested and checked together: small enough to be in cache for the second look.
const BLOCK_BYTES: usize = 64 * 1024;

/// Elements that are converted together, through buffers on the stack.
const BLOCK_ELEMENTS: usize = 1024;

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
    F8E4m3,
    /// 8 bits with 5 of exponent and 2 of mantissa: the upper half of an f16 (OCP 8-bit floating point, E5M2).
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

fn widened(dtype: FileDtype, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        FileDtype::F64 => bytes.as_chunks().0.iter().map(|raw| f64::from_le_bytes(*raw) as f32).collect(),
        FileDtype::F32 => bytes.as_chunks().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect(),
        FileDtype::F16 => bytes.as_chunks().0.iter().map(|raw| f16::from_le_bytes(*raw).to_f32()).collect(),
        FileDtype::Bf16 => bytes.as_chunks().0.iter().map(|raw| bf16::from_le_bytes(*raw).to_f32()).collect(),
        FileDtype::F8E4m3 => bytes.iter().copied().map(e4m3).collect(),
        FileDtype::F8E5m2 => bytes.iter().copied().map(e5m2).collect(),
    }
}

/// The value of an E4M3: its bits in the place of an f16's, whose exponent counts from 15 in place of 7.
fn e4m3(bits: u8) -> f32 {
    let sign = u16::from(bits >> 7) << 15;
    match bits & 0x7f {
        0x7f => f32::NAN,
        rest => f16::from_bits(sign | u16::from(rest) << 7).to_f32() * 256.0,
    }
}

fn e5m2(bits: u8) -> f32 {
    f16::from_bits(u16::from(bits) << 8).to_f32()
}

fn element(dtype: FileDtype, bytes: &[u8]) -> f64 {
    let mut raw = [0u8; 8];
    raw[..bytes.len()].copy_from_slice(bytes);
    let [b0, b1, b2, b3, ..] = raw;
    match dtype {
        FileDtype::F64 => f64::from_le_bytes(raw),
        FileDtype::F32 => f64::from(f32::from_le_bytes([b0, b1, b2, b3])),
        FileDtype::F16 => f16::from_le_bytes([b0, b1]).to_f64(),
        FileDtype::Bf16 => bf16::from_le_bytes([b0, b1]).to_f64(),
        FileDtype::F8E4m3 => f64::from(e4m3(b0)),
        FileDtype::F8E5m2 => f64::from(e5m2(b0)),
    }
}

/// Index and value of the first element that is infinite or not a number.
fn first_non_finite(dtype: FileDtype, bytes: &[u8]) -> Option<(usize, f64)> {
    // All bits of the exponent set: looked for without branches, so that the loop becomes SIMD.
    let bad = match dtype {
        FileDtype::F64 => any_all_ones::<8>(bytes, 0x7ff0_0000_0000_0000),
        FileDtype::F32 => any_all_ones::<4>(bytes, 0x7f80_0000),
        FileDtype::F16 => any_all_ones::<2>(bytes, 0x7c00),
        FileDtype::Bf16 => any_all_ones::<2>(bytes, 0x7f80),
        FileDtype::F8E4m3 => bytes.iter().fold(false, |bad, bits| bad | (bits & 0x7f == 0x7f)),
        FileDtype::F8E5m2 => bytes.iter().fold(false, |bad, bits| bad | (bits & 0x7c == 0x7c)),
    };
    if !bad {
        return None;
    }
    let values = bytes.chunks_exact(dtype.bytes()).map(|bytes| element(dtype, bytes));
    values.enumerate().find(|(_, value)| !value.is_finite())
}

fn any_all_ones<const SIZE: usize>(bytes: &[u8], mask: u64) -> bool {
    let (elements, _) = bytes.as_chunks::<SIZE>();
    match SIZE {
        2 => {
            let mask = mask as u16;
            elements.iter().fold(false, |bad, e| bad | (u16::from_le_bytes([e[0], e[1]]) & mask == mask))
        }
        4 => {
            let mask = mask as u32;
            elements.iter().fold(false, |bad, e| bad | (u32::from_le_bytes([e[0], e[1], e[2], e[3]]) & mask == mask))
        }
        _ => elements.iter().fold(false, |bad, e| {
            let mut raw = [0u8; 8];
            raw.copy_from_slice(e);
            bad | (u64::from_le_bytes(raw) & mask == mask)
        }),
    }
}

/// Converts every element; false when one became infinite. The lengths match.
///
/// Every element is rounded once: f32 holds the smaller types exactly, and an f64 goes to a half type by
/// [`round_to_odd`].
fn convert(from: FileDtype, bytes: &[u8], to: SlotDtype, out: &mut [u8]) -> bool {
    match (from, to) {
        (FileDtype::F32, SlotDtype::F32) | (FileDtype::F16, SlotDtype::F16) | (FileDtype::Bf16, SlotDtype::Bf16) => {
            out.copy_from_slice(bytes);
            true
        }
        (FileDtype::F64, SlotDtype::F32) => narrow::<8>(bytes, to, out, |raw| f64::from_le_bytes(raw) as f32),
        (FileDtype::F64, _) => narrow::<8>(bytes, to, out, |raw| round_to_odd(f64::from_le_bytes(raw))),
        (FileDtype::F32, _) => narrow::<4>(bytes, to, out, f32::from_le_bytes),
        (FileDtype::F16, _) => narrow::<2>(bytes, to, out, |raw| f16::from_le_bytes(raw).to_f32()),
        (FileDtype::Bf16, _) => narrow::<2>(bytes, to, out, |raw| bf16::from_le_bytes(raw).to_f32()),
        (FileDtype::F8E4m3, _) => narrow::<1>(bytes, to, out, |[bits]| e4m3(bits)),
        (FileDtype::F8E5m2, _) => narrow::<1>(bytes, to, out, |[bits]| e5m2(bits)),
    }
}

fn narrow<const SIZE: usize>(bytes: &[u8], to: SlotDtype, out: &mut [u8], read: impl Fn([u8; SIZE]) -> f32) -> bool {
    let mut wide = [0f32; BLOCK_ELEMENTS];
    let mut halves = [f16::ZERO; BLOCK_ELEMENTS];
    let mut finite = true;
    let blocks = bytes.as_chunks::<SIZE>().0.chunks(BLOCK_ELEMENTS);
    for (elements, out) in blocks.zip(out.chunks_mut(BLOCK_ELEMENTS * to.bytes())) {
        let wide = &mut wide[..elements.len()];
        wide.iter_mut().zip(elements).for_each(|(value, raw)| *value = read(*raw));
        finite &= match to {
            SlotDtype::F32 => {
                store(wide, out, |value| value.to_le_bytes());
                wide.iter().fold(true, |finite, value| finite & value.is_finite())
            }
            SlotDtype::F16 => {
                let halves = &mut halves[..wide.len()];
                halves.convert_from_f32_slice(wide);
                store(halves, out, |value| value.to_le_bytes());
                halves.iter().fold(true, |finite, value| finite & value.is_finite())
            }
            SlotDtype::Bf16 => {
                store(wide, out, |value| bf16_bits(value).to_le_bytes());
                wide.iter().fold(true, |finite, value| finite & (bf16_bits(*value) & 0x7f80 != 0x7f80))
            }
        };
    }
    finite
}

fn store<T: Copy, const SIZE: usize>(values: &[T], out: &mut [u8], bytes: impl Fn(T) -> [u8; SIZE]) {
    out.as_chunks_mut().0.iter_mut().zip(values).for_each(|(out, value)| *out = bytes(*value));
}

/// The bits of the nearest bf16, ties to even, of a number that is not NaN. Without branches, so that the loop becomes
/// SIMD: half a unit of the last place is added below the cut, a bit less where that would round a tie up to odd.
fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    let round = 0x7fff + ((bits >> 16) & 1);
    ((bits + round) >> 16) as u16
}

/// The f32 next to `value` towards zero, with the last bit set when `value` lies between two f32. Rounding that to a
/// type with at least two bits fewer gives what rounding `value` itself would: the set bit keeps a tie from looking
/// exact.
fn round_to_odd(value: f64) -> f32 {
    let near = value as f32;
    if f64::from(near) == value || near.is_infinite() {
        return near;
    }
    let away_from_zero = f64::from(near).abs() > value.abs();
    f32::from_bits((near.to_bits() - u32::from(away_from_zero)) | 1)
}

#[cfg(test)]
mod tests;
