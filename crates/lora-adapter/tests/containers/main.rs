//! Adapters in other containers than PEFT's safetensors: good ones written by the tools that people use, and bad ones
//! of every kind, each refused for its own reason.

mod gguf;
mod mlx;
mod pickles;
mod support;
mod torch_files;
