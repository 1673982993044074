//! The logits of given tokens under given adapters: for checks of parity, where nothing is sampled.

use lora_math::AdapterSelection;

use crate::batch::{Batch, BatchRequest};
use crate::engine::{Engine, EngineError, LogitsFor};

/// Tokens to score.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ScoreRequest {
    /// The adapter.
    pub selection: AdapterSelection,
    /// Tokens that are computed together, as a prompt is.
    pub token_ids: Vec<u32>,
    /// Tokens that follow, each in a decode step of its own.
    pub decode: Vec<u32>,
}

/// The logits of every position of every request, `[request][position][vocab_size]`; all requests run as one batch.
///
/// # Errors
/// What [`Engine::step`] and [`Engine::add_sequence`] refuse; [`EngineError::KvFull`] before anything runs when the
/// requests do not fit together ([`kv_tokens_for`](crate::kv_tokens_for) says how much they need).
pub fn score(engine: &mut Engine, requests: &[ScoreRequest]) -> Result<Vec<Vec<Vec<f32>>>, EngineError> {
    let batch_requests: Vec<BatchRequest<'_>> = requests
        .iter()
        .map(|request| BatchRequest {
            selection: &request.selection,
            prompt: &request.token_ids,
            total_tokens: request.token_ids.len() + request.decode.len(),
        })
        .collect();
    let prompts: Vec<&[u32]> = requests.iter().map(|request| request.token_ids.as_slice()).collect();
    let mut logits: Vec<Vec<Vec<f32>>> = vec![Vec::new(); requests.len()];
    let mut batch = Batch::begin(engine, &batch_requests)?;
    batch
        .prefill(&prompts, LogitsFor::All, |request, rows| logits[request].extend(rows.rows().map(<[f32]>::to_vec)))?;
    let num_steps = requests.iter().map(|request| request.decode.len()).max().unwrap_or(0);
    for step in 0..num_steps {
        let tokens: Vec<(usize, u32)> = requests
            .iter()
            .enumerate()
            .filter_map(|(index, request)| Some((index, *request.decode.get(step)?)))
            .collect();
        batch.decode(&tokens, |request, row| logits[request].push(row.to_vec()))?;
    }
    Ok(logits)
}
