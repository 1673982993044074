//! LoRA on the rows of a step, for an engine that has a CUDA context and a stream: what it makes once, what it does each
//! step, and how a graph captures it.
//!
//! `cargo run -p lora-kernels --features cuda --example cuda_step`; without a device it says so and ends.

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, DevicePtr};
use half::bf16;
use lora_kernels::SiteRef;
use lora_kernels::cuda::{
    CudaKernels, CudaStep, DeviceRows, DeviceRowsMut, DeviceTable, StepBounds, Workspace, WorkspaceCapacity, probe,
};
use lora_math::rows::RowsCapacity;
use lora_math::{Features, RowAdapter, SiteEntry, SlotDtype, SlotId, StepRows};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    if let Err(why) = probe() {
        println!("nothing to show: {why}");
        return Ok(());
    }
    // The engine's own. Graphs want cudarc's events off: a capture may not wait for what was recorded before it.
    let context = CudaContext::new(0)?;
    // SAFETY: all work of this program is on one stream.
    unsafe { context.disable_event_tracking() };
    let stream = context.new_stream()?;

    // Once: kernels, a step's buffers and scratch for up to 4 rows over 2 slots.
    let kernels = CudaKernels::load(&context)?;
    let capacity = RowsCapacity { max_rows: 4, max_entries: 4, num_slots: 2 };
    let bounds = StepBounds::grouped(capacity);
    let mut step = CudaStep::new(&stream, bounds)?;
    let sizes = WorkspaceCapacity { bounds, max_sites: 1, max_rank: 8, max_in_features: 64 };
    let mut workspace = Workspace::new(&stream, sizes)?;

    // In an engine a pool owns this memory: one site of 64 → 32 features; slot 1 holds an adapter of rank 8.
    let ones = |count: usize| vec![bf16::ONE; count];
    let (a, b) = (stream.clone_htod(&ones(8 * 64))?, stream.clone_htod(&ones(32 * 8))?);
    let adapter = SiteEntry { a: a.device_ptr(&stream).0, b: b.device_ptr(&stream).0, rank: 8, scaling: 0.5 };
    let entries: Vec<u8> = [SiteEntry::EMPTY, adapter].into_iter().flat_map(SiteEntry::to_bytes).collect();
    let entries = stream.clone_htod(&entries)?;
    // SAFETY: entries, A and B live to the end of `main`, which waits for all work.
    let table = unsafe { DeviceTable::from_raw(entries.device_ptr(&stream).0, 2, 1, SlotDtype::Bf16, 8) };
    let sites = [SiteRef { index: 0, features: Features { in_features: 64, out_features: 32 } }];
    let x = stream.clone_htod(&vec![bf16::from_f32(0.25); 4 * 64])?;
    let mut y = stream.clone_htod(&ones(4 * 32))?;

    // Once for each batch size: the launches, whatever a step will hold.
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    kernels.shrink(&table, &step, &sites, DeviceRows::new(&x, 64)?, &mut workspace)?;
    kernels.expand(&table, &step, &sites, &workspace, &mut [DeviceRowsMut::new(&mut y, 32)?])?;
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags)?.ok_or("an empty graph")?;

    // Each step: say which row uses which slot, and replay. Rows 0 and 2 are base rows.
    let uses = [RowAdapter { slot: SlotId::new(1), scale: 1.0 }];
    let mut rows = StepRows::with_capacity(capacity);
    rows.stamp(&[&[][..], &uses[..], &[][..], &uses[..]], 4)?;
    step.upload(&rows, None)?;
    graph.launch()?;

    let y = stream.clone_dtoh(&y)?;
    stream.synchronize()?;
    // 1 + 0.5 · Σ over 8 ranks of Σ over 64 features of 0.25.
    println!("row 0: {}, row 1: {}", y[0], y[32]);
    assert_eq!((y[0].to_f32(), y[32].to_f32()), (1.0, 65.0));
    Ok(())
}
