//! Elements of files: what they are worth, whether they are finite, and as what they stand in a slot.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use lora_math::SlotDtype;

use super::FileDtype;

/// Elements that are converted together, through buffers on the stack.
const BLOCK_ELEMENTS: usize = 1024;

pub(super) fn widened(dtype: FileDtype, bytes: &[u8]) -> Vec<f32> {
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

pub(super) fn element(dtype: FileDtype, bytes: &[u8]) -> f64 {
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
pub(super) fn first_non_finite(dtype: FileDtype, bytes: &[u8]) -> Option<(usize, f64)> {
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
pub(super) fn convert(from: FileDtype, bytes: &[u8], to: SlotDtype, out: &mut [u8]) -> bool {
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

/// The elements of a matrix stored column after column, row after row. Square blocks keep both sides in cache.
pub(crate) fn row_major(stored: &[u8], [rows, cols]: [usize; 2], dtype: FileDtype) -> Vec<u8> {
    const BLOCK: usize = 32;
    let size = dtype.bytes();
    let mut out = vec![0; stored.len()];
    for first_row in (0..rows).step_by(BLOCK) {
        for first_col in (0..cols).step_by(BLOCK) {
            for row in first_row..rows.min(first_row + BLOCK) {
                for col in first_col..cols.min(first_col + BLOCK) {
                    let (to, from) = ((row * cols + col) * size, (col * rows + row) * size);
                    out[to..to + size].copy_from_slice(&stored[from..from + size]);
                }
            }
        }
    }
    out
}
