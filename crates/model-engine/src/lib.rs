//! A transformer engine with per-row LoRA in place: base checkpoints, KV cache, prefill and decode.
//!
//! | module | owns |
//! |---|---|
//! | [`checkpoint`] | files to a checked configuration and weights |
//! | [`rope`] | rotary position tables |
//! | [`tokenizer`] | text, token ids, chat templates |
//! | [`model`] | [`TransformerModel`]: layers from a description, and their forward pass |
//! | [`kv_cache`] | paged keys and values |
//! | [`engine`] | [`Engine`]: sequences with their adapters, and the one step that serves them all |

pub mod checkpoint;
pub mod engine;
pub mod kv_cache;
pub mod model;
pub mod rope;
pub mod tokenizer;

pub use engine::{
    Engine, EngineError, EngineOptions, LogitsFor, LogitsRows, SequenceId, SequenceOptions, StepInput, StepOutput,
};
pub use kv_cache::{KvShape, KvUsage};
pub use model::{ModelError, TransformerModel};
