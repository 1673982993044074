//! Eight lanes in plain Rust: what a machine without the other instruction sets runs, in vectors as far as the compiler
//! makes them.

use half::{bf16, f16};

use super::{Element, Simd, Tile};
use crate::cpu::dot::{self, DotPanel};
use crate::cpu::expand_tile::{self, ExpandPanel};

/// Plain Rust.
pub(in crate::cpu) struct Scalar;

/// Runs a dot panel.
///
/// # Safety
/// As for [`dot::run`].
pub(in crate::cpu) unsafe fn dot(panel: &DotPanel<'_>) {
    // SAFETY: passed on.
    unsafe { dot::run::<Scalar>(panel) }
}

/// Runs an expand panel.
///
/// # Safety
/// As for [`expand_tile::run`].
pub(in crate::cpu) unsafe fn expand(panel: &ExpandPanel<'_>) {
    // SAFETY: passed on.
    unsafe { expand_tile::run::<Scalar>(panel) }
}

const LANES: usize = 8;

/// Reads and widens the first `len` values.
#[inline(always)]
unsafe fn gather<E: Copy>(from: *const E, len: usize, widen: impl Fn(E) -> f32) -> [f32; LANES] {
    let mut values = [0.0; LANES];
    for (lane, value) in values.iter_mut().enumerate().take(len) {
        // SAFETY: the caller vouches for `len` values.
        *value = widen(unsafe { from.add(lane).read_unaligned() });
    }
    values
}

impl Simd for Scalar {
    type V = [f32; LANES];
    const LANES: usize = LANES;
    const DOT_ROWS: usize = 1;
    const EXPAND_VECTORS: usize = 1;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::V {
        [value; LANES]
    }

    #[inline(always)]
    unsafe fn mul_add(a: Self::V, b: Self::V, mut c: Self::V) -> Self::V {
        for lane in 0..LANES {
            // Not `f32::mul_add`, which is a library call where the machine has no such instruction.
            c[lane] += a[lane] * b[lane];
        }
        c
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::V {
        // SAFETY: passed on.
        unsafe { gather(from, LANES, |value| value) }
    }

    #[inline(always)]
    unsafe fn load_first(from: *const f32, len: usize) -> Self::V {
        // SAFETY: passed on.
        unsafe { gather(from, len, |value| value) }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self::V {
        // SAFETY: passed on.
        unsafe { gather(from, LANES, f16::to_f32) }
    }

    #[inline(always)]
    unsafe fn load_first_f16(from: *const f16, len: usize) -> Self::V {
        // SAFETY: passed on.
        unsafe { gather(from, len, f16::to_f32) }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self::V {
        // SAFETY: passed on.
        unsafe { gather(from, LANES, widen_bf16) }
    }

    #[inline(always)]
    unsafe fn load_first_bf16(from: *const bf16, len: usize) -> Self::V {
        // SAFETY: passed on.
        unsafe { gather(from, len, widen_bf16) }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Self::V) {
        // SAFETY: passed on.
        unsafe { Self::store_first(to, LANES, value) }
    }

    #[inline(always)]
    unsafe fn store_first(to: *mut f32, len: usize, value: Self::V) {
        for (lane, value) in value.into_iter().enumerate().take(len) {
            // SAFETY: the caller vouches for `len` values.
            unsafe { to.add(lane).write_unaligned(value) };
        }
    }

    #[inline(always)]
    unsafe fn prefetch(_address: *const u8) {}

    #[inline(always)]
    unsafe fn sum4(vectors: [Self::V; 4]) -> [f32; 4] {
        vectors.map(|v| ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])))
    }

    #[inline(always)]
    unsafe fn transpose<E: Element>(from: Tile<E>, to: *mut f32, to_stride: usize) {
        for row in 0..LANES {
            // SAFETY: passed on.
            let values = unsafe { from.row::<Scalar>(row) };
            for (col, value) in values.into_iter().enumerate().take(from.cols) {
                // SAFETY: the caller vouches for `LANES` values at each of `cols` places.
                unsafe { to.add(col * to_stride + row).write(value) };
            }
        }
    }
}

/// Without the quieting of NaN that the library conversion does, which keeps the compiler from using vectors.
#[inline(always)]
fn widen_bf16(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}
