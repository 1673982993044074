//! The subcommands of the binary, one a file, and what they share.

pub(crate) mod bytes;
pub(crate) mod generate;
pub(crate) mod inspect;
pub(crate) mod plan;
pub(crate) mod score;
pub(crate) mod setup;
