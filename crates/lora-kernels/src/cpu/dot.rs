//! The one dot core: `y[m][n] = Σ_k x[m][k] · w[n][k]` for a panel of rows × outputs.
//!
//! Base products, shrink and delta all run it, and it fixes the order of every sum: K is cut at multiples of [`CHUNK`];
//! in a chunk each lane of a vector adds every `LANES`-th product in ascending order; the lanes are added by the tree of
//! [`Simd::sum4`]; chunks are added in ascending order; the bias comes last. Tiles only decide how many such sums run at
//! once, so they never change a bit.

use std::mem::MaybeUninit;
use std::ops::Range;

use half::{bf16, f16};
use lora_math::SlotDtype;

use super::simd::{Aligned, Element, Simd};
use crate::table::MatrixView;

/// Products in a chunk of K: a tile's part of x and of a widened weight then lie in the first-level cache together.
const CHUNK: usize = 1024;
/// Outputs of a full tile.
pub(super) const TILE_OUTPUTS: usize = 6;
/// Most rows of a panel.
pub(super) const MAX_ROWS: usize = 128;
/// Rows from which a tile's weights are copied even if they are f32 already: spread over the cache's sets they pay for
/// the copy.
const COPY_ROWS: usize = 16;
/// Values of x up to which a panel keeps all of them in the second-level cache while it walks the weight's rows.
const CACHED_INPUT: usize = 128 * 1024;
/// Bytes of a cache line.
const LINE_BYTES: usize = 64;
/// Values from one widened weight row to the next: not a power of two, so that they spread over the cache's sets.
const WIDE_STRIDE: usize = CHUNK + 16;

/// One row of a panel.
#[derive(Clone, Copy)]
pub(super) struct DotRow {
    /// Its `in_features` inputs.
    pub(super) x: *const f32,
    /// Its outputs, from output 0.
    pub(super) y: *mut f32,
}

impl DotRow {
    /// A place in an array of rows that is not filled.
    pub(super) const UNUSED: DotRow = DotRow { x: std::ptr::null(), y: std::ptr::null_mut() };
}

/// Rows × outputs that one call computes.
pub(super) struct DotPanel<'a> {
    pub(super) rows: &'a [DotRow],
    /// `[out_features, in_features]`.
    pub(super) weight: MatrixView<'a>,
    pub(super) in_features: usize,
    pub(super) outputs: Range<usize>,
    /// One value for each of `out_features`.
    pub(super) bias: Option<&'a [f32]>,
}

/// Computes a panel.
///
/// # Safety
/// The machine has the instruction set. Each row's `x` is readable for `in_features`, its `y` writable at `outputs` and
/// read or written by nobody else meanwhile; the weight's rows at `outputs` are readable.
#[inline(always)]
pub(super) unsafe fn run<S: Simd>(panel: &DotPanel<'_>) {
    // SAFETY: passed on; the address is that of values of the dtype.
    unsafe {
        match panel.weight.dtype {
            SlotDtype::F32 => walk::<S, f32>(panel),
            SlotDtype::F16 => walk::<S, f16>(panel),
            SlotDtype::Bf16 => walk::<S, bf16>(panel),
        }
    }
}

/// A chunk of K of some weight rows.
struct Chunk<E> {
    weight: *const E,
    stride: usize,
    start: usize,
    len: usize,
    /// The output of the first weight row.
    output: usize,
    /// Whether this is the last chunk of K.
    last: bool,
    /// Where the part of memory starts that is to be asked for meanwhile; null to ask for nothing.
    ahead: *const u8,
}

/// # Safety
/// As for [`run`].
#[inline(always)]
unsafe fn walk<S: Simd, E: Element>(panel: &DotPanel<'_>) {
    let DotPanel { rows, weight, in_features, ref outputs, .. } = *panel;
    // Few rows: finish an output tile over all of K, so that the weight streams. Many: finish a chunk of K over all
    // outputs, so that the rows' part of x stays in cache.
    let span = if rows.len() * in_features <= CACHED_INPUT { TILE_OUTPUTS } else { outputs.len() };
    let mut widened = MaybeUninit::<Aligned<[f32; TILE_OUTPUTS * WIDE_STRIDE]>>::uninit();
    let widened: *mut f32 = widened.as_mut_ptr().cast();

    let mut span_start = outputs.start;
    while span_start < outputs.end {
        let span_end = (span_start + span).min(outputs.end);
        let mut start = 0;
        while start < in_features {
            let len = (in_features - start).min(CHUNK);
            let mut output = span_start;
            while output < span_end {
                // SAFETY: passed on; the weight rows from `output` up to the span's end exist.
                unsafe {
                    let weight = weight.address.cast::<E>().add(output * in_features + start);
                    let chunk = Chunk {
                        weight,
                        stride: in_features,
                        start,
                        len,
                        output,
                        last: start + len == in_features,
                        ahead: if span == TILE_OUTPUTS {
                            // The next tile's rows are one stretch of memory: the same share of it as of this tile.
                            weight.wrapping_add(TILE_OUTPUTS * in_features - start + start * TILE_OUTPUTS).cast()
                        } else {
                            std::ptr::null()
                        },
                    };
                    output += match span_end - output {
                        TILE_OUTPUTS.. => column::<S, E, TILE_OUTPUTS>(panel, chunk, widened),
                        4.. => column::<S, E, 4>(panel, chunk, widened),
                        2.. => column::<S, E, 2>(panel, chunk, widened),
                        _ => column::<S, E, 1>(panel, chunk, widened),
                    };
                }
            }
            start += len;
        }
        span_start = span_end;
    }
}

/// A chunk of `N` outputs for all rows; widens the weight once when more than one tile of rows reads it. Gives `N`.
///
/// # Safety
/// As for [`run`]; `widened` has room for `TILE_OUTPUTS` rows of `WIDE_STRIDE`.
#[inline(always)]
unsafe fn column<S: Simd, E: Element, const N: usize>(
    panel: &DotPanel<'_>,
    chunk: Chunk<E>,
    widened: *mut f32,
) -> usize {
    // SAFETY: passed on; a chunk has at most CHUNK values a row.
    unsafe {
        if panel.rows.len() <= if E::IS_F32 { COPY_ROWS } else { S::DOT_ROWS } {
            rows::<S, E, N>(panel, &chunk);
        } else {
            for n in 0..N {
                widen::<S, E>(chunk.weight.add(n * chunk.stride), widened.add(n * WIDE_STRIDE), chunk.len);
            }
            let Chunk { start, len, output, last, ahead, .. } = chunk;
            rows::<S, f32, N>(panel, &Chunk { weight: widened, stride: WIDE_STRIDE, start, len, output, last, ahead });
        }
    }
    N
}

/// # Safety
/// As for [`run`]; both sides have `len` values.
#[inline(always)]
unsafe fn widen<S: Simd, E: Element>(from: *const E, to: *mut f32, len: usize) {
    let mut k = 0;
    // SAFETY: every access stays below `len`.
    unsafe {
        while k + S::LANES <= len {
            S::store(to.add(k), E::load::<S>(from.add(k)));
            k += S::LANES;
        }
        if k < len {
            S::store_first(to.add(k), len - k, E::load_first::<S>(from.add(k), len - k));
        }
    }
}

/// # Safety
/// As for [`run`].
#[inline(always)]
unsafe fn rows<S: Simd, E: Element, const N: usize>(panel: &DotPanel<'_>, chunk: &Chunk<E>) {
    let mut rest = panel.rows;
    // SAFETY: passed on.
    unsafe {
        if N == TILE_OUTPUTS && !chunk.ahead.is_null() {
            // One tile of rows waits for memory more than it computes: it asks for the lines of its next weights.
            match rest.len() {
                4 if S::DOT_ROWS >= 4 => rest = tile::<S, E, 4, N, 3>(panel, chunk, rest),
                2 if S::DOT_ROWS >= 2 => rest = tile::<S, E, 2, N, 3>(panel, chunk, rest),
                1 => rest = tile::<S, E, 1, N, 3>(panel, chunk, rest),
                _ => {}
            }
        }
        while S::DOT_ROWS >= 4 && rest.len() >= 4 {
            rest = tile::<S, E, 4, N, 0>(panel, chunk, rest);
        }
        while S::DOT_ROWS >= 2 && rest.len() >= 2 {
            rest = tile::<S, E, 2, N, 0>(panel, chunk, rest);
        }
        while !rest.is_empty() {
            rest = tile::<S, E, 1, N, 0>(panel, chunk, rest);
        }
    }
}

/// The first `M` of the rows × `N` outputs, one accumulator each; gives the other rows. Every step along K also asks
/// for `ASK` cache lines ahead.
///
/// # Safety
/// As for [`run`]; there are at least `M` rows.
#[expect(clippy::needless_range_loop, reason = "indices of tiles, which the compiler unrolls")]
#[inline(always)]
unsafe fn tile<'r, S: Simd, E: Element, const M: usize, const N: usize, const ASK: usize>(
    panel: &DotPanel<'_>,
    chunk: &Chunk<E>,
    rows: &'r [DotRow],
) -> &'r [DotRow] {
    let Chunk { weight, stride, start, len, output, last, ahead } = *chunk;
    // SAFETY: passed on; every access stays below `len` in a chunk and at one of the panel's outputs in y.
    unsafe {
        let zero = S::splat(0.0);
        let mut x = [std::ptr::null::<f32>(); M];
        for m in 0..M {
            x[m] = rows[m].x.add(start);
        }
        let mut sums = [[zero; M]; N];
        let mut k = 0;
        let mut ahead = ahead;
        while k + S::LANES <= len {
            for _ in 0..ASK {
                S::prefetch(ahead);
                ahead = ahead.wrapping_add(LINE_BYTES);
            }
            let mut inputs = [zero; M];
            for m in 0..M {
                inputs[m] = S::load(x[m].add(k));
            }
            for n in 0..N {
                let weights = E::load::<S>(weight.add(n * stride + k));
                for m in 0..M {
                    sums[n][m] = S::mul_add(inputs[m], weights, sums[n][m]);
                }
            }
            k += S::LANES;
        }
        if k < len {
            let mut inputs = [zero; M];
            for m in 0..M {
                inputs[m] = S::load_first(x[m].add(k), len - k);
            }
            for n in 0..N {
                let weights = E::load_first::<S>(weight.add(n * stride + k), len - k);
                for m in 0..M {
                    sums[n][m] = S::mul_add(inputs[m], weights, sums[n][m]);
                }
            }
        }

        for (group, vectors) in sums.as_flattened().chunks(4).enumerate() {
            let mut quad = [zero; 4];
            quad[..vectors.len()].copy_from_slice(vectors);
            let totals = S::sum4(quad);
            for (index, &total) in (4 * group..).zip(&totals[..vectors.len()]) {
                let (n, m) = (index / M, index % M);
                let y = rows[m].y.add(output + n);
                let mut value = if start == 0 { total } else { *y + total };
                if let (true, Some(bias)) = (last, panel.bias) {
                    value += bias[output + n];
                }
                *y = value;
            }
        }
    }
    &rows[M..]
}
