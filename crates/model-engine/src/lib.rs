//! model-engine
pub mod checkpoint;
pub mod rope;
