//! A view of a pool's slot table in memory that this process can read.
//!
//! The view holds a raw pointer and reads single entries: a loader may write the rows of other slots meanwhile, so no
//! reference to the whole table is ever formed. It knows nothing of pools; whoever makes it vouches for the memory.

use std::marker::PhantomData;

use half::{bf16, f16};
use lora_math::{Features, SiteEntry, SlotDtype};

use crate::error::KernelError;

/// A site as an operation names it: its column in the slot table and its widths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SiteRef {
    /// The site's index in the layout, which is its column in the slot table.
    pub index: usize,
    /// Input and output width.
    pub features: Features,
}

/// `SiteEntry[num_slots][num_sites]` in readable memory.
#[derive(Clone, Copy, Debug)]
pub struct SlotTable<'a> {
    entries: *const SiteEntry,
    num_slots: usize,
    num_sites: usize,
    dtype: SlotDtype,
    memory: PhantomData<&'a [SiteEntry]>,
}

// SAFETY: a table is only read, and the contract of `from_raw` holds for every thread.
unsafe impl Send for SlotTable<'_> {}
// SAFETY: as above.
unsafe impl Sync for SlotTable<'_> {}

impl<'a> SlotTable<'a> {
    /// Views the table at `entries`.
    ///
    /// # Safety
    /// For as long as `'a` and for every slot that an operation with this table names (through a step's rows or a run):
    /// - the slot's row of the table is readable, 8-byte aligned, and not written;
    /// - where an entry's rank is not 0, its A `[rank, in_features]` (of an embedding `[in_features, rank]`) and B
    ///   `[out_features, rank]` of `dtype` are readable and not written, each aligned to its element, where `in_features`
    ///   and `out_features` are those of the [`SiteRef`] with which the operation names the entry's column.
    ///
    /// Other slots' rows and contents may be written at any time. A pool's leases give this.
    pub unsafe fn from_raw(entries: *const SiteEntry, num_slots: usize, num_sites: usize, dtype: SlotDtype) -> Self {
        SlotTable { entries, num_slots, num_sites, dtype, memory: PhantomData }
    }

    /// Rows of the table.
    pub fn num_slots(&self) -> usize {
        self.num_slots
    }

    /// Columns of the table.
    pub fn num_sites(&self) -> usize {
        self.num_sites
    }

    /// Element type of every A and B.
    pub fn dtype(&self) -> SlotDtype {
        self.dtype
    }

    /// The entry of a slot at a site, for back ends outside of this crate.
    ///
    /// # Errors
    /// The slot or the site is past the table's end.
    ///
    /// # Safety
    /// The slot is one that an operation with this table names: what [`from_raw`](Self::from_raw) promises of its row
    /// holds.
    pub unsafe fn entry(&self, slot: u32, site: &SiteRef) -> Result<SiteEntry, KernelError> {
        if slot as usize >= self.num_slots {
            return Err(KernelError::SlotOutOfRange { slot, num_slots: self.num_slots });
        }
        if site.index >= self.num_sites {
            return Err(KernelError::SiteOutOfRange { site: site.index, num_sites: self.num_sites });
        }
        // SAFETY: both indices are in range, and the caller vouches for the row.
        Ok(unsafe { self.entries.add(slot as usize * self.num_sites + site.index).read() })
    }

    /// A and B of a slot at a site; none where the adapter does not touch it.
    pub(crate) fn pair(&self, slot: u32, site: &SiteRef) -> Result<Option<PairView<'a>>, KernelError> {
        // SAFETY: operations of this crate ask only for the slots that their rows or runs name.
        let entry = unsafe { self.entry(slot, site) }?;
        let rank = entry.rank as usize;
        if rank == 0 {
            return Ok(None);
        }
        if entry.a == 0 || entry.b == 0 {
            return Err(KernelError::NullAddress { slot, site: site.index, rank });
        }
        Ok(Some(PairView {
            a: MatrixView { address: entry.a as usize as *const u8, dtype: self.dtype, memory: PhantomData },
            b: MatrixView { address: entry.b as usize as *const u8, dtype: self.dtype, memory: PhantomData },
            rank,
            scaling: entry.scaling,
        }))
    }
}

/// A and B of one adapter at one site, as its table entry gives them.
#[derive(Clone, Copy)]
pub(crate) struct PairView<'a> {
    /// `[rank, in_features]`; of an embedding `[in_features, rank]`.
    pub(crate) a: MatrixView<'a>,
    /// `[out_features, rank]`.
    pub(crate) b: MatrixView<'a>,
    /// At least 1.
    pub(crate) rank: usize,
    pub(crate) scaling: f32,
}

/// The values of a row-major matrix of which only the address and dtype are known.
#[derive(Clone, Copy)]
pub(crate) struct MatrixView<'a> {
    pub(crate) address: *const u8,
    pub(crate) dtype: SlotDtype,
    memory: PhantomData<&'a [u8]>,
}

// SAFETY: the values are only read, under the contract of `SlotTable::from_raw`.
unsafe impl Send for MatrixView<'_> {}
// SAFETY: as above.
unsafe impl Sync for MatrixView<'_> {}

impl MatrixView<'_> {
    /// The value at a flat index, widened.
    ///
    /// # Safety
    /// `index` is below the matrix's number of values.
    pub(crate) unsafe fn value(&self, index: usize) -> f32 {
        // SAFETY: the caller keeps the index in range, and the contract of `from_raw` makes the values readable.
        unsafe {
            match self.dtype {
                SlotDtype::F32 => self.address.cast::<f32>().add(index).read_unaligned(),
                SlotDtype::F16 => self.address.cast::<f16>().add(index).read_unaligned().to_f32(),
                SlotDtype::Bf16 => self.address.cast::<bf16>().add(index).read_unaligned().to_f32(),
            }
        }
    }
}

impl<'a> crate::weights::WeightView<'a> {
    /// The values, as the kernels that also read slots take them.
    pub(crate) fn matrix(&self) -> MatrixView<'a> {
        use crate::weights::WeightValues;
        let (address, dtype) = match self.values() {
            WeightValues::F32(values) => (values.as_ptr().cast(), SlotDtype::F32),
            WeightValues::F16(values) => (values.as_ptr().cast(), SlotDtype::F16),
            WeightValues::Bf16(values) => (values.as_ptr().cast(), SlotDtype::Bf16),
        };
        MatrixView { address, dtype, memory: PhantomData }
    }
}
