//! Page-locked host memory, kept for the next load.

use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaContext, result};

use super::failed;
use crate::memory::MemoryError;

/// Page-locked memory that nobody uses now, up to a number of bytes.
pub(super) struct PinnedCache {
    context: Arc<CudaContext>,
    kept_bytes: usize,
    free: Mutex<Vec<Pinned>>,
}

/// An allocation of page-locked memory.
struct Pinned {
    memory: NonNull<u8>,
    capacity: usize,
    context: Arc<CudaContext>,
}

// SAFETY: plain memory of the process with one owner, to be used and freed from any thread.
unsafe impl Send for Pinned {}
// SAFETY: as above; shared access is reading.
unsafe impl Sync for Pinned {}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: the memory came from `malloc_host` and has no other owner. On an error it stays allocated.
        let _ = self.context.bind_to_thread().and_then(|()| unsafe { result::free_host(self.memory.as_ptr().cast()) });
    }
}

impl PinnedCache {
    pub(super) fn new(context: Arc<CudaContext>, kept_bytes: usize) -> Arc<Self> {
        Arc::new(PinnedCache { context, kept_bytes, free: Mutex::new(Vec::new()) })
    }

    /// A zeroed buffer: the smallest that is free and large enough, or a fresh one.
    pub(super) fn buffer(cache: &Arc<Self>, num_bytes: usize) -> Result<PinnedBuffer, MemoryError> {
        let found = {
            let mut free = cache.free.lock().unwrap_or_else(PoisonError::into_inner);
            let fits = free.iter().enumerate().filter(|(_, pinned)| pinned.capacity >= num_bytes);
            let index = fits.min_by_key(|(_, pinned)| pinned.capacity).map(|(index, _)| index);
            index.map(|index| free.swap_remove(index))
        };
        let pinned = match found {
            Some(pinned) => pinned,
            None => cache.allocate(num_bytes)?,
        };
        // SAFETY: the allocation has this many bytes and one owner. Fresh memory holds what it held before, so this is also
        // what makes the bytes initialised.
        unsafe { pinned.memory.as_ptr().write_bytes(0, num_bytes) };
        Ok(PinnedBuffer { pinned: Some(pinned), len: num_bytes, cache: cache.clone() })
    }

    fn allocate(&self, num_bytes: usize) -> Result<Pinned, MemoryError> {
        let allocation = MemoryError::Allocation { kind: "page-locked", num_bytes };
        let capacity = num_bytes.max(1);
        self.context.bind_to_thread().map_err(failed("using the context"))?;
        // SAFETY: any size may be asked for; the result is checked.
        let memory = unsafe { result::malloc_host(capacity, 0) }.map_err(|error| match error.0 {
            cudarc::driver::sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => allocation.clone(),
            _ => failed("allocating page-locked memory")(error),
        })?;
        let memory = NonNull::new(memory.cast()).ok_or(allocation)?;
        Ok(Pinned { memory, capacity, context: self.context.clone() })
    }

    /// Takes memory back, and frees it where as much is kept already.
    fn give_back(&self, pinned: Pinned) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let kept: usize = free.iter().map(|pinned| pinned.capacity).sum();
        if kept.saturating_add(pinned.capacity) <= self.kept_bytes {
            free.push(pinned);
        }
    }
}

impl fmt::Debug for PinnedCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedCache").field("kept_bytes", &self.kept_bytes).finish_non_exhaustive()
    }
}

/// Page-locked host memory. Its drop keeps the memory for the next buffer.
pub struct PinnedBuffer {
    /// Taken by the drop.
    pinned: Option<Pinned>,
    len: usize,
    cache: Arc<PinnedCache>,
}

impl PinnedBuffer {
    fn start(&self) -> *mut u8 {
        self.pinned.as_ref().map_or(std::ptr::dangling_mut(), |pinned| pinned.memory.as_ptr())
    }
}

impl AsRef<[u8]> for PinnedBuffer {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the buffer owns `len` initialised bytes from there until its drop; the device only reads them.
        unsafe { std::slice::from_raw_parts(self.start(), self.len) }
    }
}

impl AsMut<[u8]> for PinnedBuffer {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the exclusive borrow says that no copy from it is under way: those hold it in an `Arc`.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.len) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if let Some(pinned) = self.pinned.take() {
            self.cache.give_back(pinned);
        }
    }
}

impl fmt::Debug for PinnedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedBuffer").field("len", &self.len).finish_non_exhaustive()
    }
}
