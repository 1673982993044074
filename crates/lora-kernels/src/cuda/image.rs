//! The kernel image that the crate carries.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaModule};
use cudarc::nvrtc::Ptx;

use super::error::CudaError;

/// What `build.rs` made: a fat binary of all kernels for all architectures, or nothing where there was no nvcc.
static KERNELS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kernels.fatbin"));

/// The image of this build.
///
/// # Errors
/// [`CudaError::NoImage`] where it was built without nvcc.
pub fn image() -> Result<&'static [u8], CudaError> {
    if KERNELS.is_empty() { Err(CudaError::NoImage) } else { Ok(KERNELS) }
}

/// Loads an image in a context.
pub(super) fn load(context: &Arc<CudaContext>, image: &[u8]) -> Result<Arc<CudaModule>, CudaError> {
    if image.is_empty() {
        return Err(CudaError::NoImage);
    }
    let (major, minor) =
        context.compute_capability().map_err(CudaError::driver("asking for the compute capability"))?;
    let refused = |source| CudaError::ImageRefused { major, minor, source };
    context.load_module(Ptx::from_binary(image.to_vec())).map_err(refused)
}
