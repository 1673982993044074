//! Shared helpers of the conformance tests: the golden data of this directory, and engines built over it.
//!
//! Helpers panic with what went wrong: they run in tests only.

pub mod engines;
pub mod golden;
pub mod kernels;
pub mod rows;

/// The examples of the repository's README compile.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;
