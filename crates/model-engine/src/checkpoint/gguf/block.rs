//! ggml's storage types: block sizes and their decoding to f32.
//!
//! A quantised row is a run of blocks of 32 or 256 elements, each with its own scale. The layouts follow the
//! comments and structs of ggml (`ggml-common.h`, `ggml-quants.c`); every step is in f32 in the order in which the
//! `gguf` Python package does it, which is the oracle of the tests.

use half::{bf16, f16};
use rayon::prelude::*;

/// How the elements of a tensor are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GgmlType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// 4 bits, scale.
    Q4_0,
    /// 4 bits, scale and minimum.
    Q4_1,
    /// 5 bits, scale.
    Q5_0,
    /// 5 bits, scale and minimum.
    Q5_1,
    /// 8 bits, scale.
    Q8_0,
    /// 4 bits in blocks of 256 with eight 6-bit scales and minima.
    Q4K,
    /// 5 bits, otherwise as `Q4K`.
    Q5K,
    /// 6 bits in blocks of 256 with sixteen 8-bit scales.
    Q6K,
}

/// Elements that one task decodes: a multiple of every block.
const CHUNK_ELEMENTS: usize = 1 << 16;

impl GgmlType {
    /// Every type that is read.
    pub const ALL: [Self; 11] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
    ];

    /// Number in the file, name, elements of a block, bytes of a block.
    fn layout(self) -> (u32, &'static str, usize, usize) {
        match self {
            Self::F32 => (0, "F32", 1, 4),
            Self::F16 => (1, "F16", 1, 2),
            Self::Bf16 => (30, "BF16", 1, 2),
            Self::Q4_0 => (2, "Q4_0", 32, 2 + 16),
            Self::Q4_1 => (3, "Q4_1", 32, 4 + 16),
            Self::Q5_0 => (6, "Q5_0", 32, 2 + 4 + 16),
            Self::Q5_1 => (7, "Q5_1", 32, 4 + 4 + 16),
            Self::Q8_0 => (8, "Q8_0", 32, 2 + 32),
            Self::Q4K => (12, "Q4_K", 256, 4 + 12 + 128),
            Self::Q5K => (13, "Q5_K", 256, 4 + 12 + 32 + 128),
            Self::Q6K => (14, "Q6_K", 256, 128 + 64 + 16 + 2),
        }
    }

    /// The type with this number in the file, if it is one that is read.
    #[must_use]
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|ggml_type| ggml_type.layout().0 == code)
    }

    /// ggml's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.layout().1
    }

    /// Elements of one block.
    #[must_use]
    pub fn block_elements(self) -> usize {
        self.layout().2
    }

    /// Bytes of one block.
    #[must_use]
    pub fn block_bytes(self) -> usize {
        self.layout().3
    }

    /// The types that are read, with their numbers, for messages.
    pub(super) fn supported() -> String {
        Self::ALL.map(|known| format!("{} ({})", known.layout().0, known.name())).join(", ")
    }

    /// Decodes `num_elements` elements, a whole number of blocks, from as many blocks in `bytes`.
    pub(super) fn dequantize(self, bytes: &[u8], num_elements: usize) -> Vec<f32> {
        let mut output = vec![0.0; num_elements];
        let chunk_bytes = CHUNK_ELEMENTS / self.block_elements() * self.block_bytes();
        output
            .par_chunks_mut(CHUNK_ELEMENTS)
            .zip(bytes.par_chunks(chunk_bytes))
            .for_each(|(output, bytes)| self.dequantize_chunk(bytes, output));
        output
    }

    fn dequantize_chunk(self, bytes: &[u8], output: &mut [f32]) {
        let decode: fn(&[u8], &mut [f32]) = match self {
            Self::F32 => return decode_each(bytes, output, f32::from_le_bytes),
            Self::F16 => return decode_each(bytes, output, |element| f16::from_le_bytes(element).to_f32()),
            Self::Bf16 => return decode_each(bytes, output, |element| bf16::from_le_bytes(element).to_f32()),
            Self::Q4_0 => q4_0,
            Self::Q4_1 => q4_1,
            Self::Q5_0 => q5_0,
            Self::Q5_1 => q5_1,
            Self::Q8_0 => q8_0,
            Self::Q4K => q4_k,
            Self::Q5K => q5_k,
            Self::Q6K => q6_k,
        };
        let blocks = bytes.chunks_exact(self.block_bytes());
        for (out, block) in output.chunks_exact_mut(self.block_elements()).zip(blocks) {
            decode(block, out);
        }
    }
}

fn decode_each<const N: usize>(bytes: &[u8], output: &mut [f32], element: impl Fn([u8; N]) -> f32) {
    for (out, bytes) in output.iter_mut().zip(bytes.as_chunks().0) {
        *out = element(*bytes);
    }
}

fn half_at(block: &[u8], offset: usize) -> f32 {
    f16::from_le_bytes([block[offset], block[offset + 1]]).to_f32()
}

/// The low nibbles are the first half of the block, the high nibbles the second.
fn nibbles(packed: &[u8], out: &mut [f32], value: impl Fn(usize, u8) -> f32) {
    let half = packed.len();
    for (index, byte) in packed.iter().enumerate() {
        out[index] = value(index, byte & 0x0f);
        out[index + half] = value(index + half, byte >> 4);
    }
}

fn q4_0(block: &[u8], out: &mut [f32]) {
    let scale = half_at(block, 0);
    nibbles(&block[2..], out, |_, q| scale * (f32::from(q) - 8.0));
}

fn q4_1(block: &[u8], out: &mut [f32]) {
    let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
    nibbles(&block[4..], out, |_, q| scale * f32::from(q) + minimum);
}

/// Bit `index` of a block's fifth bits, in the place where it belongs.
fn fifth_bit(high: u32, index: usize) -> u8 {
    ((high >> index & 1) as u8) << 4
}

fn q5_0(block: &[u8], out: &mut [f32]) {
    let scale = half_at(block, 0);
    let high = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
    nibbles(&block[6..], out, |index, q| scale * (f32::from(q | fifth_bit(high, index)) - 16.0));
}

fn q5_1(block: &[u8], out: &mut [f32]) {
    let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
    let high = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
    nibbles(&block[8..], out, |index, q| scale * f32::from(q | fifth_bit(high, index)) + minimum);
}

fn q8_0(block: &[u8], out: &mut [f32]) {
    let scale = half_at(block, 0);
    for (out, byte) in out.iter_mut().zip(&block[2..]) {
        *out = f32::from(byte.cast_signed()) * scale;
    }
}

/// The 6-bit scale and minimum of sub-block `index` (of eight) from their 12 bytes: the first four pairs lie in the
/// low six bits of bytes 0 to 7, the last four in the nibbles of bytes 8 to 11 with their top bits above the first.
fn scale_and_minimum(packed: &[u8], index: usize) -> (f32, f32) {
    let (scale, minimum) = if index < 4 {
        (packed[index] & 0x3f, packed[index + 4] & 0x3f)
    } else {
        let low = packed[index + 4];
        (low & 0x0f | packed[index - 4] >> 6 << 4, low >> 4 | packed[index] >> 6 << 4)
    };
    (f32::from(scale), f32::from(minimum))
}

/// Eight sub-blocks of 32; each run of 32 bytes holds two, in its low and its high nibbles. `fifth` gives the bit
/// above the nibble of element `element` in sub-block `sub_block`.
fn k_nibbles(block: &[u8], packed: &[u8], out: &mut [f32], fifth: impl Fn(usize, usize) -> u8) {
    let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
    for (sub_block, out) in out.chunks_exact_mut(32).enumerate() {
        let (sub_scale, sub_minimum) = scale_and_minimum(&block[4..16], sub_block);
        let (step, offset) = (scale * sub_scale, minimum * sub_minimum);
        let bytes = &packed[sub_block / 2 * 32..][..32];
        for (element, (out, byte)) in out.iter_mut().zip(bytes).enumerate() {
            let nibble = if sub_block % 2 == 0 { byte & 0x0f } else { byte >> 4 };
            *out = step * f32::from(nibble | fifth(sub_block, element)) - offset;
        }
    }
}

fn q4_k(block: &[u8], out: &mut [f32]) {
    k_nibbles(block, &block[16..], out, |_, _| 0);
}

fn q5_k(block: &[u8], out: &mut [f32]) {
    let high = &block[16..48];
    k_nibbles(block, &block[48..], out, |sub_block, element| (high[element] >> sub_block & 1) << 4);
}

/// Two halves of 128: in each, 64 bytes of low nibbles (four runs of 32 elements: low nibbles of the first and the
/// second 32 bytes, then their high nibbles) and 32 bytes with two more bits for each run; a scale for every 16.
fn q6_k(block: &[u8], out: &mut [f32]) {
    let (low, rest) = block.split_at(128);
    let (high, rest) = rest.split_at(64);
    let scale = half_at(rest, 16);
    for (half, out) in out.chunks_exact_mut(128).enumerate() {
        let (low, high) = (&low[half * 64..][..64], &high[half * 32..][..32]);
        for (index, out) in out.iter_mut().enumerate() {
            let (run, element) = (index / 32, index % 32);
            let byte = low[run % 2 * 32 + element];
            let nibble = if run < 2 { byte & 0x0f } else { byte >> 4 };
            let q = nibble | (high[element] >> (2 * run) & 3) << 4;
            let sub_scale = f32::from(rest[half * 8 + index / 16].cast_signed());
            *out = scale * sub_scale * (f32::from(q) - 32.0);
        }
    }
}
