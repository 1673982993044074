//! Whether there is a CUDA device, asked in a way that a machine without a driver survives.

use cudarc::driver::{CudaContext, DriverError};
use thiserror::Error;

/// Why there is no CUDA device to use.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NoDevice {
    /// The driver's library is not on this machine.
    #[error("no CUDA driver: {library} does not load")]
    NoDriver {
        /// The library's file name.
        library: &'static str,
        /// What the loader said.
        source: libloading::Error,
    },
    /// There is a driver, which reports an error.
    #[error("the CUDA driver does not start: {0}")]
    Driver(#[from] DriverError),
    /// There is a driver, and no device.
    #[error("the CUDA driver has no device")]
    NoDevice,
}

const LIBRARY: &str = if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" };

/// Number of CUDA devices, at least 1. Loads the driver and creates no context.
///
/// cudarc panics where the driver's library is missing; an application asks this before it calls cudarc.
///
/// # Errors
/// [`NoDevice`], to be told in one line before the CPU is used.
pub fn probe() -> Result<usize, NoDevice> {
    // SAFETY: the driver's library runs no code at load that this process must guard against; cudarc loads the same one.
    let library = unsafe { libloading::Library::new(LIBRARY) };
    // Kept loaded: cudarc is about to use it.
    std::mem::forget(library.map_err(|source| NoDevice::NoDriver { library: LIBRARY, source })?);
    match CudaContext::device_count() {
        Ok(count) if count > 0 => Ok(count as usize),
        Ok(_) => Err(NoDevice::NoDevice),
        Err(error) if error.0 == cudarc::driver::sys::CUresult::CUDA_ERROR_NO_DEVICE => Err(NoDevice::NoDevice),
        Err(error) => Err(NoDevice::Driver(error)),
    }
}
