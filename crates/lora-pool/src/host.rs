//! Pool memory in the host's own RAM, for back ends whose kernels run on the CPU.
//!
//! Copies and steps are done when their calls return, so stream, token and fence are empty types.
//!
//! # Why shared writes are sound here
//! The memory is written through `&HostMemory`, while kernels on other threads read other parts of it through bare
//! pointers. It holds no `UnsafeCell` and no reference is ever made to its bytes: all access is by raw pointer,
//! so the only question is whether a write can meet another access to the same bytes. [`DeviceMemory`]'s unsafe
//! methods put that on their caller, and the pool answers it by its lease protocol:
//!
//! - A slot is free, landing, or resident. Its bytes and its rows of the table are written only while it is
//!   landing, by the one owner of that landing.
//! - It starts to land only from free, or from resident with no lease; it can be leased only while resident;
//!   and a step reads the slots of the leases that it holds, and no others.
//! - Every one of these changes happens under the pool's mutex. A step's reads therefore happen before its lease is
//!   given back, which happens before the slot lands anew; and the writes of a landing happen before it becomes
//!   resident, which happens before the first lease on it.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::memory::{CopyRun, DeviceMemory, MemoryError, check_bounds};

/// Start of the memory: a page, so that no other data shares its pages and every slot is aligned for any vector load.
const HOST_ALIGNMENT: usize = 4096;

/// One zeroed block of host memory, allocated once.
#[derive(Debug)]
pub struct HostMemory {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the block belongs to this value alone and is freed only by its `Drop`; access from several threads goes
// through unsafe methods whose callers rule out races, as the module's page argues.
unsafe impl Send for HostMemory {}
// SAFETY: as for `Send`.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Allocates `num_bytes` zeroed bytes; at least one, so that an address always exists.
    pub fn allocate(num_bytes: usize) -> Result<Self, MemoryError> {
        let failed = MemoryError::Allocation { kind: "host", num_bytes };
        let layout = Layout::from_size_align(num_bytes.max(1), HOST_ALIGNMENT).map_err(|_| failed.clone())?;
        // SAFETY: the layout's size is at least 1.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(failed)?;
        Ok(HostMemory { base, layout })
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: `base` came from `alloc_zeroed` with this layout, and `&mut self` says that nobody uses it
        // any more.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}

/// The one stream of the host: calls run where they are made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostStream;

/// A copy that has arrived: on the host every copy has when its call returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrived;

// SAFETY: `base` and `layout` never change, the bytes were zeroed at the start and live until `Drop`, the
// alignment is a multiple of the layout's, and writes stay inside the checked ranges.
unsafe impl DeviceMemory for HostMemory {
    type Stream = HostStream;
    type CopyToken = Arrived;
    type StepFence = Arrived;
    type HostBuffer = Vec<u8>;

    fn address(&self) -> u64 {
        self.base.as_ptr().expose_provenance() as u64
    }

    fn len_bytes(&self) -> usize {
        self.layout.size()
    }

    fn host_buffer(&self, num_bytes: usize) -> Result<Vec<u8>, MemoryError> {
        let mut buffer = Vec::new();
        buffer.try_reserve_exact(num_bytes).map_err(|_| MemoryError::Allocation { kind: "host", num_bytes })?;
        buffer.resize(num_bytes, 0);
        Ok(buffer)
    }

    unsafe fn copy(
        &self,
        source: Arc<Vec<u8>>,
        runs: &[CopyRun],
        _after: Option<&Arrived>,
    ) -> Result<Arrived, MemoryError> {
        for run in runs {
            check_bounds(run.source_offset, run.num_bytes, source.len())?;
            check_bounds(run.target_offset, run.num_bytes, self.len_bytes())?;
        }
        for run in runs {
            let bytes = &source[run.source_offset..run.source_offset + run.num_bytes];
            // SAFETY: the range lies inside the block (checked above), and the caller promises that nobody else
            // reads or writes it now. `source` is another allocation, so the ranges do not overlap.
            unsafe { self.base.add(run.target_offset).as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) }
        }
        Ok(Arrived)
    }

    fn has_arrived(&self, _token: &Arrived) -> Result<bool, MemoryError> {
        Ok(true)
    }

    unsafe fn publish(
        &self,
        _stream: &HostStream,
        _arrived: &Arrived,
        target_offset: usize,
        rows: &[u8],
    ) -> Result<(), MemoryError> {
        check_bounds(target_offset, rows.len(), self.len_bytes())?;
        // SAFETY: as in `copy`.
        unsafe { self.base.add(target_offset).as_ptr().copy_from_nonoverlapping(rows.as_ptr(), rows.len()) }
        Ok(())
    }

    fn fence(&self, _stream: &HostStream) -> Result<Arrived, MemoryError> {
        Ok(Arrived)
    }

    unsafe fn read(&self, source_offset: usize, into: &mut [u8]) -> Result<(), MemoryError> {
        check_bounds(source_offset, into.len(), self.len_bytes())?;
        // SAFETY: the range lies inside the block and is initialised; the caller promises that nobody writes it now.
        unsafe { self.base.add(source_offset).as_ptr().copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes_of(memory: &HostMemory, offset: usize, num_bytes: usize) -> Vec<u8> {
        let mut bytes = vec![0xAA; num_bytes];
        // SAFETY: the test has the memory to itself.
        unsafe { memory.read(offset, &mut bytes) }.unwrap();
        bytes
    }

    #[test]
    fn the_block_is_page_aligned_and_zero() {
        let memory = HostMemory::allocate(10_000).unwrap();
        assert_eq!(memory.address() % 4096, 0);
        assert!(bytes_of(&memory, 0, 10_000).iter().all(|&byte| byte == 0));
        HostMemory::allocate(0).unwrap();
    }

    #[test]
    fn runs_land_where_they_are_told_and_nowhere_else() {
        let memory = HostMemory::allocate(16).unwrap();
        let runs = [
            CopyRun { source_offset: 0, target_offset: 8, num_bytes: 2 },
            CopyRun { source_offset: 2, target_offset: 1, num_bytes: 3 },
        ];
        // SAFETY: the test has the memory to itself.
        unsafe { memory.copy(Arc::new(vec![1, 2, 3, 4, 5]), &runs, None) }.unwrap();
        // SAFETY: as above.
        unsafe { memory.publish(&HostStream, &Arrived, 14, &[9, 9]) }.unwrap();
        assert_eq!(bytes_of(&memory, 0, 16), [0, 3, 4, 5, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 9, 9]);
    }

    #[test]
    fn ranges_outside_are_refused_before_anything_is_written() {
        let memory = HostMemory::allocate(16).unwrap();
        let good = CopyRun { source_offset: 0, target_offset: 0, num_bytes: 4 };
        for bad in [
            CopyRun { source_offset: 1, ..good },
            CopyRun { target_offset: 13, ..good },
            CopyRun { target_offset: usize::MAX, ..good },
        ] {
            // SAFETY: the test has the memory to itself.
            let result = unsafe { memory.copy(Arc::new(vec![7; 4]), &[good, bad], None) };
            assert!(matches!(result, Err(MemoryError::OutOfBounds { num_bytes: 4, .. })), "{result:?}");
        }
        assert_eq!(bytes_of(&memory, 0, 16), [0; 16]);
        // SAFETY: as above.
        assert!(unsafe { memory.publish(&HostStream, &Arrived, 15, &[1, 1]) }.is_err());
        // SAFETY: as above.
        assert!(unsafe { memory.read(17, &mut []) }.is_err());
    }

    #[test]
    fn a_block_larger_than_the_address_space_is_an_error() {
        let error = HostMemory::allocate(usize::MAX).unwrap_err();
        assert_eq!(error, MemoryError::Allocation { kind: "host", num_bytes: usize::MAX });
        assert!(error.is_retryable());
    }
}
