//! LoRA adapter files, fully checked: every tensor and field consumed or refused by name.

pub mod adapter;
pub mod error;
pub mod feature;
pub mod keys;
pub mod matrix;
pub mod notes;
pub mod pair;
pub mod prepare;

pub use adapter::Adapter;
pub use error::{LoadError, Located, Reason};
pub use feature::Feature;
pub use keys::Dialect;
pub use matrix::{FileDtype, Matrix, MatrixError};
pub use notes::{Note, Origin};
pub use pair::{LoraPair, MAX_RANK};
pub use prepare::{Misfit, PreparedAdapter, Refusal, prepare};
