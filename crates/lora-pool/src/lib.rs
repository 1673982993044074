//! lora-pool
