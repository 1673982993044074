#![doc = include_str!("../README.md")]
//!
//! # What is where
//!
//! This crate only re-exports; each part can be taken alone.
//!
//! | here | crate | owns |
//! |---|---|---|
//! | [`math`] | `lora-math` | layout, routing, identity; no GPU, no I/O, no `unsafe` |
//! | [`adapter`] | `lora-adapter` | adapter files, fully checked |
//! | [`pool`] | `lora-pool` | device memory, slots, leases, eviction |
//! | [`kernels`] | `lora-kernels` | shrink, expand, delta: reference, CPU, CUDA |
//! | [`engine`] | `model-engine` | a transformer with all of it in place |
//!
//! # Features
//!
//! - `cli` (default): builds the `multilora` binary. It adds nothing to the library.
//! - `cuda`: the CUDA back end of `lora-kernels` and the CUDA memory of `lora-pool`, for engines with a forward pass of their
//!   own; that of `model-engine` runs on the CPU, and the binary says so when it finds a device.

pub use lora_adapter as adapter;
pub use lora_kernels as kernels;
pub use lora_math as math;
pub use lora_pool as pool;
pub use model_engine as engine;
