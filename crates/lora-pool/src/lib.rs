//! lora-pool

mod error;
mod generation;
mod host;
mod image;
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
pub use lease::Lease;
pub use memory::{CopyRun, DeviceMemory, MemoryError};
pub use options::PoolOptions;
pub use pool::LoraPool;
pub use snapshot::{PoolSnapshot, ResidentSnapshot};
pub use table::TableRef;
