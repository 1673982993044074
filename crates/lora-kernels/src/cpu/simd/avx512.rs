//! Sixteen lanes with AVX-512 F, BW and VL.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{Element, Simd, Tile};
use crate::cpu::dot::{self, DotPanel};
use crate::cpu::expand_tile::{self, ExpandPanel};

/// AVX-512 F, BW and VL.
pub(in crate::cpu) struct Avx512;

/// Runs a dot panel.
///
/// # Safety
/// As for [`dot::run`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(in crate::cpu) unsafe fn dot(panel: &DotPanel<'_>) {
    // SAFETY: passed on.
    unsafe { dot::run::<Avx512>(panel) }
}

/// Runs an expand panel.
///
/// # Safety
/// As for [`expand_tile::run`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(in crate::cpu) unsafe fn expand(panel: &ExpandPanel<'_>) {
    // SAFETY: passed on.
    unsafe { expand_tile::run::<Avx512>(panel) }
}

#[inline(always)]
fn first(len: usize) -> u16 {
    ((1u32 << len) - 1) as u16
}

#[inline(always)]
unsafe fn widen_bf16(values: __m256i) -> __m512 {
    // SAFETY: the caller has the instruction set.
    unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(values))) }
}

// SAFETY of every block below: the caller of a `Simd` method has the instruction set and vouches for the pointers;
// masked loads and stores touch no lane outside of the mask.
impl Simd for Avx512 {
    type V = __m512;
    const LANES: usize = 16;
    const DOT_ROWS: usize = 4;
    const EXPAND_VECTORS: usize = 4;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::V {
        // SAFETY: see above.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // SAFETY: see above.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::V {
        // SAFETY: see above.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn load_first(from: *const f32, len: usize) -> Self::V {
        // SAFETY: see above.
        unsafe { _mm512_maskz_loadu_ps(first(len), from) }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self::V {
        // SAFETY: see above.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_first_f16(from: *const f16, len: usize) -> Self::V {
        // SAFETY: see above.
        unsafe { _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(len), from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self::V {
        // SAFETY: see above.
        unsafe { widen_bf16(_mm256_loadu_si256(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_first_bf16(from: *const bf16, len: usize) -> Self::V {
        // SAFETY: see above.
        unsafe { widen_bf16(_mm256_maskz_loadu_epi16(first(len), from.cast())) }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Self::V) {
        // SAFETY: see above.
        unsafe { _mm512_storeu_ps(to, value) }
    }

    #[inline(always)]
    unsafe fn store_first(to: *mut f32, len: usize, value: Self::V) {
        // SAFETY: see above.
        unsafe { _mm512_mask_storeu_ps(to, first(len), value) }
    }

    #[inline(always)]
    unsafe fn prefetch(address: *const u8) {
        // SAFETY: see above; a prefetch does not fault.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }

    /// Adds the upper half to the lower, four times; the halves of two vectors share a register meanwhile.
    #[inline(always)]
    unsafe fn sum4([a, b, c, d]: [Self::V; 4]) -> [f32; 4] {
        // SAFETY: see above.
        unsafe {
            let ab = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xEE>(a, b));
            let cd = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xEE>(c, d));
            // One quarter of the register for each vector from here on.
            let v = _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(ab, cd), _mm512_shuffle_f32x4::<0xDD>(ab, cd));
            let v = _mm512_add_ps(v, _mm512_permute_ps::<0x4E>(v));
            let v = _mm512_add_ps(v, _mm512_permute_ps::<0xB1>(v));
            let mut sums = [0.0; 4];
            _mm_storeu_ps(sums.as_mut_ptr(), _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, v)));
            sums
        }
    }

    #[inline(always)]
    unsafe fn transpose<E: Element>(from: Tile<E>, to: *mut f32, to_stride: usize) {
        // SAFETY: see above; `cols` vectors are stored.
        unsafe {
            // quads[g][j] holds, in quarter q, column 4q + j of rows 4g to 4g + 3.
            let mut quads = [[_mm512_setzero_ps(); 4]; 4];
            for (g, quad) in quads.iter_mut().enumerate() {
                let r0 = from.row::<Avx512>(4 * g);
                let r1 = from.row::<Avx512>(4 * g + 1);
                let r2 = from.row::<Avx512>(4 * g + 2);
                let r3 = from.row::<Avx512>(4 * g + 3);
                let (low01, low23) = (_mm512_unpacklo_ps(r0, r1), _mm512_unpacklo_ps(r2, r3));
                let (high01, high23) = (_mm512_unpackhi_ps(r0, r1), _mm512_unpackhi_ps(r2, r3));
                quad[0] = _mm512_shuffle_ps::<0x44>(low01, low23);
                quad[1] = _mm512_shuffle_ps::<0xEE>(low01, low23);
                quad[2] = _mm512_shuffle_ps::<0x44>(high01, high23);
                quad[3] = _mm512_shuffle_ps::<0xEE>(high01, high23);
            }
            let [g0, g1, g2, g3] = quads;
            for j in 0..4 {
                // Quarters 0 and 2, then 1 and 3, of all rows.
                let even01 = _mm512_shuffle_f32x4::<0x88>(g0[j], g1[j]);
                let even23 = _mm512_shuffle_f32x4::<0x88>(g2[j], g3[j]);
                let odd01 = _mm512_shuffle_f32x4::<0xDD>(g0[j], g1[j]);
                let odd23 = _mm512_shuffle_f32x4::<0xDD>(g2[j], g3[j]);
                let columns = [
                    _mm512_shuffle_f32x4::<0x88>(even01, even23),
                    _mm512_shuffle_f32x4::<0x88>(odd01, odd23),
                    _mm512_shuffle_f32x4::<0xDD>(even01, even23),
                    _mm512_shuffle_f32x4::<0xDD>(odd01, odd23),
                ];
                for (q, column) in columns.into_iter().enumerate() {
                    if 4 * q + j < from.cols {
                        _mm512_storeu_ps(to.add((4 * q + j) * to_stride), column);
                    }
                }
            }
        }
    }
}
