#![doc = include_str!("../README.md")]
//!
//! # Numeric contract
//!
//! All back ends compute the same values up to the order of a sum:
//!
//! - Activations are f32. A, B and base weights are f32, f16 or bf16 and are widened exactly; sums are f32.
//! - `h[r] = Σ_k x[k] · A[r][k]` is kept in f32.
//! - Of an embedding `h[r] = A[token][r]`, widened exactly.
//! - `y[n] += (scale · scaling) · Σ_r h[r] · B[n][r]`, where the factor is one f32 product. The last multiplication and
//!   addition may be fused.
//! - Several entries of one row are added one after the other, in the request's order.
//! - Base and padding rows, and sites at which an entry's rank is 0, cost nothing: their bits are not touched. Nothing
//!   past the rank of an entry is read.
//! - The bits of a row depend on the row, its adapters and the back end (for [`cpu`] also on the instruction set) only:
//!   not on the other rows, the number of rows, their grouping, the number of threads, or on whether
//!   [`shrink`](LoraKernels::shrink) and [`expand`](LoraKernels::expand) or [`delta`](LoraKernels::delta) ran.

pub mod activations;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod error;
pub mod ops;
pub mod overlay;
pub mod reference;
pub mod table;
pub mod weights;

pub use activations::{Rows, RowsMut, ShrinkBuffer, ShrinkCapacity};
pub use cpu::Cpu;
pub use error::{KernelError, Operand};
pub use ops::{DeltaRun, LoraKernels};
pub use reference::Reference;
pub use table::{SiteRef, SlotTable};
pub use weights::{WeightValues, WeightView};
