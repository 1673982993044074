//! Launch shapes: pure functions of sizes, so that they are tested without a device.

use lora_math::rows::RowsCapacity;
use lora_math::{StepTiles, abi::MAX_GROUP_ROWS};

use super::abi::{MAX_SITES, SiteOutput};
use super::error::CudaError;
use crate::table::SiteRef;

/// `THREADS` of `kernels/common.cuh`.
pub(super) const THREADS: u32 = 128;
/// `THREADS / 32`.
pub(super) const WARPS: usize = 4;
/// `RANK_TILE` of `kernels/shrink.cuh`.
const RANK_TILE: usize = 16;
/// `OUT_TILE` of `kernels/expand.cuh`.
const OUT_TILE: usize = 128;
/// Blocks along y and z that a launch has at most: CUDA C++ Programming Guide, technical specifications.
const MAX_GRID_YZ: usize = 65_535;
/// Blocks that share out the ranks of one site. More would read x more often for ranks that few adapters have.
const MAX_RANK_SPLITS: usize = 4;

/// Blocks of a launch along x, y and z.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Grid(pub(super) u32, pub(super) u32, pub(super) u32);

impl Grid {
    /// The grid, or what is too large about it.
    pub(super) fn new(x: usize, y: usize, z: usize) -> Result<Self, CudaError> {
        let check = |what, count: usize, max| {
            if count > max { Err(CudaError::TooLarge { what, count, max }) } else { Ok(count as u32) }
        };
        Ok(Grid(
            check("blocks along x", x, i32::MAX as usize)?,
            check("blocks along y", y, MAX_GRID_YZ)?,
            check("blocks along z", z, MAX_GRID_YZ)?,
        ))
    }

    /// A grid without blocks, which is not launched.
    pub(super) fn is_empty(self) -> bool {
        self.0 == 0 || self.1 == 0 || self.2 == 0
    }
}

/// How a sum over `in_features` is cut: columns of a chunk, a multiple of 256 for its four quarters of whole products,
/// and the number of chunks. It depends on `in_features` alone, and with it the bits of h.
pub(super) fn chunks(in_features: usize) -> (usize, usize) {
    let chunk = if in_features <= 4096 { 256 } else { 512 };
    (chunk, in_features.div_ceil(chunk))
}

/// Blocks that share out the ranks up to `max_rank` of one site.
pub(super) fn rank_splits(max_rank: usize) -> usize {
    max_rank.div_ceil(RANK_TILE).clamp(1, MAX_RANK_SPLITS)
}

/// Values from one h to the next: whole vectors of 8.
pub(super) fn h_stride(max_rank: usize) -> usize {
    max_rank.next_multiple_of(8)
}

/// The sites of an expand with the first block of each, and the blocks of all. `places` are the address and row stride of
/// each site's output.
pub(super) fn expand_sites(sites: &[SiteRef], places: &[(u64, usize); MAX_SITES]) -> ([SiteOutput; MAX_SITES], usize) {
    let mut outputs = [SiteOutput::default(); MAX_SITES];
    let mut blocks = 0;
    for ((output, site), &(y, stride)) in outputs.iter_mut().zip(sites).zip(places) {
        *output = SiteOutput {
            y,
            stride: stride as u32,
            site: site.index as u32,
            out_features: site.features.out_features as u32,
            first_block: blocks as u32,
        };
        blocks += site.features.out_features.div_ceil(OUT_TILE);
    }
    (outputs, blocks)
}

/// What the steps of a [`CudaStep`](super::CudaStep) have at most. A graph that captures its launches has a grid of this
/// size, whose blocks beyond a step's own leave at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepBounds {
    /// Rows, uses of adapters by rows, and slots of the pool.
    pub rows: RowsCapacity,
    /// Groups of rows.
    pub max_groups: usize,
    /// Tiles of long runs.
    pub max_tiles: usize,
    /// Uses of adapters by tiles.
    pub max_uses: usize,
}

impl StepBounds {
    /// All steps of a size that are stamped without tiles, as in decode.
    pub fn grouped(rows: RowsCapacity) -> Self {
        // Σ ⌈n / 8⌉ over the slots in use is at most (Σ n + 7 · slots in use) / 8.
        let slots = rows.num_slots.min(rows.max_entries);
        let max_groups = (rows.max_entries + (MAX_GROUP_ROWS - 1) * slots) / MAX_GROUP_ROWS;
        StepBounds { rows, max_groups, max_tiles: 0, max_uses: 0 }
    }

    /// All steps of a size, with tiles or without. An engine that knows how many runs its steps have lowers
    /// `max_tiles` and `max_uses`, for each costs a [`Workspace`](super::Workspace) room.
    pub fn tiled(rows: RowsCapacity) -> Self {
        let (max_tiles, max_uses) = (StepTiles::max_tiles(rows), StepTiles::max_uses(rows));
        StepBounds { max_tiles, max_uses, ..Self::grouped(rows) }
    }
}

#[cfg(test)]
mod tests {
    use lora_math::{Features, RowAdapter, SlotId, StepRows};
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn chunks_cover_every_column_once() {
        for in_features in [1, 31, 255, 256, 257, 576, 1536, 4095, 4096, 4097, 14336, 28672] {
            let (chunk, count) = chunks(in_features);
            assert!(chunk.is_multiple_of(256), "a quarter of a chunk is whole products of 32 columns");
            assert!(chunk * count >= in_features && chunk * (count - 1) < in_features, "{in_features}");
        }
    }

    #[test]
    fn ranks_are_shared_out() {
        let splits = |rank| (rank_splits(rank), h_stride(rank));
        assert_eq!(splits(1), (1, 8));
        assert_eq!(splits(16), (1, 16));
        assert_eq!(splits(17), (2, 24));
        assert_eq!(splits(64), (4, 64));
        assert_eq!(splits(512), (4, 512));
    }

    #[test]
    fn every_output_has_a_block() {
        let site = |index, out_features| SiteRef { index, features: Features { in_features: 8, out_features } };
        let sites = [site(4, 128), site(9, 129), site(2, 1)];
        let places = [(16, 300), (32, 300), (48, 1), (0, 0)];
        let (outputs, blocks) = expand_sites(&sites, &places);
        assert_eq!(blocks, 4);
        assert_eq!(outputs.map(|output| output.first_block), [0, 1, 3, 0]);
        assert_eq!(outputs[1], SiteOutput { y: 32, stride: 300, site: 9, out_features: 129, first_block: 1 });
    }

    #[test]
    fn grids_past_the_device_are_refused() {
        assert_eq!(Grid::new(3, 4, 5).unwrap(), Grid(3, 4, 5));
        assert!(Grid::new(3, 0, 5).unwrap().is_empty());
        assert!(Grid::new(1 << 31, 1, 1).is_err() && Grid::new(1, 65_536, 1).is_err());
        let error = Grid::new(1, 1, 70_000).unwrap_err().to_string();
        assert_eq!(error, "70000 blocks along z: a launch has at most 65535");
    }

    proptest! {
        #[test]
        fn no_step_has_more_groups_than_its_bounds(slots in prop::collection::vec(0u32..6, 1..60)) {
            let rows: Vec<_> = slots.iter().map(|&slot| [RowAdapter { slot: SlotId::new(slot), scale: 1.0 }]).collect();
            let capacity = RowsCapacity { max_rows: rows.len(), max_entries: rows.len(), num_slots: 6 };
            let mut step = StepRows::with_capacity(capacity);
            step.stamp(&rows, rows.len()).unwrap();
            prop_assert!(step.groups().len() <= StepBounds::grouped(capacity).max_groups);
        }
    }
}
