//! The CUDA code of the crates, tested without a GPU: the tests of this package run it through the real cudarc on the
//! stand-in driver.
//!
//! The package stands apart from `conformance` because its features bring cudarc, and with it a C++ compiler for the
//! stand-in, which no default build may need. What several tests share stands here.

mod backend;
mod operands;

pub use backend::{OnDevice, Value};
pub use operands::Operands;

use cuda_standin::{Mode, kernels_folder, on_device, sources_in};

/// Runs a test's body on the stand-in with the project's kernels, once for each mode.
pub fn on_kernels(test: &str, modes: &[Mode], body: impl FnOnce()) {
    on_device(test, "kernels", &sources_in(&kernels_folder(), &["cu"]), modes, body);
}

/// What shows different faults: orders of blocks and threads, addresses, races in a block and between blocks.
pub const SLOW_MODES: [Mode; 4] = [Mode::shuffled(1), Mode::ADDRESS, Mode::THREAD, Mode::BLOCKS];
