//! Pool memory on a CUDA device, over an engine's own context.
//!
//! Copies run on a stream of the memory's own, from page-locked host buffers; the rows of the table are written on the
//! engine's stream. Fences and tokens are events.

mod pinned;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::CUstreamCaptureStatus;
use cudarc::driver::{CudaContext, CudaEvent, CudaSlice, CudaStream, DevicePtr, DriverError, result, sys};
use lora_math::layout::ALIGNMENT;

pub use pinned::PinnedBuffer;

use crate::memory::{CopyRun, DeviceMemory, MemoryError, check_bounds};
use pinned::PinnedCache;

/// One zeroed block of device memory, allocated once.
///
/// Steps of an engine, [`publish`](DeviceMemory::publish) and [`fence`](DeviceMemory::fence) are for a stream of the same
/// context. None of the calls may be made while a capture of the mode `GLOBAL` is under way in the process, for CUDA
/// refuses copies and allocations then: engines capture with `THREAD_LOCAL` or `RELAXED`.
#[derive(Debug)]
pub struct CudaMemory {
    address: u64,
    len_bytes: usize,
    copies: Arc<CudaStream>,
    pinned: Arc<PinnedCache>,
    /// Host buffers of copies that may still run, each with the event behind its copy.
    under_way: Mutex<Vec<UnderWay>>,
    /// Owner of the block.
    _block: CudaSlice<u8>,
}

#[derive(Debug)]
struct UnderWay {
    arrived: Arc<CudaEvent>,
    _source: Arc<PinnedBuffer>,
}

/// The arrival of a copy in device memory.
#[derive(Clone, Debug)]
pub struct CudaToken(Arc<CudaEvent>);

/// What stands behind the steps of a stream.
#[derive(Debug)]
pub struct CudaFence(CudaEvent);

impl CudaMemory {
    /// Allocates `num_bytes` zeroed bytes on the context's device; at least one, so that an address always exists. Of the
    /// page-locked host memory that loads need, `kept_host_bytes` are kept for the next ones: making it takes longer than
    /// copying it, and giving it back makes the device wait. The packed size of an adapter times the loads that run side
    /// by side is a good number.
    ///
    /// # Errors
    /// [`MemoryError::Allocation`], [`MemoryError::Device`].
    pub fn allocate(context: &Arc<CudaContext>, num_bytes: usize, kept_host_bytes: usize) -> Result<Self, MemoryError> {
        let copies = context.new_stream().map_err(failed("making a stream"))?;
        let block = copies.alloc_zeros::<u8>(num_bytes.max(1)).map_err(|error| match error.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => MemoryError::Allocation { kind: "device", num_bytes },
            _ => failed("allocating device memory")(error),
        })?;
        // Zeroed before any stream of the engine sees it.
        copies.synchronize().map_err(failed("clearing device memory"))?;
        let address = block.device_ptr(&copies).0;
        if !address.is_multiple_of(ALIGNMENT as u64) {
            return Err(MemoryError::Misaligned { address, alignment: ALIGNMENT });
        }
        let pinned = PinnedCache::new(context.clone(), kept_host_bytes);
        let under_way = Mutex::new(Vec::new());
        Ok(CudaMemory { address, len_bytes: num_bytes.max(1), copies, pinned, under_way, _block: block })
    }

    /// Loads come from threads that have not used the context before, and cudarc does not see to it in every call.
    fn use_context(&self) -> Result<(), MemoryError> {
        self.copies.context().bind_to_thread().map_err(failed("using the context"))
    }

    /// Lets go of host buffers whose copies are done.
    fn collect(&self) -> Result<MutexGuard<'_, Vec<UnderWay>>, MemoryError> {
        self.use_context()?;
        let mut under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        let mut failure = None;
        under_way.retain(|copy| match copy.arrived.try_is_complete() {
            Ok(done) => !done,
            // The device may still read the buffer.
            Err(error) => {
                failure = Some(error);
                true
            }
        });
        match failure {
            Some(error) => Err(failed("asking for a copy")(error)),
            None => Ok(under_way),
        }
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        // Steps may still read the block, on streams that it knows nothing of, and copies the host buffers. A context that
        // fails here runs neither any more.
        let _ = self.copies.context().synchronize();
    }
}

// SAFETY: the block is allocated once and freed with this value, behind all work of the context; it was zeroed, so all of
// it is initialised; its address is checked for its alignment; and nothing but `copy` and `publish` writes there, each
// inside the ranges that it checks.
unsafe impl DeviceMemory for CudaMemory {
    type Stream = CudaStream;
    type CopyToken = CudaToken;
    type StepFence = CudaFence;
    type HostBuffer = PinnedBuffer;

    fn address(&self) -> u64 {
        self.address
    }

    fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    fn host_buffer(&self, num_bytes: usize) -> Result<PinnedBuffer, MemoryError> {
        drop(self.collect()?);
        PinnedCache::buffer(&self.pinned, num_bytes)
    }

    unsafe fn copy(
        &self,
        source: Arc<PinnedBuffer>,
        runs: &[CopyRun],
        after: Option<&CudaFence>,
    ) -> Result<CudaToken, MemoryError> {
        let bytes = (*source).as_ref();
        for run in runs {
            check_bounds(run.source_offset, run.num_bytes, bytes.len())?;
            check_bounds(run.target_offset, run.num_bytes, self.len_bytes)?;
        }
        let arrived = Arc::new(self.copies.context().new_event(None).map_err(failed("making an event"))?);
        // Held over the copies too, so that events stand in the order of their copies.
        let mut under_way = self.collect()?;
        if let Some(CudaFence(fence)) = after {
            self.copies.wait(fence).map_err(failed("waiting for a step"))?;
        }
        // The buffer is kept before the first byte moves: also where a later call fails, the device may be reading it.
        under_way.push(UnderWay { arrived: arrived.clone(), _source: source.clone() });
        let mut copied = Ok(());
        for run in runs.iter().filter(|run| run.num_bytes > 0) {
            let bytes = &bytes[run.source_offset..run.source_offset + run.num_bytes];
            // SAFETY: the target lies inside the block (checked above), and the caller promises that nobody else reads or
            // writes it until the token's arrival. The source is page-locked and lives in `under_way` until then.
            let one = unsafe {
                result::memcpy_htod_async(self.address + run.target_offset as u64, bytes, self.copies.cu_stream())
            };
            copied = copied.and(one.map_err(failed("copying to the device")));
        }
        let recorded = arrived.record(&self.copies).map_err(failed("recording a copy"));
        if recorded.is_err() {
            // No event stands behind the copies: nothing less than the end of them frees the buffer.
            let _ = self.copies.synchronize();
        }
        copied.and(recorded)?;
        Ok(CudaToken(arrived))
    }

    fn has_arrived(&self, token: &CudaToken) -> Result<bool, MemoryError> {
        self.use_context()?;
        token.0.try_is_complete().map_err(failed("asking for a copy"))
    }

    unsafe fn publish(
        &self,
        stream: &CudaStream,
        arrived: &CudaToken,
        target_offset: usize,
        rows: &[u8],
    ) -> Result<(), MemoryError> {
        check_bounds(target_offset, rows.len(), self.len_bytes)?;
        self.use_context()?;
        refuse_capture(stream)?;
        stream.wait(&arrived.0).map_err(failed("waiting for a copy"))?;
        // SAFETY: the target lies inside the block, and the caller promises that nobody else reads or writes it now. The
        // rows are not page-locked, so the driver has read them when the call returns.
        unsafe { result::memcpy_htod_async(self.address + target_offset as u64, rows, stream.cu_stream()) }
            .map_err(failed("writing the slot table"))
    }

    fn fence(&self, stream: &CudaStream) -> Result<CudaFence, MemoryError> {
        self.use_context()?;
        refuse_capture(stream)?;
        let event = stream.context().new_event(None).map_err(failed("making an event"))?;
        event.record(stream).map_err(failed("recording a step"))?;
        Ok(CudaFence(event))
    }

    unsafe fn read(&self, source_offset: usize, into: &mut [u8]) -> Result<(), MemoryError> {
        check_bounds(source_offset, into.len(), self.len_bytes)?;
        if into.is_empty() {
            return Ok(());
        }
        self.use_context()?;
        // SAFETY: the range lies inside the block and is initialised, the caller promises that nobody writes it now, and
        // `into` is not left before the copy is done.
        let read =
            unsafe { result::memcpy_dtoh_async(into, self.address + source_offset as u64, self.copies.cu_stream()) };
        let done = self.copies.synchronize();
        read.and(done).map_err(failed("reading from the device"))
    }
}

/// A driver's error with what was tried.
fn failed(operation: &'static str) -> impl Fn(DriverError) -> MemoryError {
    move |error| MemoryError::Device { operation, code: error.0 as i64 }
}

/// A graph would repeat what is asked for at every replay.
fn refuse_capture(stream: &CudaStream) -> Result<(), MemoryError> {
    let status = stream.capture_status().map_err(failed("asking whether the stream captures"))?;
    match status {
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => Ok(()),
        _ => Err(MemoryError::Capturing),
    }
}
