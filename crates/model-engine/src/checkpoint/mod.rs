//! Base checkpoints: Hugging Face directories and GGUF files to a checked configuration and owned weights.
//!
//! Files are untrusted: every length is checked before it is used, every tensor that the model needs must be
//! there with the right shape, and whatever would change the arithmetic and is not supported is refused by name.

pub mod config;
pub mod weights;

pub use config::ModelConfig;
pub use weights::ModelWeights;
