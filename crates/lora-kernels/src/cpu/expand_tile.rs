//! The expand core: `y[m][n] += factor[m] · Σ_r h[m][r] · B[n][r]` for a panel of rows × outputs.
//!
//! Lanes run over outputs, so that no sum is spread over lanes: each output has one accumulator, which adds the ranks in
//! ascending order. B is read a tile at a time, widened and transposed, once for all rows of the panel.

use std::mem::MaybeUninit;
use std::ops::Range;

use half::{bf16, f16};
use lora_math::SlotDtype;

use super::simd::{Aligned, Element, MAX_EXPAND_VECTORS, MAX_LANES, Simd, Tile};
use crate::table::MatrixView;

/// Most outputs side by side, and values from one rank to the next in a transposed tile.
pub(super) const MAX_OUTPUTS: usize = MAX_LANES * MAX_EXPAND_VECTORS;
/// Ranks of a transposed tile.
const RANK_CHUNK: usize = 64;
/// Rows whose accumulators are kept from one chunk of ranks to the next.
const CARRY_ROWS: usize = 64;
/// Rows of a full tile.
const TILE_ROWS: usize = 4;

/// One row of a panel.
#[derive(Clone, Copy)]
pub(super) struct ExpandRow {
    /// Its `rank` values of h.
    pub(super) h: *const f32,
    /// Its outputs, from output 0.
    pub(super) y: *mut f32,
    /// scale · scaling.
    pub(super) factor: f32,
}

impl ExpandRow {
    /// A place in an array of rows that is not filled.
    pub(super) const UNUSED: ExpandRow = ExpandRow { h: std::ptr::null(), y: std::ptr::null_mut(), factor: 0.0 };
}

/// Rows × outputs that one call adds to.
pub(super) struct ExpandPanel<'a> {
    pub(super) rows: &'a [ExpandRow],
    /// `[out_features, rank]`.
    pub(super) b: MatrixView<'a>,
    pub(super) rank: usize,
    pub(super) outputs: Range<usize>,
}

/// Adds a panel.
///
/// # Safety
/// The machine has the instruction set. Each row's `h` is readable for `rank`, its `y` readable and writable at
/// `outputs` and used by nobody else meanwhile, and no two rows share a `y`; B's rows at `outputs` are readable.
#[inline(always)]
pub(super) unsafe fn run<S: Simd>(panel: &ExpandPanel<'_>) {
    // SAFETY: passed on; the address is that of values of the dtype.
    unsafe {
        match panel.b.dtype {
            SlotDtype::F32 => walk::<S, f32>(panel),
            SlotDtype::F16 => walk::<S, f16>(panel),
            SlotDtype::Bf16 => walk::<S, bf16>(panel),
        }
    }
}

/// What a tile of rows works on.
#[derive(Clone, Copy)]
struct Work {
    /// B transposed: `[ranks][MAX_OUTPUTS]`.
    transposed: *const f32,
    /// Accumulators `[rows][MAX_OUTPUTS]` between chunks of ranks.
    carry: *mut f32,
    first_rank: usize,
    num_ranks: usize,
    output: usize,
    num_outputs: usize,
    /// Whether the last rank is among these.
    last: bool,
}

/// # Safety
/// As for [`run`].
#[inline(always)]
unsafe fn walk<S: Simd, E: Element>(panel: &ExpandPanel<'_>) {
    let mut transposed = MaybeUninit::<Aligned<[f32; RANK_CHUNK * MAX_OUTPUTS]>>::uninit();
    let mut carry = MaybeUninit::<Aligned<[f32; CARRY_ROWS * MAX_OUTPUTS]>>::uninit();
    let transposed: *mut f32 = transposed.as_mut_ptr().cast();
    let carry: *mut f32 = carry.as_mut_ptr().cast();
    let rank = panel.rank;
    let block_rows = if rank <= RANK_CHUNK { panel.rows.len().max(1) } else { CARRY_ROWS };

    for output in panel.outputs.clone().step_by(S::LANES * S::EXPAND_VECTORS) {
        let num_outputs = (panel.outputs.end - output).min(S::LANES * S::EXPAND_VECTORS);
        for rows in panel.rows.chunks(block_rows) {
            for first_rank in (0..rank).step_by(RANK_CHUNK) {
                let num_ranks = (rank - first_rank).min(RANK_CHUNK);
                let last = first_rank + num_ranks == rank;
                let work = Work { transposed, carry, first_rank, num_ranks, output, num_outputs, last };
                // SAFETY: passed on; the ranks and outputs exist, and both buffers have room for them.
                unsafe {
                    let b = panel.b.address.cast::<E>().add(output * rank + first_rank);
                    transpose::<S, E>(b, rank, work, transposed);
                    add_rows::<S>(rows, work);
                }
            }
        }
    }
}

/// # Safety
/// As for [`run`]; `to` has room for `num_ranks` × `MAX_OUTPUTS`.
#[inline(always)]
unsafe fn transpose<S: Simd, E: Element>(b: *const E, rank: usize, work: Work, to: *mut f32) {
    for output in (0..work.num_outputs).step_by(S::LANES) {
        for col in (0..work.num_ranks).step_by(S::LANES) {
            // SAFETY: the tile lies in the chunk's ranks and outputs.
            unsafe {
                let tile = Tile {
                    start: b.add(output * rank + col),
                    stride: rank,
                    rows: (work.num_outputs - output).min(S::LANES),
                    cols: (work.num_ranks - col).min(S::LANES),
                };
                S::transpose(tile, to.add(col * MAX_OUTPUTS + output), MAX_OUTPUTS);
            }
        }
    }
}

/// # Safety
/// As for [`run`]; there are no more rows than `carry` has room for, if a carry is needed.
#[inline(always)]
unsafe fn add_rows<S: Simd>(rows: &[ExpandRow], mut work: Work) {
    let (tiles, rest) = rows.as_chunks::<TILE_ROWS>();
    // SAFETY: passed on.
    unsafe {
        for tile in tiles {
            vectors::<S, TILE_ROWS>(tile, work);
            work.carry = work.carry.wrapping_add(TILE_ROWS * MAX_OUTPUTS);
        }
        for row in rest {
            vectors::<S, 1>(std::array::from_ref(row), work);
            work.carry = work.carry.wrapping_add(MAX_OUTPUTS);
        }
    }
}

/// All outputs of a panel for `M` rows: side by side if the panel is full, else vector by vector.
///
/// # Safety
/// As for [`run`].
#[inline(always)]
unsafe fn vectors<S: Simd, const M: usize>(rows: &[ExpandRow; M], mut work: Work) {
    // SAFETY: passed on.
    unsafe {
        if S::EXPAND_VECTORS > 1 && work.num_outputs == S::EXPAND_VECTORS * S::LANES {
            match S::EXPAND_VECTORS {
                4.. => tile::<S, M, 4>(rows, work),
                _ => tile::<S, M, 2>(rows, work),
            }
            return;
        }
        let end = work.num_outputs;
        for offset in (0..end).step_by(S::LANES) {
            work.num_outputs = (end - offset).min(S::LANES);
            tile::<S, M, 1>(rows, work);
            work.output += S::LANES;
            work.transposed = work.transposed.add(S::LANES);
            work.carry = work.carry.wrapping_add(S::LANES);
        }
    }
}

/// `M` rows × `T` vectors of outputs, one accumulator each.
///
/// # Safety
/// As for [`run`]; `num_outputs` is `T` whole vectors, or any part of one vector if `T` is 1.
#[expect(clippy::needless_range_loop, reason = "indices of tiles, which the compiler unrolls")]
#[inline(always)]
unsafe fn tile<S: Simd, const M: usize, const T: usize>(rows: &[ExpandRow; M], work: Work) {
    let Work { transposed, carry, first_rank, num_ranks, output, num_outputs, last } = work;
    // SAFETY: ranks lie in the chunk, outputs in the panel, the carry is written in the chunk before it is read.
    unsafe {
        let mut sums = [[S::splat(0.0); T]; M];
        if first_rank > 0 {
            for m in 0..M {
                for t in 0..T {
                    sums[m][t] = S::load(carry.add(m * MAX_OUTPUTS + t * S::LANES));
                }
            }
        }
        for r in 0..num_ranks {
            let mut weights = [S::splat(0.0); T];
            for t in 0..T {
                weights[t] = S::load(transposed.add(r * MAX_OUTPUTS + t * S::LANES));
            }
            for m in 0..M {
                let h = S::splat(*rows[m].h.add(first_rank + r));
                for t in 0..T {
                    sums[m][t] = S::mul_add(h, weights[t], sums[m][t]);
                }
            }
        }
        for m in 0..M {
            let factor = S::splat(rows[m].factor);
            for t in 0..T {
                let y = rows[m].y.add(output + t * S::LANES);
                if !last {
                    S::store(carry.add(m * MAX_OUTPUTS + t * S::LANES), sums[m][t]);
                } else if T > 1 || num_outputs == S::LANES {
                    S::store(y, S::mul_add(factor, sums[m][t], S::load(y)));
                } else {
                    let sum = S::mul_add(factor, sums[m][t], S::load_first(y, num_outputs));
                    S::store_first(y, num_outputs, sum);
                }
            }
        }
    }
}
