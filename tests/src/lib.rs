//! Shared helpers of the conformance tests.
