//! The few vector operations that the kernels are written in, and the element types that they read.
//!
//! A kernel is one generic function; each instruction set instantiates it inside a function that enables its features.
//! Everything here is `#[inline(always)]` so that it takes on the features of that function.

#[cfg(target_arch = "x86_64")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512;
pub(super) mod scalar;

use half::{bf16, f16};

/// A vector of f32 lanes.
///
/// # Safety
/// Of every method: the machine has the instruction set, and pointers are good for the lanes read or written; they may
/// be unaligned. `first` methods touch only the first `len` lanes (`len` ≤ `LANES`) and read the others as 0.
pub(super) trait Simd {
    type V: Copy;
    /// Lanes of a vector, at most [`MAX_LANES`].
    const LANES: usize;
    /// Rows of a dot tile: as many as the registers hold accumulators for.
    const DOT_ROWS: usize;
    /// Vectors of outputs side by side in an expand tile, at most [`MAX_EXPAND_VECTORS`].
    const EXPAND_VECTORS: usize;

    unsafe fn splat(value: f32) -> Self::V;
    /// `a · b + c` in each lane.
    unsafe fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    unsafe fn load(from: *const f32) -> Self::V;
    unsafe fn load_first(from: *const f32, len: usize) -> Self::V;
    unsafe fn load_f16(from: *const f16) -> Self::V;
    unsafe fn load_first_f16(from: *const f16, len: usize) -> Self::V;
    unsafe fn load_bf16(from: *const bf16) -> Self::V;
    unsafe fn load_first_bf16(from: *const bf16, len: usize) -> Self::V;
    unsafe fn store(to: *mut f32, value: Self::V);
    unsafe fn store_first(to: *mut f32, len: usize, value: Self::V);
    /// Asks for the cache line at an address, which need not be readable.
    unsafe fn prefetch(address: *const u8);
    /// The sum of the lanes of each vector, by a tree that is the same for all four.
    unsafe fn sum4(vectors: [Self::V; 4]) -> [f32; 4];
    /// Transposes a tile of `LANES` rows × `cols` columns (`cols` ≤ `LANES`; of the rows only the first `rows` exist,
    /// the others read as 0) into `cols` vectors, which go to `to`, `to + to_stride`, and so on.
    unsafe fn transpose<E: Element>(from: Tile<E>, to: *mut f32, to_stride: usize);
}

/// Upper bound of [`Simd::LANES`].
pub(super) const MAX_LANES: usize = 16;
/// Upper bound of [`Simd::EXPAND_VECTORS`].
pub(super) const MAX_EXPAND_VECTORS: usize = 4;

/// A buffer at the start of a cache line: a vector that lies across two lines costs two loads.
#[repr(align(64))]
pub(super) struct Aligned<T>(T);

/// A part of a row-major matrix.
#[derive(Clone, Copy)]
pub(super) struct Tile<E> {
    pub(super) start: *const E,
    /// Elements from one row to the next.
    pub(super) stride: usize,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

impl<E: Element> Tile<E> {
    /// A row of the tile, zero past its columns and rows.
    ///
    /// # Safety
    /// As for [`Simd`]; rows and columns of the tile are readable.
    #[inline(always)]
    unsafe fn row<S: Simd>(&self, row: usize) -> S::V {
        // SAFETY: the row exists, and no more than its columns are read.
        unsafe {
            if row >= self.rows {
                S::splat(0.0)
            } else if self.cols == S::LANES {
                E::load::<S>(self.start.add(row * self.stride))
            } else {
                E::load_first::<S>(self.start.add(row * self.stride), self.cols)
            }
        }
    }
}

/// An element type of weights, widened exactly as it is loaded.
pub(super) trait Element: Copy {
    /// Whether the values are f32 already.
    const IS_F32: bool;

    /// # Safety
    /// As for [`Simd`].
    unsafe fn load<S: Simd>(from: *const Self) -> S::V;
    /// # Safety
    /// As for [`Simd`].
    unsafe fn load_first<S: Simd>(from: *const Self, len: usize) -> S::V;
}

impl Element for f32 {
    const IS_F32: bool = true;

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::V {
        // SAFETY: passed on.
        unsafe { S::load(from) }
    }

    #[inline(always)]
    unsafe fn load_first<S: Simd>(from: *const Self, len: usize) -> S::V {
        // SAFETY: passed on.
        unsafe { S::load_first(from, len) }
    }
}

impl Element for f16 {
    const IS_F32: bool = false;

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::V {
        // SAFETY: passed on.
        unsafe { S::load_f16(from) }
    }

    #[inline(always)]
    unsafe fn load_first<S: Simd>(from: *const Self, len: usize) -> S::V {
        // SAFETY: passed on.
        unsafe { S::load_first_f16(from, len) }
    }
}

impl Element for bf16 {
    const IS_F32: bool = false;

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::V {
        // SAFETY: passed on.
        unsafe { S::load_bf16(from) }
    }

    #[inline(always)]
    unsafe fn load_first<S: Simd>(from: *const Self, len: usize) -> S::V {
        // SAFETY: passed on.
        unsafe { S::load_first_bf16(from, len) }
    }
}
