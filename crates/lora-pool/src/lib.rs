//! lora-pool

mod error;
mod generation;
mod host;
mod image;
mod landing;
mod lease;
pub mod memory;
mod options;
mod placement;
mod pool;
mod snapshot;
mod state;
mod table;

pub use error::PoolError;
pub use host::{Arrived, HostMemory, HostStream};
pub use landing::{Landing, Staged};
pub use lease::Lease;
pub use memory::{CopyRun, DeviceMemory, MemoryError};
pub use options::PoolOptions;
pub use pool::{LoraPool, MAX_NAME_BYTES};
pub use snapshot::{PoolSnapshot, ResidentSnapshot};
pub use table::TableRef;
