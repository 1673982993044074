//! Eight lanes with AVX2, FMA and F16C.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{Element, Simd, Tile};
use crate::cpu::dot::{self, DotPanel};
use crate::cpu::expand_tile::{self, ExpandPanel};

/// AVX2, FMA and F16C.
pub(in crate::cpu) struct Avx2;

/// Runs a dot panel.
///
/// # Safety
/// As for [`dot::run`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::cpu) unsafe fn dot(panel: &DotPanel<'_>) {
    // SAFETY: passed on.
    unsafe { dot::run::<Avx2>(panel) }
}

/// Runs an expand panel.
///
/// # Safety
/// As for [`expand_tile::run`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::cpu) unsafe fn expand(panel: &ExpandPanel<'_>) {
    // SAFETY: passed on.
    unsafe { expand_tile::run::<Avx2>(panel) }
}

const LANES: usize = 8;

/// All bits set in the first `len` lanes.
#[inline(always)]
unsafe fn first(len: usize) -> __m256i {
    // SAFETY: the caller has the instruction set.
    unsafe { _mm256_cmpgt_epi32(_mm256_set1_epi32(len as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)) }
}

/// The first `len` 16-bit values and zeros: this instruction set has no masked load of them.
#[inline(always)]
unsafe fn load_first_16(from: *const u16, len: usize) -> __m128i {
    let mut values = [0u16; LANES];
    for (lane, value) in values.iter_mut().enumerate().take(len) {
        // SAFETY: the caller vouches for `len` values.
        *value = unsafe { from.add(lane).read_unaligned() };
    }
    // SAFETY: the array has 8 values of 16 bits.
    unsafe { _mm_loadu_si128(values.as_ptr().cast()) }
}

#[inline(always)]
unsafe fn widen_bf16(values: __m128i) -> __m256 {
    // SAFETY: the caller has the instruction set.
    unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(values))) }
}

// SAFETY of every block below: the caller of a `Simd` method has the instruction set and vouches for the pointers;
// masked loads and stores touch no lane outside of the mask.
impl Simd for Avx2 {
    type V = __m256;
    const LANES: usize = LANES;
    const DOT_ROWS: usize = 2;
    const EXPAND_VECTORS: usize = 2;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::V {
        // SAFETY: see above.
        unsafe { _mm256_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // SAFETY: see above.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::V {
        // SAFETY: see above.
        unsafe { _mm256_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn load_first(from: *const f32, len: usize) -> Self::V {
        // SAFETY: see above.
        unsafe { _mm256_maskload_ps(from, first(len)) }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self::V {
        // SAFETY: see above.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_first_f16(from: *const f16, len: usize) -> Self::V {
        // SAFETY: see above.
        unsafe { _mm256_cvtph_ps(load_first_16(from.cast(), len)) }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self::V {
        // SAFETY: see above.
        unsafe { widen_bf16(_mm_loadu_si128(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_first_bf16(from: *const bf16, len: usize) -> Self::V {
        // SAFETY: see above.
        unsafe { widen_bf16(load_first_16(from.cast(), len)) }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Self::V) {
        // SAFETY: see above.
        unsafe { _mm256_storeu_ps(to, value) }
    }

    #[inline(always)]
    unsafe fn store_first(to: *mut f32, len: usize, value: Self::V) {
        // SAFETY: see above.
        unsafe { _mm256_maskstore_ps(to, first(len), value) }
    }

    #[inline(always)]
    unsafe fn prefetch(address: *const u8) {
        // SAFETY: see above; a prefetch does not fault.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }

    /// Adds the upper half to the lower, three times; the halves of several vectors share a register meanwhile.
    #[inline(always)]
    unsafe fn sum4([a, b, c, d]: [Self::V; 4]) -> [f32; 4] {
        // SAFETY: see above.
        unsafe {
            let ab = _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b));
            let cd = _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(c, d), _mm256_permute2f128_ps::<0x31>(c, d));
            // Two lanes for each vector: a c | b d.
            let v = _mm256_add_ps(_mm256_shuffle_ps::<0x44>(ab, cd), _mm256_shuffle_ps::<0xEE>(ab, cd));
            let v = _mm256_add_ps(v, _mm256_permute_ps::<0xB1>(v));
            let mut lanes = [0.0; LANES];
            _mm256_storeu_ps(lanes.as_mut_ptr(), v);
            [lanes[0], lanes[4], lanes[2], lanes[6]]
        }
    }

    #[inline(always)]
    unsafe fn transpose<E: Element>(from: Tile<E>, to: *mut f32, to_stride: usize) {
        // SAFETY: see above; `cols` vectors are stored.
        unsafe {
            // quads[g][j] holds, in half q, column 4q + j of rows 4g to 4g + 3.
            let mut quads = [[_mm256_setzero_ps(); 4]; 2];
            for (g, quad) in quads.iter_mut().enumerate() {
                let r0 = from.row::<Avx2>(4 * g);
                let r1 = from.row::<Avx2>(4 * g + 1);
                let r2 = from.row::<Avx2>(4 * g + 2);
                let r3 = from.row::<Avx2>(4 * g + 3);
                let (low01, low23) = (_mm256_unpacklo_ps(r0, r1), _mm256_unpacklo_ps(r2, r3));
                let (high01, high23) = (_mm256_unpackhi_ps(r0, r1), _mm256_unpackhi_ps(r2, r3));
                quad[0] = _mm256_shuffle_ps::<0x44>(low01, low23);
                quad[1] = _mm256_shuffle_ps::<0xEE>(low01, low23);
                quad[2] = _mm256_shuffle_ps::<0x44>(high01, high23);
                quad[3] = _mm256_shuffle_ps::<0xEE>(high01, high23);
            }
            let [g0, g1] = quads;
            for j in 0..4 {
                let columns =
                    [_mm256_permute2f128_ps::<0x20>(g0[j], g1[j]), _mm256_permute2f128_ps::<0x31>(g0[j], g1[j])];
                for (q, column) in columns.into_iter().enumerate() {
                    if 4 * q + j < from.cols {
                        _mm256_storeu_ps(to.add((4 * q + j) * to_stride), column);
                    }
                }
            }
        }
    }
}
