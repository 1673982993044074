//! The CUDA back end, over [cudarc](https://docs.rs/cudarc): an engine's own context, stream and pointers.
//!
//! [`CudaKernels::load`] takes the context, [`CudaStep`] holds the row metadata of a step at a fixed address, [`Workspace`]
//! the scratch between shrink and expand; operations go to the stream of both and can be captured in a graph that then
//! serves every step that is uploaded later. [`probe`](fn@probe) says whether there is a device at all.
//!
//! # Numeric contract
//!
//! That of the crate's front page, with activations, A and B of one 16-bit type T, f32 sums, and:
//!
//! - `h = Σ_k x[k] · A[r][k]` is rounded to T once, as a model in T rounds it.
//! - The order of the sum depends on `in_features` alone: chunks of 256 columns (512 past 4096 features), each the sum of
//!   four quarters, added in ascending order. A quarter is summed by tensor-core products.
//! - `y` is widened, `factor · Σ_r h[r] · B[n][r]` of each use is added to it in f32 by a fused multiply-add, in the
//!   request's order, and it is rounded to T once.
//! - So the bits of a row depend on the row and its adapters only, and are the same from groups and from tiles.

mod abi;
mod error;
mod image;
mod kernels;
mod overlay;
mod probe;
mod shapes;
mod step;
mod views;
mod workspace;

pub use error::CudaError;
pub use image::image;
pub use kernels::CudaKernels;
pub use overlay::DeviceOverlays;
pub use probe::{NoDevice, probe};
pub use shapes::StepBounds;
pub use step::CudaStep;
pub use views::{DeviceRows, DeviceRowsMut, DeviceTable, Element};
pub use workspace::{Workspace, WorkspaceCapacity};
