//! The CUDA code of the crates, tested without a GPU: the tests of this package run it through the real cudarc on the
//! stand-in driver.
//!
//! The package stands apart from `conformance` because its features bring cudarc, and with it a C++ compiler for the
//! stand-in, which no default build may need. What several tests share goes here.
