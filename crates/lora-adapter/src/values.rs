//! Reading the values of A and B: the file in its order, and each matrix checked and digested while the next is read.
//!
//! Only the bytes that pairs need are read, into buffers of their own size. Hashing costs about as much as reading, so
//! a few threads take it while this one reads; small files are not worth a thread.

use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::ops::Range;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use crate::matrix::{FileDtype, Matrix, MatrixError, row_major};
use crate::reason::Reason;

/// Neighbours in the file are read together up to this many bytes: large enough for the system's large pages, small
/// enough that the hashing of one overlaps the reading of the next.
const SEGMENT_BYTES: u64 = 32 << 20;

/// Below this, everything happens on the calling thread.
const THREADED_BYTES: u64 = 4 << 20;

/// Threads that check and digest, besides the one that reads.
const MAX_HELPERS: usize = 3;

/// A matrix to be read.
#[derive(Clone, Debug)]
pub(crate) struct MatrixPlan {
    pub(crate) tensor: Arc<str>,
    pub(crate) shape: [usize; 2],
    pub(crate) dtype: FileDtype,
    /// Bytes in the file.
    pub(crate) range: Range<u64>,
    /// Stored column after column.
    pub(crate) transposed: bool,
}

impl MatrixPlan {
    /// Whether shape and bytes agree.
    fn is_whole(&self) -> bool {
        let [rows, cols] = self.shape;
        let bytes = rows.checked_mul(cols).and_then(|elements| elements.checked_mul(self.dtype.bytes()));
        bytes.is_some_and(|bytes| bytes as u64 == self.range.end - self.range.start)
    }
}

/// Matrices that stand next to each other in the file.
struct Segment<'a> {
    range: Range<u64>,
    plans: &'a [(usize, &'a MatrixPlan)],
}

/// A matrix that has been read: its index among the plans, and a buffer that begins at `start` of the file.
struct Unchecked<'a> {
    index: usize,
    plan: &'a MatrixPlan,
    buffer: Arc<Vec<u8>>,
    start: u64,
}

type Checked = (usize, Result<Matrix, MatrixError>);

/// Reads every matrix; the results are in the order of `plans`.
///
/// # Errors
/// The file cannot be read to its end, or there is no memory for it.
pub(crate) fn read(
    file: &mut (impl Read + Seek),
    plans: &[MatrixPlan],
) -> Result<Vec<Result<Matrix, MatrixError>>, Reason> {
    let mut ordered: Vec<(usize, &MatrixPlan)> = plans.iter().enumerate().collect();
    ordered.sort_by_key(|(_, plan)| plan.range.start);
    let total_bytes: u64 = plans.iter().map(|plan| plan.range.end - plan.range.start).sum();
    let num_helpers = match thread::available_parallelism() {
        Ok(threads) if total_bytes > THREADED_BYTES => (threads.get() - 1).clamp(1, MAX_HELPERS),
        _ => 0,
    };
    let (sender, receiver) = channel();
    let receiver = Mutex::new(receiver);
    let mut checked = thread::scope(|scope| {
        let spawn = |_| thread::Builder::new().spawn_scoped(scope, || drain(&receiver));
        // A system that gives no thread costs time only: this one takes what is left.
        let helpers: Vec<_> = (0..num_helpers).map_while(|index| spawn(index).ok()).collect();
        let mut read = Ok(());
        for Segment { range, plans } in segments(&ordered) {
            let start = range.start;
            let buffer = match read_range(file, range) {
                Ok(buffer) => Arc::new(buffer),
                Err(reason) => {
                    read = Err(reason);
                    break;
                }
            };
            for &(index, plan) in plans {
                // Cannot fail: the receiver lives as long as the scope.
                drop(sender.send(Unchecked { index, plan, buffer: Arc::clone(&buffer), start }));
            }
        }
        drop(sender);
        let mut checked = drain(&receiver);
        for helper in helpers {
            // A lost result would move the later ones to other sites.
            checked.extend(helper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        read.map(|()| checked)
    })?;
    checked.sort_by_key(|(index, _)| *index);
    Ok(checked.into_iter().map(|(_, matrix)| matrix).collect())
}

/// Checks matrices until there are no more.
fn drain(receiver: &Mutex<Receiver<Unchecked<'_>>>) -> Vec<Checked> {
    let mut checked = Vec::new();
    loop {
        let next = receiver.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(Unchecked { index, plan, buffer, start }) = next else { return checked };
        let range = (plan.range.start - start) as usize..(plan.range.end - start) as usize;
        let from_bytes = |buffer, range| Matrix::from_bytes(plan.tensor.clone(), plan.shape, plan.dtype, buffer, range);
        let matrix = match buffer.get(range.clone()) {
            Some(stored) if plan.transposed && plan.is_whole() => {
                let bytes = row_major(stored, plan.shape, plan.dtype);
                let range = 0..bytes.len();
                from_bytes(Arc::new(bytes), range)
            }
            _ => from_bytes(buffer, range),
        };
        checked.push((index, matrix));
    }
}

/// Cuts the plans, ordered by place, into runs of neighbours of at most [`SEGMENT_BYTES`] or of one larger matrix.
fn segments<'a>(mut rest: &'a [(usize, &'a MatrixPlan)]) -> impl Iterator<Item = Segment<'a>> {
    std::iter::from_fn(move || {
        let Range { start, mut end } = rest.first()?.1.range;
        let mut length = 1;
        for (_, next) in &rest[1..] {
            if next.range.start != end || next.range.end - start > SEGMENT_BYTES {
                break;
            }
            end = next.range.end;
            length += 1;
        }
        let (plans, after) = rest.split_at(length);
        rest = after;
        Some(Segment { range: start..end, plans })
    })
}

fn read_range(file: &mut (impl Read + Seek), Range { start, end }: Range<u64>) -> Result<Vec<u8>, Reason> {
    let needed_bytes = usize::try_from(end - start).unwrap_or(usize::MAX);
    let mut buffer = Vec::new();
    buffer.try_reserve_exact(needed_bytes).map_err(|_| Reason::OutOfMemory { needed_bytes })?;
    let read = file.seek(SeekFrom::Start(start)).and_then(|_| file.by_ref().take(end - start).read_to_end(&mut buffer));
    match read {
        Ok(_) if buffer.len() == needed_bytes => Ok(buffer),
        // The file was as long as its plan a moment ago.
        Ok(_) => Err(Reason::Truncated { expected_bytes: end, found_bytes: start + buffer.len() as u64 }),
        Err(error) if error.kind() == ErrorKind::OutOfMemory => Err(Reason::OutOfMemory { needed_bytes }),
        Err(error) => Err(Reason::Unreadable { message: error.to_string() }),
    }
}
