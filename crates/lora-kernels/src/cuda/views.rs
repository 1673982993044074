//! Views of device memory that an engine owns: activations, and a pool's slot table.

use std::marker::PhantomData;

use cudarc::driver::{DevicePtr, DevicePtrMut};
use half::{bf16, f16};
use lora_math::SlotDtype;

use super::error::CudaError;

/// An element type of activations, A and B on CUDA.
pub trait Element: sealed::Sealed + Copy {
    /// The type as a slot table names it.
    const DTYPE: SlotDtype;
}

impl Element for bf16 {
    const DTYPE: SlotDtype = SlotDtype::Bf16;
}

impl Element for f16 {
    const DTYPE: SlotDtype = SlotDtype::F16;
}

mod sealed {
    /// Kernels exist for these types alone.
    pub trait Sealed {}
    impl Sealed for half::bf16 {}
    impl Sealed for half::f16 {}
}

/// Rows of a matrix in device memory.
#[derive(Clone, Copy)]
pub struct DeviceRows<'a, T> {
    pub(super) values: &'a dyn DevicePtr<T>,
    pub(super) shape: RowsShape,
}

/// Rows of a matrix in device memory that an operation writes.
pub struct DeviceRowsMut<'a, T> {
    pub(super) values: &'a mut dyn DevicePtrMut<T>,
    pub(super) shape: RowsShape,
}

/// How rows lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowsShape {
    pub(super) num_rows: usize,
    pub(super) width: usize,
    pub(super) stride: usize,
}

impl RowsShape {
    fn new(num_rows: usize, width: usize, stride: usize, values: usize) -> Result<Self, CudaError> {
        let misfit = CudaError::View { num_rows, width, stride, values };
        let last = num_rows.checked_sub(1).map_or(Some(0), |last| last.checked_mul(stride)?.checked_add(width));
        if width == 0 || stride < width || last.is_none_or(|last| last > values) {
            return Err(misfit);
        }
        // What kernels count in.
        if [num_rows, width, stride].iter().any(|&size| size > i32::MAX as usize) {
            return Err(misfit);
        }
        Ok(RowsShape { num_rows, width, stride })
    }

    fn whole(width: usize, values: usize) -> Result<Self, CudaError> {
        if width == 0 || !values.is_multiple_of(width) {
            return Err(crate::KernelError::RaggedRows { values, width }.into());
        }
        Self::new(values / width, width, width, values)
    }
}

impl<'a, T> DeviceRows<'a, T> {
    /// All of `values`, as rows of `width` one behind the other.
    ///
    /// # Errors
    /// [`KernelError::RaggedRows`](crate::KernelError::RaggedRows) unless they are whole rows.
    pub fn new(values: &'a dyn DevicePtr<T>, width: usize) -> Result<Self, CudaError> {
        let shape = RowsShape::whole(width, values.len())?;
        Ok(DeviceRows { values, shape })
    }

    /// Rows of `width` values that start `stride` values apart: some of the columns of a wider buffer.
    ///
    /// # Errors
    /// [`CudaError::View`] where they overlap or reach past the end.
    pub fn strided(
        values: &'a dyn DevicePtr<T>,
        num_rows: usize,
        width: usize,
        stride: usize,
    ) -> Result<Self, CudaError> {
        let shape = RowsShape::new(num_rows, width, stride, values.len())?;
        Ok(DeviceRows { values, shape })
    }
}

impl<'a, T> DeviceRowsMut<'a, T> {
    /// All of `values`, as rows of `width` one behind the other.
    ///
    /// # Errors
    /// [`KernelError::RaggedRows`](crate::KernelError::RaggedRows) unless they are whole rows.
    pub fn new(values: &'a mut dyn DevicePtrMut<T>, width: usize) -> Result<Self, CudaError> {
        let shape = RowsShape::whole(width, values.len())?;
        Ok(DeviceRowsMut { values, shape })
    }

    /// Rows of `width` values that start `stride` values apart: some of the columns of a wider buffer.
    ///
    /// # Errors
    /// [`CudaError::View`] where they overlap or reach past the end.
    pub fn strided(
        values: &'a mut dyn DevicePtrMut<T>,
        num_rows: usize,
        width: usize,
        stride: usize,
    ) -> Result<Self, CudaError> {
        let shape = RowsShape::new(num_rows, width, stride, values.len())?;
        Ok(DeviceRowsMut { values, shape })
    }
}

impl<T> std::fmt::Debug for DeviceRows<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("DeviceRows").field(&self.shape).finish()
    }
}

impl<T> std::fmt::Debug for DeviceRowsMut<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("DeviceRowsMut").field(&self.shape).finish()
    }
}

/// A pool's slot table in device memory: `SiteEntry[num_slots][num_sites]`.
#[derive(Clone, Copy, Debug)]
pub struct DeviceTable<'a> {
    pub(super) address: u64,
    pub(super) num_slots: usize,
    pub(super) num_sites: usize,
    pub(super) dtype: SlotDtype,
    pub(super) max_rank: usize,
    memory: PhantomData<&'a ()>,
}

impl DeviceTable<'_> {
    /// The table at a device address.
    ///
    /// # Safety
    /// For as long as work launched with the table runs, replays of graphs that captured it included, and for every slot
    /// that a step of such work names:
    /// - the slot's row is readable on the device, 8-byte aligned, and not written;
    /// - where an entry's rank is not 0, it is at most `max_rank`, and its A `[rank, in_features]` (of an embedding
    ///   `[in_features, rank]`) and B `[out_features, rank]` of `dtype` are readable on the device and not written, where
    ///   `in_features` and `out_features` are those of the [`SiteRef`](crate::SiteRef) with which the operation names the
    ///   entry's column.
    ///
    /// Other slots' rows and contents may be written at any time. A pool's leases give this.
    pub unsafe fn from_raw(
        address: u64,
        num_slots: usize,
        num_sites: usize,
        dtype: SlotDtype,
        max_rank: usize,
    ) -> Self {
        DeviceTable { address, num_slots, num_sites, dtype, max_rank, memory: PhantomData }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_stay_inside_their_memory() {
        let shape = |rows, width, stride, values| RowsShape::new(rows, width, stride, values).is_ok();
        assert!(shape(3, 4, 6, 16) && shape(1, 4, 100, 4) && shape(0, 4, 4, 0));
        assert!(!shape(3, 4, 6, 15), "the last row ends behind the memory");
        assert!(!shape(2, 4, 3, 100), "rows overlap");
        assert!(!shape(2, 0, 0, 100) && !shape(usize::MAX, 4, usize::MAX, 100));
        assert!(RowsShape::whole(4, 10).is_err() && RowsShape::whole(0, 0).is_err());
        assert_eq!(RowsShape::whole(5, 10).unwrap(), RowsShape { num_rows: 2, width: 5, stride: 5 });
    }
}
