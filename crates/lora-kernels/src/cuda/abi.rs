//! The structs that launches pass to kernels: the twins of those in `kernels/abi.cuh`, with the same sizes and offsets.
//! [`SiteEntry`](lora_math::SiteEntry) and the rows' structs are lora-math's.

use cudarc::driver::DeviceRepr;

/// `MAX_SITES`: sites of a launch, which read one input.
pub(super) const MAX_SITES: usize = 4;

/// `StepHeader`: how much of a step's buffers counts.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StepHeader {
    pub(super) num_groups: u32,
    pub(super) num_tiles: u32,
}

/// `StepMetadata`: device addresses of a step's buffers.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StepMetadata {
    pub(super) header: u64,
    pub(super) groups: u64,
    pub(super) entries: u64,
    pub(super) entry_slots: u64,
    pub(super) row_offsets: u64,
    pub(super) row_entries: u64,
    pub(super) tiles: u64,
    pub(super) uses: u64,
}

/// `TableView`: the pool's slot table.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TableView {
    pub(super) entries: u64,
    pub(super) num_sites: u32,
    pub(super) reserved: u32,
}

/// `SiteOutput`: one site of an expand.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SiteOutput {
    pub(super) y: u64,
    pub(super) stride: u32,
    pub(super) site: u32,
    pub(super) out_features: u32,
    pub(super) first_block: u32,
}

/// `ShrinkArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ShrinkArgs {
    pub(super) table: TableView,
    pub(super) step: StepMetadata,
    pub(super) x: u64,
    pub(super) stride: u32,
    pub(super) in_features: u32,
    pub(super) chunk: u32,
    pub(super) num_chunks: u32,
    pub(super) num_sites: u32,
    pub(super) sites: [u32; MAX_SITES],
    pub(super) h_stride: u32,
    pub(super) partials: u64,
    pub(super) tickets: u64,
    pub(super) h: u64,
}

/// `ExpandArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ExpandArgs {
    pub(super) table: TableView,
    pub(super) step: StepMetadata,
    pub(super) h: u64,
    pub(super) h_stride: u32,
    pub(super) num_sites: u32,
    pub(super) sites: [SiteOutput; MAX_SITES],
}

/// `GatherArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct GatherArgs {
    pub(super) table: TableView,
    pub(super) step: StepMetadata,
    pub(super) token_ids: u64,
    pub(super) site: u32,
    pub(super) vocab_size: u32,
    pub(super) h: u64,
    pub(super) h_stride: u32,
    pub(super) reserved: u32,
}

/// `EmbedOverlayArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct EmbedOverlayArgs {
    pub(super) overlays: u64,
    pub(super) token_ids: u64,
    pub(super) row_slots: u64,
    pub(super) base: u64,
    pub(super) out: u64,
    pub(super) stride: u32,
    pub(super) hidden_size: u32,
    pub(super) vocab_size: u32,
    pub(super) max_added: u32,
}

/// `LogitsOverlayArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LogitsOverlayArgs {
    pub(super) step: StepMetadata,
    pub(super) overlays: u64,
    pub(super) row_slots: u64,
    pub(super) x: u64,
    pub(super) logits: u64,
    pub(super) x_stride: u32,
    pub(super) stride: u32,
    pub(super) hidden_size: u32,
    pub(super) vocab_size: u32,
    pub(super) max_added: u32,
    pub(super) num_rows: u32,
    pub(super) max_groups: u32,
    pub(super) reserved: u32,
}

/// `RowDiffArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RowDiffArgs {
    pub(super) base: u64,
    pub(super) tuned: u64,
    pub(super) flags: u64,
    pub(super) num_rows: u32,
    pub(super) width: u32,
}

// SAFETY: plain numbers in C layout, passed to kernels by value.
unsafe impl DeviceRepr for ShrinkArgs {}
// SAFETY: as above.
unsafe impl DeviceRepr for ExpandArgs {}
// SAFETY: as above.
unsafe impl DeviceRepr for GatherArgs {}
// SAFETY: as above.
unsafe impl DeviceRepr for EmbedOverlayArgs {}
// SAFETY: as above.
unsafe impl DeviceRepr for LogitsOverlayArgs {}
// SAFETY: as above.
unsafe impl DeviceRepr for RowDiffArgs {}

/* The numbers of the static_asserts in kernels/abi.cuh and kernels/overlay.cuh. */
const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(size_of::<StepHeader>() == 8 && size_of::<StepMetadata>() == 64 && size_of::<TableView>() == 16);
    assert!(size_of::<SiteOutput>() == 24 && offset_of!(SiteOutput, site) == 12);
    assert!(size_of::<ShrinkArgs>() == 152 && offset_of!(ShrinkArgs, x) == 80 && offset_of!(ShrinkArgs, sites) == 108);
    assert!(offset_of!(ShrinkArgs, h_stride) == 124 && offset_of!(ShrinkArgs, partials) == 128);
    assert!(size_of::<ExpandArgs>() == 192 && offset_of!(ExpandArgs, h) == 80 && offset_of!(ExpandArgs, sites) == 96);
    assert!(size_of::<GatherArgs>() == 112 && offset_of!(GatherArgs, token_ids) == 80);
    assert!(offset_of!(GatherArgs, h) == 96);
    assert!(size_of::<EmbedOverlayArgs>() == 56 && offset_of!(EmbedOverlayArgs, base) == 24);
    assert!(offset_of!(EmbedOverlayArgs, stride) == 40 && offset_of!(EmbedOverlayArgs, max_added) == 52);
    assert!(size_of::<LogitsOverlayArgs>() == 128 && offset_of!(LogitsOverlayArgs, overlays) == 64);
    assert!(offset_of!(LogitsOverlayArgs, x_stride) == 96 && offset_of!(LogitsOverlayArgs, max_groups) == 120);
    assert!(size_of::<RowDiffArgs>() == 32 && offset_of!(RowDiffArgs, num_rows) == 24);
};
