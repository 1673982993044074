//! The CUDA code of the crates, tested without a GPU: the tests of this package run it through the real cudarc on the
//! stand-in driver; or on a device, where [`DEVICE`] names one.
//!
//! The package stands apart from `conformance` because its features bring cudarc, and with it a C++ compiler for the
//! stand-in, which no default build may need. What several tests share stands here.

mod backend;
pub mod bench;
mod operands;

pub use backend::{OnDevice, Value};
pub use operands::Operands;

use std::sync::Arc;

use cuda_standin::{Mode, kernels_folder, on_device, sources_in};
use cudarc::driver::{CudaContext, CudaGraph, sys};
use lora_kernels::cuda::CudaKernels;

/// The variable that names a real device by its number: tests then run there, in this process, and nowhere else.
pub const DEVICE: &str = "MULTILORA_CUDA_DEVICE";

/// The device of [`DEVICE`], if it names one.
///
/// # Panics
/// If it names something else than a number.
pub fn real_device() -> Option<usize> {
    let number = std::env::var(DEVICE).ok()?;
    Some(number.parse().unwrap_or_else(|_| panic!("{DEVICE}={number} is not the number of a device")))
}

/// Runs a test's body with the project's kernels: on the stand-in, once for each mode, or once on a real device. There a
/// device that is missing fails the test, for a back end that is not there is not one that passes.
pub fn on_kernels(test: &str, modes: &[Mode], body: impl FnOnce()) {
    match real_device() {
        Some(device) => {
            println!("on device {device}: {test}");
            body();
        }
        None => on_standin(test, modes, body),
    }
}

/// Runs a test's body on the stand-in, once for each mode; on a real device it is not run, and says so.
pub fn on_standin(test: &str, modes: &[Mode], body: impl FnOnce()) {
    match real_device() {
        Some(device) => println!("not run on device {device}, for it is about the stand-in: {test}"),
        None => on_device(test, "kernels", &sources_in(&kernels_folder(), &["cu"]), modes, body),
    }
}

/// A context on the real device, or on the stand-in's; without cudarc's events, which order nothing here and which a capture
/// may not wait for.
///
/// # Panics
/// Without such a device.
pub fn context() -> Arc<CudaContext> {
    lora_kernels::cuda::probe().unwrap_or_else(|why| panic!("{why}"));
    let context = CudaContext::new(real_device().unwrap_or(0)).expect("a context");
    // SAFETY: every order that tests rely on is one that they or the crates under test make.
    unsafe { context.disable_event_tracking() };
    context
}

/// The project's kernels: those that the crate carries on a real device, the stand-in's on the stand-in.
///
/// # Panics
/// If they do not load.
pub fn kernels(context: &Arc<CudaContext>) -> CudaKernels {
    match real_device() {
        Some(_) => CudaKernels::load(context).expect("kernels"),
        // SAFETY: the stand-in has this release's kernels, finds them by name, and takes this for an image of all of them.
        None => unsafe { CudaKernels::load_image(context, b"STANDIN\n") }.expect("kernels"),
    }
}

/// What shows different faults: orders of blocks and threads, addresses, races in a block and between blocks.
pub const SLOW_MODES: [Mode; 4] = [Mode::shuffled(1), Mode::ADDRESS, Mode::THREAD, Mode::BLOCKS];

/// Launches and copies of a graph.
///
/// # Panics
/// If the driver does not say.
pub fn num_nodes(graph: &CudaGraph) -> usize {
    let mut count = 0;
    // SAFETY: the graph is alive, and without a place for them only the number of nodes is asked for.
    let result = unsafe { sys::cuGraphGetNodes(graph.cu_graph(), std::ptr::null_mut(), &raw mut count) };
    assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
    count
}
