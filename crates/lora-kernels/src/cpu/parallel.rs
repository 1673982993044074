//! Cutting an operation into ranges for the threads of the current rayon pool.
//!
//! How an operation is cut never changes a bit of its result; it only has to be cheap and even. Nothing is allocated.

use std::ops::Range;

/// Cost below which a piece is not worth a thread, in bytes read from memory: some microseconds of one core.
const MIN_PIECE_COST: usize = 64 * 1024;
/// More pieces than threads, so that a thread which the machine holds up does not hold up the operation.
const PIECES_PER_THREAD: usize = 4;
/// Multiply-adds that take about as long as reading one byte.
const MUL_ADDS_PER_BYTE: usize = 5;

/// The cost of reading `bytes` once and computing `mul_adds`, whichever takes longer.
pub(super) fn cost(bytes: usize, mul_adds: usize) -> usize {
    bytes.max(mul_adds / MUL_ADDS_PER_BYTE)
}

/// Calls `body` on ranges that together cover `0..len` once, on several threads if the whole cost is worth it.
pub(super) fn for_ranges(len: usize, whole_cost: usize, body: &(impl Fn(Range<usize>) + Sync)) {
    if len == 0 {
        return;
    }
    let worth = whole_cost / MIN_PIECE_COST;
    if len == 1 || worth <= 1 {
        return body(0..len);
    }
    match rayon::current_num_threads() {
        1 => body(0..len),
        threads => split(0..len, worth.min(len).min(threads * PIECES_PER_THREAD), body),
    }
}

fn split(range: Range<usize>, pieces: usize, body: &(impl Fn(Range<usize>) + Sync)) {
    if pieces <= 1 {
        return body(range);
    }
    let left = pieces / 2;
    let middle = range.start + range.len() * left / pieces;
    rayon::join(|| split(range.start..middle, left, body), || split(middle..range.end, pieces - left, body));
}

/// The parts of `range` in consecutive blocks of `width`: pairs of a block's index and a range inside of the block.
pub(super) fn segments(range: Range<usize>, width: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
    let Range { mut start, end } = range;
    std::iter::from_fn(move || {
        if start >= end {
            return None;
        }
        let block = start / width;
        let stop = end.min((block + 1) * width);
        let segment = start - block * width..stop - block * width;
        start = stop;
        Some((block, segment))
    })
}

/// A pointer that several threads write through, at places that the operation keeps apart.
#[derive(Clone, Copy)]
pub(super) struct SharedPtr(*mut f32);

// SAFETY: the pointer alone does nothing; whoever writes through it keeps the threads' places apart.
unsafe impl Send for SharedPtr {}
// SAFETY: as above.
unsafe impl Sync for SharedPtr {}

impl SharedPtr {
    pub(super) fn new(start: *mut f32) -> Self {
        SharedPtr(start)
    }

    /// The place `offset` values further; it is in bounds wherever it is used.
    pub(super) fn at(self, offset: usize) -> *mut f32 {
        self.0.wrapping_add(offset)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn ranges_cover_each_unit_once() {
        for len in [0, 1, 2, 7, 100] {
            for pieces in [0, 1, 2, 3, 8, 1000] {
                let seen: Vec<AtomicUsize> = (0..len).map(|_| AtomicUsize::new(0)).collect();
                for_ranges(len, pieces * MIN_PIECE_COST, &|range| {
                    for unit in range {
                        seen[unit].fetch_add(1, Ordering::Relaxed);
                    }
                });
                assert!(seen.iter().all(|count| count.load(Ordering::Relaxed) == 1), "{len} units, {pieces} pieces");
            }
        }
    }

    #[test]
    fn segments_stay_in_their_block() {
        let found: Vec<_> = segments(3..11, 4).collect();
        assert_eq!(found, [(0, 3..4), (1, 0..4), (2, 0..3)]);
        assert_eq!(segments(4..4, 4).count(), 0);
    }
}
