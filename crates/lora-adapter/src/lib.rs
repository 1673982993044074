#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod adapter;
mod archive_error;
mod blocks;
mod config;
mod declared;
pub mod error;
pub mod exact;
pub mod experts;
pub mod extras;
pub mod feature;
pub mod fields;
mod gguf;
mod json;
pub mod keys;
mod load;
mod marks;
pub mod matrix;
mod mlx;
mod modules;
pub mod notes;
pub mod pair;
mod pickle;
pub mod prepare;
pub mod reason;
pub mod report;
mod shards;
mod sort;
pub mod source;
mod tensor_file;
mod torch_zip;
mod unpack;
mod values;
mod weights;
pub mod write;

pub use adapter::Adapter;
pub use archive_error::ArchiveError;
pub use error::{LoadError, Located};
pub use exact::exact_slot_dtype;
pub use experts::GateUpOrder;
pub use extras::{BaseInit, Extra, Settings};
pub use feature::Feature;
pub use gguf::GgufError;
pub use keys::Dialect;
pub use matrix::{FileDtype, Matrix, MatrixError};
pub use notes::{Note, Origin};
pub use pair::{LoraPair, MAX_RANK};
pub use pickle::PickleError;
pub use prepare::{
    AdapterVectors, BaseWeights, Misfit, PrepareOptions, PreparedAdapter, Refusal, SiteVectors, prepare, prepare_with,
};
pub use reason::Reason;
pub use report::{AdapterReport, ExtraReport, SettingsReport, SiteReport};
pub use source::AdapterSource;
pub use write::{WriteError, write_plain};
