//! Adapters made by the test: good ones in every dtype and shape that is read, and bad ones of every kind that the
//! field has seen, each refused for its own reason.

mod config;
mod experts;
mod extras;
mod files;
mod mutations;
mod naming;
mod prepare;
mod shards;
mod support;
mod tensors;
