//! What a pool asks of the memory it stands on: one block at a fixed address, copies on a stream of its own,
//! table rows on the engine's stream.
//!
//! The pool alone decides which bytes are written when; a [`DeviceMemory`] only moves them in the stated order.
//! It knows no slot, no adapter and no layout.

use std::sync::Arc;

use thiserror::Error;

/// One run of bytes from a host buffer to device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRun {
    /// First byte in the host buffer.
    pub source_offset: usize,
    /// First byte in the device memory.
    pub target_offset: usize,
    /// Number of bytes.
    pub num_bytes: usize,
}

/// One block of memory that the kernels of a back end can read, made once and never moved.
///
/// # Order
/// - Copies run on a copy stream that belongs to the memory, in the order in which they are asked for; [`copy`] may
///   return before the bytes have landed. Its token stands for their arrival.
/// - [`publish`] makes the engine's stream wait for the token and then writes the table rows on that stream:
///   steps that the engine launches later see the bytes and the rows, steps launched before see neither.
/// - A [`StepFence`] stands behind everything launched on the engine's stream so far; a copy that is given one
///   does not start before the fence has passed. That is how a freed slot waits for the last step that read it.
///
/// A memory whose copies are done when [`copy`] returns, and whose steps are done when they return, needs none of the
/// three: see [`HostMemory`](crate::HostMemory).
///
/// # Safety
/// Kernels read this memory through bare addresses. An implementation promises that [`address`] never changes, that
/// [`len_bytes`] initialised bytes from there stay readable by the kernels of its back end until it is dropped,
/// that the address is a multiple of [`lora_math::layout::ALIGNMENT`], and that nothing but [`copy`] and
/// [`publish`] writes there, each only the ranges that it was given.
///
/// [`copy`]: Self::copy
/// [`publish`]: Self::publish
/// [`address`]: Self::address
/// [`len_bytes`]: Self::len_bytes
/// [`StepFence`]: Self::StepFence
pub unsafe trait DeviceMemory: Send + Sync + 'static {
    /// The stream on which the engine launches its steps.
    type Stream: ?Sized;
    /// Stands for the arrival of one [`copy`](Self::copy). It may be dropped at any time; the host buffer of a
    /// copy under way lives on until the copy is done.
    type CopyToken: Send;
    /// Stands behind the steps launched before it.
    type StepFence: Send + Sync;
    /// Host memory from which copies are fast (page-locked where that matters). Zero-initialised.
    type HostBuffer: AsRef<[u8]> + AsMut<[u8]> + Send + Sync + 'static;

    /// Address of the first byte, as kernels use it.
    fn address(&self) -> u64;

    /// Number of bytes.
    fn len_bytes(&self) -> usize;

    /// A zeroed host buffer of `num_bytes` bytes.
    fn host_buffer(&self, num_bytes: usize) -> Result<Self::HostBuffer, MemoryError>;

    /// Starts copying `runs` of `source`, after the fence if one is given.
    ///
    /// An error may come after a part of the bytes has been written.
    ///
    /// # Safety
    /// Until the token's arrival, nobody else reads or writes the target ranges, but for other copies of this memory
    /// (they keep their order) and, where a fence is given, for steps that stand before it.
    unsafe fn copy(
        &self,
        source: Arc<Self::HostBuffer>,
        runs: &[CopyRun],
        after: Option<&Self::StepFence>,
    ) -> Result<Self::CopyToken, MemoryError>;

    /// Whether a copy has arrived. A publication before that makes the engine's stream wait.
    fn has_arrived(&self, token: &Self::CopyToken) -> Result<bool, MemoryError>;

    /// Makes `stream` wait for `arrived`, then writes `rows` at `target_offset` on `stream`. `rows` is read
    /// before the call returns.
    ///
    /// # Safety
    /// No step outside of `stream`, and no other call on this memory, reads or writes the target range meanwhile.
    unsafe fn publish(
        &self,
        stream: &Self::Stream,
        arrived: &Self::CopyToken,
        target_offset: usize,
        rows: &[u8],
    ) -> Result<(), MemoryError>;

    /// A fence behind everything launched on `stream` so far. The pool makes one at a time.
    fn fence(&self, stream: &Self::Stream) -> Result<Self::StepFence, MemoryError>;

    /// Reads `into.len()` bytes at `source_offset`, after every copy started so far. May block: not for the
    /// step thread.
    ///
    /// # Safety
    /// Nobody writes the range meanwhile, and the rows published there are past their stream.
    unsafe fn read(&self, source_offset: usize, into: &mut [u8]) -> Result<(), MemoryError>;
}

/// Memory that cannot be had, or a copy that did not happen.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The memory cannot be allocated.
    #[error("{num_bytes} bytes of {kind} memory cannot be allocated")]
    Allocation {
        /// Which memory: `host`, `page-locked`, `device`.
        kind: &'static str,
        /// Bytes asked for.
        num_bytes: usize,
    },
    /// An allocation that is not aligned for a slot.
    #[error("memory at {address:#x} is no multiple of {alignment}")]
    Misaligned {
        /// Where the memory is.
        address: u64,
        /// What it must be a multiple of.
        alignment: usize,
    },
    /// The engine's stream records a graph, which would repeat what is asked for at every replay.
    #[error("the stream is capturing: publications and fences belong outside of a graph")]
    Capturing,
    /// A range outside of the memory or of the host buffer.
    #[error("{num_bytes} bytes at offset {offset} lie outside of {len_bytes} bytes")]
    OutOfBounds {
        /// First byte.
        offset: usize,
        /// Number of bytes.
        num_bytes: usize,
        /// Size of the memory or buffer.
        len_bytes: usize,
    },
    /// The device's own library failed.
    #[error("{operation} failed on the device with code {code}")]
    Device {
        /// What was tried.
        operation: &'static str,
        /// The code that the library gave.
        code: i64,
    },
}

impl MemoryError {
    /// Whether the same call may succeed later without a change by the caller.
    pub fn is_retryable(&self) -> bool {
        matches!(self, MemoryError::Allocation { .. } | MemoryError::Capturing)
    }
}

/// Checks that `num_bytes` at `offset` lie inside `len_bytes`.
pub fn check_bounds(offset: usize, num_bytes: usize, len_bytes: usize) -> Result<(), MemoryError> {
    match offset.checked_add(num_bytes) {
        Some(end) if end <= len_bytes => Ok(()),
        _ => Err(MemoryError::OutOfBounds { offset, num_bytes, len_bytes }),
    }
}
