//! lora-adapter
