//! What the CUDA back end refuses or meets, with the numbers.

use cudarc::driver::DriverError;
use lora_math::SlotDtype;
use thiserror::Error;

use crate::error::KernelError;

/// A CUDA operation that did not run. After [`Driver`](Self::Driver) what was being launched or copied may or may not have
/// happened, and the context may be unusable, as CUDA has it; every other error comes before anything is launched.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The operation does not fit its operands.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The driver refused.
    #[error("{what}: {source}")]
    Driver {
        /// What was asked of it.
        what: &'static str,
        /// Its answer.
        source: DriverError,
    },
    /// The crate was built without nvcc, so that there are no kernels in it.
    #[error(
        "this build has no CUDA kernels: nvcc was not found when it was built; build with nvcc on PATH or CUDA_HOME set \
         (KERNELS_REQUIRED=1 makes its absence a build error), or with KERNELS_FATBIN naming a ready image, or load one \
         with CudaKernels::load_image"
    )]
    NoImage,
    /// The driver took no kernel of the image for this device.
    #[error("the kernel image does not load on a device of compute capability {major}.{minor}: {source}")]
    ImageRefused {
        /// Compute capability of the device.
        major: i32,
        /// Its second number.
        minor: i32,
        /// The driver's answer.
        source: DriverError,
    },
    /// An image that is not of this release.
    #[error("the kernel image has no kernel {name}: {source}")]
    MissingKernel {
        /// The kernel.
        name: &'static str,
        /// The driver's answer.
        source: DriverError,
    },
    /// Sizes past what a launch can have.
    #[error("{count} {what}: a launch has at most {max}")]
    TooLarge {
        /// Of what.
        what: &'static str,
        /// How many.
        count: usize,
        /// How many there may be.
        max: usize,
    },
    /// A step that does not fit the bounds of its buffers.
    #[error("a step with {count} {what} does not fit: the buffers hold {max}")]
    StepTooLarge {
        /// Of what.
        what: &'static str,
        /// How many the step has.
        count: usize,
        /// How many there may be.
        max: usize,
    },
    /// A launch that needs more scratch than the workspace has.
    #[error("a launch needs {count} {what}: the workspace has {max}")]
    WorkspaceTooSmall {
        /// Of what.
        what: &'static str,
        /// How many the launch needs.
        count: usize,
        /// How many there are.
        max: usize,
    },
    /// Operands that live on different streams, between which nothing is ordered.
    #[error("the step and the workspace are of different streams")]
    StreamMismatch,
    /// What cannot be part of a graph: the copy would be repeated by every replay.
    #[error("the stream is capturing: {what} belongs outside of a graph")]
    Capturing {
        /// What was asked for.
        what: &'static str,
    },
    /// A slot table whose elements are not of the activations' type.
    #[error("the slot table holds {table:?}, the activations are {activations:?}: on CUDA they are of one 16-bit type")]
    Dtype {
        /// The table's type.
        table: SlotDtype,
        /// The activations'.
        activations: SlotDtype,
    },
    /// A view whose rows reach past its memory.
    #[error("{num_rows} rows of {width} values, {stride} apart, do not fit in {values} values")]
    View {
        /// Rows.
        num_rows: usize,
        /// Values of a row.
        width: usize,
        /// Values from one row to the next.
        stride: usize,
        /// Values there are.
        values: usize,
    },
}

impl CudaError {
    /// Says what was asked of the driver when it refused.
    pub(super) fn driver(what: &'static str) -> impl Fn(DriverError) -> CudaError {
        move |source| CudaError::Driver { what, source }
    }
}
