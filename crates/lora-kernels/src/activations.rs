//! Views of activations, and the buffer between shrink and expand.
//!
//! Activations are row-major f32: row `i` of width `w` stands at `data[i · w..][..w]`. The views borrow; only
//! [`ShrinkBuffer`] owns memory, and only when it is made.

use std::marker::PhantomData;
use std::ptr::NonNull;

use crate::error::KernelError;

/// Input rows, row-major.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    data: &'a [f32],
    width: usize,
}

impl<'a> Rows<'a> {
    /// Views `data` as rows of `width` values.
    pub fn new(data: &'a [f32], width: usize) -> Result<Self, KernelError> {
        check_whole_rows(data.len(), width)?;
        Ok(Rows { data, width })
    }

    /// Number of rows.
    pub fn num_rows(&self) -> usize {
        self.data.len() / self.width
    }

    /// Values in a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// All rows, one after the other.
    pub fn data(&self) -> &'a [f32] {
        self.data
    }

    /// One row.
    ///
    /// # Panics
    /// If `row` is not below [`num_rows`](Self::num_rows).
    pub fn row(&self, row: usize) -> &'a [f32] {
        &self.data[row * self.width..][..self.width]
    }
}

/// Output rows, row-major.
///
/// Holds a raw pointer, so that the threads of an operation may write disjoint places of one output.
#[derive(Debug)]
pub struct RowsMut<'a> {
    data: NonNull<f32>,
    num_rows: usize,
    width: usize,
    memory: PhantomData<&'a mut [f32]>,
}

// SAFETY: the view stands for an exclusive borrow of plain values; its safe methods read and write through `&mut self`.
unsafe impl Send for RowsMut<'_> {}
// SAFETY: as above; a shared view gives out no more than a raw pointer, inside this crate.
unsafe impl Sync for RowsMut<'_> {}

impl<'a> RowsMut<'a> {
    /// Views `data` as rows of `width` values.
    pub fn new(data: &'a mut [f32], width: usize) -> Result<Self, KernelError> {
        check_whole_rows(data.len(), width)?;
        let num_rows = data.len() / width;
        Ok(RowsMut { data: NonNull::from(data).cast(), num_rows, width, memory: PhantomData })
    }

    /// Number of rows.
    pub fn num_rows(&self) -> usize {
        self.num_rows
    }

    /// Values in a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// All rows, one after the other.
    pub fn data_mut(&mut self) -> &mut [f32] {
        // SAFETY: the pointer and sizes are those of the slice that this view borrows exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), self.num_rows * self.width) }
    }

    /// One row.
    ///
    /// # Panics
    /// If `row` is not below [`num_rows`](Self::num_rows).
    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        let width = self.width;
        &mut self.data_mut()[row * width..][..width]
    }

    /// The same rows, borrowed for a shorter time.
    pub fn reborrow(&mut self) -> RowsMut<'_> {
        RowsMut { memory: PhantomData, ..*self }
    }

    /// The first value; whoever writes through it holds the view exclusively and keeps its writers apart.
    pub(crate) fn as_ptr(&self) -> *mut f32 {
        self.data.as_ptr()
    }
}

fn check_whole_rows(values: usize, width: usize) -> Result<(), KernelError> {
    if width == 0 || !values.is_multiple_of(width) {
        return Err(KernelError::RaggedRows { values, width });
    }
    Ok(())
}

/// Largest sizes of a [`ShrinkBuffer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShrinkCapacity {
    /// Entries of a step (uses of adapters by rows); a delta works through its run in pieces of as many rows.
    pub max_entries: usize,
    /// Sites of one call: 3 for q, k and v.
    pub max_sites: usize,
    /// The largest rank of the pool.
    pub max_rank: usize,
}

/// h, the values between shrink and expand: `[entries][sites][max_rank]` f32, made once at its largest size.
///
/// Only the first `rank` values of an entry at a site are written and read; the others are stale.
#[derive(Clone, Debug)]
pub struct ShrinkBuffer {
    capacity: ShrinkCapacity,
    h: Vec<f32>,
    held_entries: usize,
    held_sites: usize,
}

impl ShrinkBuffer {
    /// A buffer of this size; nothing is allocated after this.
    ///
    /// # Errors
    /// [`KernelError::ShrinkBufferSize`] where it does not fit in memory.
    pub fn new(capacity: ShrinkCapacity) -> Result<Self, KernelError> {
        let ShrinkCapacity { max_entries, max_sites, max_rank } = capacity;
        let too_large = KernelError::ShrinkBufferSize { max_entries, max_sites, max_rank };
        // Kernels write through pointers within the capacity: a product that wraps would be a buffer smaller than it says.
        let len = max_entries.checked_mul(max_sites).and_then(|len| len.checked_mul(max_rank));
        let len = len.ok_or_else(|| too_large.clone())?;
        let mut h = Vec::new();
        h.try_reserve_exact(len).map_err(|_| too_large)?;
        h.resize(len, 0.0);
        Ok(ShrinkBuffer { capacity, h, held_entries: 0, held_sites: 0 })
    }

    /// What the buffer was made for.
    pub fn capacity(&self) -> ShrinkCapacity {
        self.capacity
    }

    /// h of an entry of the last shrink at the site with this position in the call; the first `rank` values count.
    ///
    /// # Panics
    /// If the last shrink had no such entry or site.
    pub fn values(&self, entry: usize, site: usize) -> &[f32] {
        assert!(entry < self.held_entries && site < self.held_sites, "no entry {entry} or site {site} is held");
        &self.h[self.offset(entry, site)..][..self.capacity.max_rank]
    }

    /// Checks that a shrink of this size fits.
    pub(crate) fn check_fits(&self, entries: usize, sites: usize) -> Result<(), KernelError> {
        let ShrinkCapacity { max_entries, max_sites, .. } = self.capacity;
        if entries > max_entries || sites > max_sites {
            return Err(KernelError::ShrinkTooLarge { entries, sites, max_entries, max_sites });
        }
        Ok(())
    }

    /// Checks that the last shrink was of this size.
    pub(crate) fn check_holds(&self, entries: usize, sites: usize) -> Result<(), KernelError> {
        let ShrinkBuffer { held_entries, held_sites, .. } = *self;
        if (entries, sites) != (held_entries, held_sites) {
            return Err(KernelError::ShrinkMismatch { entries, sites, held_entries, held_sites });
        }
        Ok(())
    }

    /// Says what the next writes are of; [`check_fits`](Self::check_fits) comes before.
    pub(crate) fn hold(&mut self, entries: usize, sites: usize) {
        (self.held_entries, self.held_sites) = (entries, sites);
    }

    /// Where h of an entry at a site starts in [`h_mut`](Self::h_mut).
    pub(crate) fn offset(&self, entry: usize, site: usize) -> usize {
        (entry * self.held_sites + site) * self.capacity.max_rank
    }

    pub(crate) fn h(&self) -> &[f32] {
        &self.h
    }

    pub(crate) fn h_mut(&mut self) -> &mut [f32] {
        &mut self.h
    }
}
