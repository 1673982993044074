//! The row metadata of a step in device memory: one block at a fixed address, refilled each step.

use std::sync::Arc;

use cudarc::driver::sys::CUstreamCaptureStatus;
use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, DevicePtr, PinnedHostSlice};
use lora_math::{StepRows, StepTiles};

use super::abi::StepMetadata;
use super::error::CudaError;
use super::shapes::StepBounds;

/// Words between two parts of the block: 16 bytes.
const ALIGNMENT: usize = 4;

/// Where each part of the block starts, in words of 32 bits; each is as long as the bounds ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Places {
    row_slots: usize,
    groups: usize,
    entries: usize,
    entry_slots: usize,
    row_offsets: usize,
    row_entries: usize,
    tiles: usize,
    uses: usize,
    end: usize,
}

impl Places {
    fn new(bounds: &StepBounds) -> Option<Self> {
        let rows = bounds.rows;
        let mut next = ALIGNMENT; // the header
        let mut part = |count: usize, words: usize| {
            let start = next;
            next = count.checked_mul(words)?.checked_add(start)?.checked_next_multiple_of(ALIGNMENT)?;
            Some(start)
        };
        Some(Places {
            row_slots: part(rows.max_rows, 1)?,
            groups: part(bounds.max_groups, 3)?,
            entries: part(rows.max_entries, 2)?,
            entry_slots: part(rows.max_entries, 1)?,
            row_offsets: part(rows.max_rows + 1, 1)?,
            row_entries: part(rows.max_entries, 1)?,
            tiles: part(bounds.max_tiles, 5)?,
            uses: part(bounds.max_uses, 2)?,
            end: next,
        })
    }

    /// Writes a step that fits the bounds.
    fn fill(&self, rows: &StepRows, tiles: Option<&StepTiles>, words: &mut [u32]) {
        let (tile_list, uses) = tiles.map_or((&[][..], &[][..]), |tiles| (tiles.tiles(), tiles.uses()));
        words[..2].copy_from_slice(&[rows.groups().len() as u32, tile_list.len() as u32]);
        // A captured launch looks at every row that there may be: rows past the step's are base rows.
        words[self.row_slots..self.groups].fill(u32::MAX);
        put(words, self.row_slots, rows.row_slots().iter().map(|&slot| [slot as u32]));
        put(words, self.groups, rows.groups().iter().map(|group| [group.slot, group.first_entry, group.count]));
        put(words, self.entries, rows.entries().iter().map(|entry| [entry.row, entry.scale.to_bits()]));
        let slots = rows.groups().iter().flat_map(|group| (0..group.count).map(|_| [group.slot]));
        put(words, self.entry_slots, slots);
        put(words, self.row_offsets, rows.row_offsets().iter().map(|&offset| [offset]));
        put(words, self.row_entries, rows.all_row_entries().iter().map(|&entry| [entry]));
        let tile_words = tile_list
            .iter()
            .map(|tile| [tile.first_row, tile.num_rows, tile.first_use, tile.num_uses, tile.first_entry]);
        put(words, self.tiles, tile_words);
        put(words, self.uses, uses.iter().map(|tile_use| [tile_use.slot, tile_use.scale.to_bits()]));
    }
}

fn put<const N: usize>(words: &mut [u32], first: usize, items: impl Iterator<Item = [u32; N]>) {
    for (place, item) in words[first..].chunks_exact_mut(N).zip(items) {
        place.copy_from_slice(&item);
    }
}

/// How much of a step a launch is for: the step's own numbers, or in a graph the largest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StepCounts {
    pub(super) rows: usize,
    pub(super) entries: usize,
    pub(super) groups: usize,
    pub(super) tiles: usize,
    pub(super) uses: usize,
    pub(super) tile_entries: usize,
}

impl StepCounts {
    fn of(rows: &StepRows, tiles: Option<&StepTiles>) -> Self {
        StepCounts {
            rows: rows.row_slots().len(),
            entries: rows.entries().len(),
            groups: rows.groups().len(),
            tiles: tiles.map_or(0, |tiles| tiles.tiles().len()),
            uses: tiles.map_or(0, |tiles| tiles.uses().len()),
            tile_entries: tiles.map_or(0, StepTiles::num_entries),
        }
    }

    /// The most that a step within the bounds has.
    pub(super) fn most(bounds: &StepBounds) -> Self {
        StepCounts {
            rows: bounds.rows.max_rows,
            entries: bounds.rows.max_entries,
            groups: bounds.max_groups,
            tiles: bounds.max_tiles,
            uses: bounds.max_uses,
            // A step without room for tiles has no entries in any.
            tile_entries: if bounds.max_tiles == 0 { 0 } else { bounds.rows.max_entries },
        }
    }

    /// Pairs of each number with its limit in `most`.
    pub(super) fn against(&self, most: &StepCounts) -> [(&'static str, usize, usize); 6] {
        [
            ("rows", self.rows, most.rows),
            ("adapter uses in groups", self.entries, most.entries),
            ("groups", self.groups, most.groups),
            ("tiles", self.tiles, most.tiles),
            ("adapter uses by tiles", self.uses, most.uses),
            ("adapter uses in tiles", self.tile_entries, most.tile_entries),
        ]
    }
}

/// A page-locked copy of the block, and when the device has read it.
struct Staging {
    words: PinnedHostSlice<u32>,
    copied: CudaEvent,
}

/// The row metadata of the steps of one stream.
///
/// Launches that name a step and are captured in a graph serve every step that is uploaded here later, up to the bounds:
/// an engine that captures a graph for each batch size makes one of these for each. It must outlive the graphs, and they are
/// replayed on its stream: elsewhere nothing orders them with the uploads.
pub struct CudaStep {
    stream: Arc<CudaStream>,
    bounds: StepBounds,
    places: Places,
    block: CudaSlice<u32>,
    address: u64,
    // Two, so that a step can be written while the copy of the one before waits for its turn on the stream.
    staging: [Staging; 2],
    next: usize,
    held: StepCounts,
}

impl CudaStep {
    /// Buffers for steps within the bounds, whose uploads and launches go to `stream`. Until the first upload they hold a
    /// step without rows.
    ///
    /// # Errors
    /// The driver's, and [`CudaError::TooLarge`].
    pub fn new(stream: &Arc<CudaStream>, bounds: StepBounds) -> Result<Self, CudaError> {
        refuse_capture(stream, "an allocation")?;
        let too_large = CudaError::TooLarge { what: "words", count: usize::MAX, max: u32::MAX as usize };
        let places = Places::new(&bounds).filter(|places| places.end <= u32::MAX as usize).ok_or(too_large)?;
        let block = stream.alloc_zeros(places.end).map_err(CudaError::driver("allocating a step"))?;
        let staging = || {
            let words = {
                // SAFETY: words of any bits are valid, and `fill` writes what a step reads before it is copied.
                unsafe { stream.context().alloc_pinned_with_flags(places.end, 0) }
            };
            let mut words = words.map_err(CudaError::driver("allocating page-locked memory"))?;
            words.as_mut_slice().map_err(CudaError::driver("page-locked memory"))?.fill(0);
            let copied = stream.context().new_event(None).map_err(CudaError::driver("making an event"))?;
            Ok::<_, CudaError>(Staging { words, copied })
        };
        let staging = [staging()?, staging()?];
        // The block is of this stream alone, so nobody's work on it needs to be waited for.
        let address = block.device_ptr(stream).0;
        Ok(CudaStep {
            stream: stream.clone(),
            bounds,
            places,
            block,
            address,
            staging,
            next: 0,
            held: StepCounts::default(),
        })
    }

    /// Puts a step in place of the one before, for launches behind this call and for graphs that are replayed behind it.
    /// `tiles`, if any, are those that `rows` was stamped beside. Waits only where the copy before the last one has not
    /// run yet.
    ///
    /// # Errors
    /// [`CudaError::StepTooLarge`] past the bounds; [`CudaError::Capturing`]; the driver's. The step before stays, except
    /// after the driver's.
    pub fn upload(&mut self, rows: &StepRows, tiles: Option<&StepTiles>) -> Result<(), CudaError> {
        let counts = StepCounts::of(rows, tiles);
        let most = StepCounts::most(&self.bounds);
        let slots = ("slots", rows.capacity().num_slots, self.bounds.rows.num_slots);
        for (what, count, max) in counts.against(&most).into_iter().chain([slots]) {
            if count > max {
                return Err(CudaError::StepTooLarge { what, count, max });
            }
        }
        if let Some(tiles) = tiles.filter(|tiles| tiles.num_rows() != rows.num_rows()) {
            let (rows, tiled_rows) = (rows.num_rows(), tiles.num_rows());
            let operand = crate::Operand::Input;
            return Err(crate::KernelError::RowCount { operand, expected: rows, found: tiled_rows }.into());
        }
        refuse_capture(&self.stream, "the upload of a step")?;
        let Staging { words, copied } = &mut self.staging[self.next];
        copied.synchronize().map_err(CudaError::driver("waiting for an upload"))?;
        let memory = words.as_mut_slice().map_err(CudaError::driver("page-locked memory"))?;
        self.places.fill(rows, tiles, memory);
        self.stream.memcpy_htod(words, &mut self.block).map_err(CudaError::driver("uploading a step"))?;
        copied.record(&self.stream).map_err(CudaError::driver("recording an upload"))?;
        self.next = 1 - self.next;
        self.held = counts;
        Ok(())
    }

    /// What steps may have.
    pub fn bounds(&self) -> StepBounds {
        self.bounds
    }

    pub(super) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// What a launch is for: the step that was uploaded, or in a graph any step.
    pub(super) fn launch_counts(&self) -> Result<StepCounts, CudaError> {
        Ok(if is_capturing(&self.stream)? { StepCounts::most(&self.bounds) } else { self.held })
    }

    /// Device addresses of the parts.
    pub(super) fn metadata(&self) -> StepMetadata {
        let at = |words: usize| self.address + 4 * words as u64;
        StepMetadata {
            header: at(0),
            groups: at(self.places.groups),
            entries: at(self.places.entries),
            entry_slots: at(self.places.entry_slots),
            row_offsets: at(self.places.row_offsets),
            row_entries: at(self.places.row_entries),
            tiles: at(self.places.tiles),
            uses: at(self.places.uses),
        }
    }

    /// Device address of the slot of each row, −1 for base, padding, and rows past the step's.
    pub(super) fn row_slots(&self) -> u64 {
        self.address + 4 * self.places.row_slots as u64
    }
}

impl Drop for CudaStep {
    fn drop(&mut self) {
        for staging in &self.staging {
            // The memory goes back while a copy could still read it; a context that fails here runs no copies any more.
            let _ = staging.copied.synchronize();
        }
    }
}

impl std::fmt::Debug for CudaStep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaStep").field("bounds", &self.bounds).field("held", &self.held).finish_non_exhaustive()
    }
}

fn is_capturing(stream: &CudaStream) -> Result<bool, CudaError> {
    let status = stream.capture_status().map_err(CudaError::driver("asking whether the stream captures"))?;
    Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// Refuses what must not become part of a graph.
pub(super) fn refuse_capture(stream: &CudaStream, what: &'static str) -> Result<(), CudaError> {
    if is_capturing(stream)? { Err(CudaError::Capturing { what }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use lora_math::rows::RowsCapacity;
    use lora_math::{RowAdapter, SlotId};

    use super::*;

    #[test]
    fn a_step_lies_as_kernels_read_it() {
        let capacity = RowsCapacity { max_rows: 16, max_entries: 20, num_slots: 3 };
        let adapter = |slot, scale| RowAdapter { slot: SlotId::new(slot), scale };
        let mut rows = vec![vec![adapter(2, 1.0), adapter(0, 0.5)], vec![]];
        rows.extend(std::iter::repeat_n(vec![adapter(1, 2.0)], 9));
        let (mut tiles, mut step) = (StepTiles::with_capacity(capacity), StepRows::with_capacity(capacity));
        tiles.stamp(&rows).unwrap();
        step.stamp_beside(&rows, 12, &tiles).unwrap();

        let bounds = StepBounds::tiled(capacity);
        let places = Places::new(&bounds).unwrap();
        let mut words = vec![7; places.end];
        places.fill(&step, Some(&tiles), &mut words);
        let part = |start: usize, len: usize| &words[start..start + len];
        assert_eq!(part(0, 2), [2, 1]);
        let none = u32::MAX;
        assert_eq!(part(places.row_slots, 16), [2, none, 1, 1, 1, 1, 1, 1, 1, 1, 1, none, none, none, none, none]);
        assert_eq!(part(places.groups, 6), [0, 0, 1, 2, 1, 1]);
        assert_eq!(part(places.entries, 4), [0, 0.5f32.to_bits(), 0, 1.0f32.to_bits()]);
        assert_eq!(part(places.entry_slots, 2), [0, 2]);
        assert_eq!(part(places.row_offsets, 13), [0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]);
        assert_eq!(part(places.row_entries, 2), [1, 0], "the request's order");
        assert_eq!(part(places.tiles, 5), [2, 9, 0, 1, 0]);
        assert_eq!(part(places.uses, 2), [1, 2.0f32.to_bits()]);
        for start in [places.groups, places.entries, places.row_offsets, places.tiles, places.uses, places.end] {
            assert!(start.is_multiple_of(ALIGNMENT));
        }

        let most = StepCounts::most(&bounds);
        let counts = StepCounts::of(&step, Some(&tiles));
        assert!(counts.against(&most).iter().all(|(_, count, max)| count <= max));
        assert_eq!(counts, StepCounts { rows: 12, entries: 2, groups: 2, tiles: 1, uses: 1, tile_entries: 9 });
        assert!(Places::new(&StepBounds { max_groups: usize::MAX, ..bounds }).is_none());
    }
}
