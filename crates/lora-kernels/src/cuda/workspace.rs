//! Scratch of the operations on one stream: h, partial sums, and tickets.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use lora_math::abi::{MAX_GROUP_ROWS, MAX_TILE_ROWS};

use super::abi::MAX_SITES;
use super::error::CudaError;
use super::shapes::{self, StepBounds};
use super::step::{StepCounts, refuse_capture};
use crate::error::KernelError;

/// The largest launch that a [`Workspace`] serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkspaceCapacity {
    /// The largest steps.
    pub bounds: StepBounds,
    /// Most sites of one call, at most 4: 3 for q, k and v.
    pub max_sites: usize,
    /// The largest rank of the pool.
    pub max_rank: usize,
    /// The widest input.
    pub max_in_features: usize,
}

/// Values of each buffer that a shrink takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sizes {
    /// 16-bit.
    h: usize,
    tile_h: usize,
    /// f32.
    partials: usize,
    /// u32.
    tickets: usize,
}

impl Sizes {
    /// None where a product wraps.
    fn of(counts: &StepCounts, sites: usize, max_rank: usize, in_features: usize) -> Option<Self> {
        let product =
            |factors: &[usize]| factors.iter().try_fold(1usize, |product, factor| product.checked_mul(*factor));
        let h_stride = shapes::h_stride(max_rank);
        let (_, chunks) = shapes::chunks(in_features);
        // Groups and tiles take turns on the stream, so they share the partial sums.
        let grouped = product(&[counts.groups, sites, chunks, h_stride, MAX_GROUP_ROWS])?;
        let tiled = product(&[counts.uses, sites, chunks, h_stride, MAX_TILE_ROWS])?;
        Some(Sizes {
            h: product(&[counts.entries, sites, h_stride])?,
            tile_h: product(&[counts.tile_entries, sites, h_stride])?,
            partials: grouped.max(tiled),
            tickets: product(&[counts.groups.max(counts.uses), sites, shapes::rank_splits(max_rank)])?,
        })
    }
}

/// What the values between shrink and expand belong to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Held {
    entries: usize,
    tile_entries: usize,
    sites: usize,
}

/// Scratch for the operations of one stream, made once at its largest size; operations take turns in it, as they do on the
/// stream. It must outlive the graphs that captured its use, and they are replayed on that stream.
pub struct Workspace {
    stream: Arc<CudaStream>,
    capacity: WorkspaceCapacity,
    sizes: Sizes,
    addresses: Addresses,
    held: Held,
    // Owners of the addresses.
    _h: [CudaSlice<u16>; 2],
    _partials: CudaSlice<f32>,
    _tickets: CudaSlice<u32>,
}

/// Device addresses of the buffers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Addresses {
    pub(super) h: u64,
    pub(super) tile_h: u64,
    pub(super) partials: u64,
    pub(super) tickets: u64,
}

impl Workspace {
    /// A workspace for the operations on `stream`.
    ///
    /// # Errors
    /// The driver's, and [`CudaError::TooLarge`].
    pub fn new(stream: &Arc<CudaStream>, capacity: WorkspaceCapacity) -> Result<Self, CudaError> {
        refuse_capture(stream, "an allocation")?;
        let WorkspaceCapacity { bounds, max_sites, max_rank, max_in_features } = capacity;
        if max_sites > MAX_SITES {
            return Err(CudaError::TooLarge { what: "sites", count: max_sites, max: MAX_SITES });
        }
        let counts = StepCounts::most(&bounds);
        // The widest input does not have the most chunks where narrow ones are cut finer.
        let most_chunks = if shapes::chunks(max_in_features).1 < shapes::chunks(max_in_features.min(4096)).1 {
            max_in_features.min(4096)
        } else {
            max_in_features
        };
        let too_large = CudaError::TooLarge { what: "bytes", count: usize::MAX, max: isize::MAX as usize };
        let sizes = Sizes::of(&counts, max_sites, max_rank, most_chunks).ok_or(too_large)?;
        let failed = CudaError::driver("allocating a workspace");
        // Never empty: a launch that needs nothing of a buffer still names its address. Zeros, so that tickets start at
        // none and no value of h is what memory held before.
        let h = [stream.alloc_zeros(sizes.h.max(8)), stream.alloc_zeros(sizes.tile_h.max(8))];
        let [h, tile_h] = h.map(|h| h.map_err(&failed));
        let (h, tile_h) = (h?, tile_h?);
        let partials = stream.alloc_zeros(sizes.partials.max(1)).map_err(&failed)?;
        let tickets = stream.alloc_zeros(sizes.tickets.max(1)).map_err(&failed)?;
        // All of one stream, so nobody's work on them needs to be waited for.
        let addresses = Addresses {
            h: h.device_ptr(stream).0,
            tile_h: tile_h.device_ptr(stream).0,
            partials: partials.device_ptr(stream).0,
            tickets: tickets.device_ptr(stream).0,
        };
        Ok(Workspace {
            stream: stream.clone(),
            capacity,
            sizes,
            addresses,
            held: Held::default(),
            _h: [h, tile_h],
            _partials: partials,
            _tickets: tickets,
        })
    }

    /// The largest launch.
    pub fn capacity(&self) -> WorkspaceCapacity {
        self.capacity
    }

    /// Bytes of device memory.
    pub fn num_bytes(&self) -> usize {
        2 * (self.sizes.h + self.sizes.tile_h) + 4 * (self.sizes.partials + self.sizes.tickets)
    }

    pub(super) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    pub(super) fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// Values from one h to the next.
    pub(super) fn h_stride(&self) -> usize {
        shapes::h_stride(self.capacity.max_rank)
    }

    /// Checks that a shrink of this size fits.
    pub(super) fn check_fits(&self, counts: &StepCounts, sites: usize, in_features: usize) -> Result<(), CudaError> {
        let most = usize::MAX;
        let need = Sizes::of(counts, sites, self.capacity.max_rank, in_features);
        let need = need.unwrap_or(Sizes { h: most, tile_h: most, partials: most, tickets: most });
        let have = self.sizes;
        for (what, count, max) in [
            ("values between shrink and expand", need.h, have.h),
            ("values between shrink and expand of tiles", need.tile_h, have.tile_h),
            ("partial sums", need.partials, have.partials),
            ("tickets", need.tickets, have.tickets),
        ] {
            if count > max {
                return Err(CudaError::WorkspaceTooSmall { what, count, max });
            }
        }
        Ok(())
    }

    /// Says what the values between shrink and expand belong to.
    pub(super) fn hold(&mut self, counts: &StepCounts, sites: usize) {
        self.held = Held { entries: counts.entries, tile_entries: counts.tile_entries, sites };
    }

    /// Checks that the last shrink was of this size.
    pub(super) fn check_holds(&self, counts: &StepCounts, sites: usize) -> Result<(), CudaError> {
        let wanted = Held { entries: counts.entries, tile_entries: counts.tile_entries, sites };
        if wanted == self.held {
            return Ok(());
        }
        let held = self.held;
        Err(KernelError::ShrinkMismatch {
            entries: counts.entries + counts.tile_entries,
            sites,
            held_entries: held.entries + held.tile_entries,
            held_sites: held.sites,
        }
        .into())
    }
}

impl std::fmt::Debug for Workspace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Workspace").field("capacity", &self.capacity).field("held", &self.held).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_follow_the_kernels_indices() {
        let counts = StepCounts { rows: 8, entries: 10, groups: 3, tiles: 2, uses: 4, tile_entries: 90 };
        let sizes = Sizes::of(&counts, 3, 33, 1000).unwrap();
        // h_stride 40, 4 chunks, 3 blocks share out the ranks.
        assert_eq!(sizes.h, 10 * 3 * 40);
        assert_eq!(sizes.tile_h, 90 * 3 * 40);
        assert_eq!(sizes.partials, 4 * 3 * 4 * 40 * 64);
        assert_eq!(sizes.tickets, 4 * 3 * 3);
        assert!(Sizes::of(&counts, usize::MAX, 33, 1000).is_none());
    }

    #[test]
    fn no_narrower_input_has_more_chunks_than_a_capacity_counts() {
        for max_in_features in [1, 4096, 4097, 5000, 8192, 14336] {
            let counted = shapes::chunks(max_in_features).1.max(shapes::chunks(max_in_features.min(4096)).1);
            assert!((1..=max_in_features).all(|width| shapes::chunks(width).1 <= counted), "{max_in_features}");
        }
    }
}
