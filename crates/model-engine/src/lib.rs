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
//! | [`mod@generate`] | prompts in, tokens and text out as they come |
//! | [`scheduler`] | requests that come and go at any step, and whose adapters take turns in the slots |
//! | [`mod@score`] | logits of given tokens |

mod batch;
pub mod checkpoint;
pub mod engine;
pub mod generate;
pub mod kv_cache;
pub mod model;
mod prefix;
pub mod rope;
pub mod scheduler;
pub mod score;
pub mod tokenizer;
mod zeroed;

pub use batch::kv_tokens_for;
pub use engine::{
    Engine, EngineError, EngineOptions, LogitsFor, LogitsRows, SequenceId, SequenceOptions, StepInput, StepOutput,
};
pub use kv_cache::{KvShape, KvUsage};
pub use model::{ModelError, TransformerModel};
