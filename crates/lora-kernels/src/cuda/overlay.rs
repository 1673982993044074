//! The operations of token overlays: embeddings, logits, and the difference of matrices that makes an overlay.

use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};

use super::abi::{EmbedOverlayArgs, LogitsOverlayArgs, RowDiffArgs};
use super::error::CudaError;
use super::kernels::{CudaKernels, check_rows, check_width, launch};
use super::shapes::{self, Grid};
use super::step::CudaStep;
use super::views::{DeviceRows, DeviceRowsMut, Element};
use crate::error::Operand;
use crate::overlay::Vocabulary;

/// Overlay rows of a block: `OVERLAY_TILE` of `kernels/logits_overlay.cu`.
const OVERLAY_TILE: usize = 8;
/// Rows of blocks that see to the added tokens of all rows, each as long as there are tiles.
const ADDED_BLOCKS: usize = 8;

/// A table of overlays in device memory: one [`OverlayEntry`](crate::overlay::OverlayEntry) for each slot.
#[derive(Clone, Copy, Debug)]
pub struct DeviceOverlays<'a> {
    address: u64,
    num_slots: usize,
    max_rows: usize,
    vocabulary: Vocabulary,
    memory: PhantomData<&'a ()>,
}

impl DeviceOverlays<'_> {
    /// The table at a device address.
    ///
    /// # Safety
    /// For as long as work launched with it runs, replays of graphs that captured it included, and for every slot that a
    /// step of such work names: the slot's entry is readable on the device and not written; where its `num_rows` is not 0
    /// it is at most `max_rows`, and its addresses are those of a block that
    /// [`OverlayLayout::pack`](crate::overlay::OverlayLayout::pack) wrote for this vocabulary, with rows of the width and
    /// type of the operation's activations, readable on the device and not written.
    pub unsafe fn from_raw(address: u64, num_slots: usize, max_rows: usize, vocabulary: Vocabulary) -> Self {
        DeviceOverlays { address, num_slots, max_rows, vocabulary, memory: PhantomData }
    }

    fn check(&self, step: &CudaStep) -> Result<(), CudaError> {
        let num_slots = step.bounds().rows.num_slots;
        if num_slots > self.num_slots {
            return Err(CudaError::StepTooLarge { what: "slots", count: num_slots, max: self.num_slots });
        }
        let (count, max) = (self.vocabulary.num_tokens(), i32::MAX as usize);
        if count > max { Err(CudaError::TooLarge { what: "tokens", count, max }) } else { Ok(()) }
    }
}

impl CudaKernels {
    /// Embeddings of the step's tokens in `out` `[rows, hidden_size]`: the row that the overlay of a row's first adapter
    /// has for the token, else the row of `base` `[vocab_size, hidden_size]`, or zeros for a token past the vocabulary.
    /// Without a base only rows with an overlay's token are written.
    ///
    /// # Errors
    /// Sizes that do not agree, before anything is launched; the driver's.
    pub fn embed_overlay<T: Element>(
        &self,
        overlays: &DeviceOverlays<'_>,
        step: &CudaStep,
        token_ids: &dyn DevicePtr<u32>,
        base: Option<DeviceRows<'_, T>>,
        out: DeviceRowsMut<'_, T>,
    ) -> Result<(), CudaError> {
        overlays.check(step)?;
        let counts = step.launch_counts()?;
        check_rows(Operand::Input, token_ids.len(), counts.rows)?;
        check_rows(Operand::Output, out.shape.num_rows, counts.rows)?;
        let width = out.shape.width;
        if let Some(base) = &base {
            check_rows(Operand::Input, base.shape.num_rows, overlays.vocabulary.vocab_size)?;
            check_width(Operand::Input, width, base.shape.width)?;
            // The kernel takes the base's rows one behind the other.
            check_width(Operand::Input, width, base.shape.stride)?;
        }
        let grid = Grid::new(counts.rows, 1, 1)?;
        let stream = step.stream();
        let (tokens, _tokens) = token_ids.device_ptr(stream);
        let base = base.as_ref().map(|base| base.values.device_ptr(stream));
        let (out_address, _out) = out.values.device_ptr_mut(stream);
        let args = EmbedOverlayArgs {
            overlays: overlays.address,
            token_ids: tokens,
            row_slots: step.row_slots(),
            base: base.as_ref().map_or(0, |base| base.0),
            out: out_address,
            stride: out.shape.stride as u32,
            hidden_size: width as u32,
            vocab_size: overlays.vocabulary.vocab_size as u32,
            max_added: overlays.vocabulary.max_added as u32,
        };
        // SAFETY: the checks above keep rows and tokens inside the operands; the overlays' contract covers the rest.
        unsafe { launch(stream, &self.embed_overlay, grid, &args, "launching embed_overlay") }
    }

    /// Overwrites in `logits` `[rows, vocab_size + max_added]` the tokens that the overlay of each row's first adapter
    /// has, with `x · row` from `x` `[rows, hidden_size]`, and sets the added tokens that it lacks to −∞; all others keep
    /// their bits. The step is of the rows that have logits, stamped without tiles.
    ///
    /// # Errors
    /// Sizes that do not agree, before anything is launched; the driver's.
    pub fn logits_overlay<T: Element>(
        &self,
        overlays: &DeviceOverlays<'_>,
        step: &CudaStep,
        x: DeviceRows<'_, T>,
        logits: DeviceRowsMut<'_, f32>,
    ) -> Result<(), CudaError> {
        overlays.check(step)?;
        let counts = step.launch_counts()?;
        if counts.tiles > 0 {
            return Err(CudaError::StepTooLarge { what: "tiles", count: counts.tiles, max: 0 });
        }
        check_rows(Operand::Input, x.shape.num_rows, counts.rows)?;
        check_rows(Operand::Output, logits.shape.num_rows, counts.rows)?;
        check_width(Operand::Output, overlays.vocabulary.num_tokens(), logits.shape.width)?;
        let added = if overlays.vocabulary.max_added > 0 && counts.rows > 0 { ADDED_BLOCKS } else { 0 };
        let tiles = overlays.max_rows.div_ceil(OVERLAY_TILE);
        let grid = Grid::new(tiles.max(1), counts.groups + added, 1)?;
        let stream = step.stream();
        let (x_address, _x) = x.values.device_ptr(stream);
        let (logits_address, _logits) = logits.values.device_ptr_mut(stream);
        let args = LogitsOverlayArgs {
            step: step.metadata(),
            overlays: overlays.address,
            row_slots: step.row_slots(),
            x: x_address,
            logits: logits_address,
            x_stride: x.shape.stride as u32,
            stride: logits.shape.stride as u32,
            hidden_size: x.shape.width as u32,
            vocab_size: overlays.vocabulary.vocab_size as u32,
            max_added: overlays.vocabulary.max_added as u32,
            num_rows: counts.rows as u32,
            max_groups: counts.groups as u32,
            reserved: 0,
        };
        // SAFETY: as in `embed_overlay`; each row belongs to one group, and the blocks behind the groups write added
        // tokens that no overlay has.
        unsafe { launch(stream, &self.typed::<T>().logits_overlay, grid, &args, "launching logits_overlay") }
    }

    /// Which rows of two matrices `[rows, width]` differ in any bit: `flags[row]` is 1 where they do, else 0.
    ///
    /// # Errors
    /// Sizes that do not agree, before anything is launched; the driver's.
    pub fn row_diff<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        base: DeviceRows<'_, T>,
        tuned: DeviceRows<'_, T>,
        flags: &mut dyn DevicePtrMut<u8>,
    ) -> Result<(), CudaError> {
        let (num_rows, width) = (base.shape.num_rows, base.shape.width);
        if num_rows != tuned.shape.num_rows {
            let (expected, found) = (num_rows, tuned.shape.num_rows);
            return Err(crate::KernelError::RowCount { operand: Operand::Input, expected, found }.into());
        }
        for found in [tuned.shape.width, base.shape.stride, tuned.shape.stride] {
            check_width(Operand::Input, width, found)?;
        }
        check_rows(Operand::Output, flags.len(), num_rows)?;
        let grid = Grid::new(num_rows.div_ceil(shapes::WARPS), 1, 1)?;
        let (base_address, _base) = base.values.device_ptr(stream);
        let (tuned_address, _tuned) = tuned.values.device_ptr(stream);
        let (flags_address, _flags) = flags.device_ptr_mut(stream);
        let args = RowDiffArgs {
            base: base_address,
            tuned: tuned_address,
            flags: flags_address,
            num_rows: num_rows as u32,
            width: width as u32,
        };
        // SAFETY: all three are as long as the rows ask for.
        unsafe { launch(stream, &self.row_diff, grid, &args, "launching row_diff") }
    }
}
