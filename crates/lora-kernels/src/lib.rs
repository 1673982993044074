//! lora-kernels
