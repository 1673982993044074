#![doc = include_str!("../README.md")]
//!
//! ## Inside
//!
//! | module | owns |
//! |---|---|
//! | [`memory`] | what a pool asks of its memory, and the order of copies, publications and steps |
//! | `host` | memory in RAM, and why writing it while others read it is sound |
//! | `cuda` | memory on a CUDA device (feature `cuda`) |
//! | `host_tier` | packed images that stay in host memory |
//! | `placement` | where slots and table stand in the memory |
//! | `image` | an adapter packed for a pool, and the copies and table row that place it |
//! | `state` | the protocol: which slot holds what, which name points where, who uses it |
//! | `steps` | the fence behind the last step that the engine told of |
//! | `landing` | a load on its way through the protocol |
//! | `lease` | the counted use of a generation |
//! | `loader` | loads by name on threads of their own, published between steps |
//! | `reads` | what is told of a leased slot |
//! | `counters` | what has happened so far |
//! | `pool` | the calls, and the mutexes around protocol and fence |

mod counters;
#[cfg(feature = "cuda")]
mod cuda;
mod error;
mod generation;
mod host;
mod host_tier;
mod image;
mod landing;
mod lease;
mod loader;
pub mod memory;
mod options;
mod placement;
mod pool;
mod reads;
mod replace;
mod snapshot;
mod state;
mod steps;
mod table;

pub use counters::PoolCounters;
#[cfg(feature = "cuda")]
pub use cuda::{CudaFence, CudaMemory, CudaToken, PinnedBuffer};
pub use error::PoolError;
pub use host::{Arrived, HostMemory, HostStream};
pub use host_tier::HostTierSnapshot;
pub use image::packed_layout;
pub use landing::{Landing, Staged};
pub use lease::Lease;
pub use loader::{AdapterSource, LoadError, Loaded, LoadedFrom, Loader, LoaderOptions, Prefetch, SourceError};
pub use memory::{CopyRun, DeviceMemory, MemoryError};
pub use options::PoolOptions;
pub use placement::FixedStride;
pub use pool::{LoraPool, MAX_NAME_BYTES};
pub use replace::{Replaced, Unloading};
pub use snapshot::{PoolSnapshot, ResidentSnapshot};
pub use table::TableRef;
