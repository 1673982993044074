//! A batch of requests that runs to its end: sequences that are finished whatever happens, prefill in bounded steps, and
//! decode steps over the requests still running. What is done with the logits is the caller's.

use std::collections::VecDeque;

use lora_math::AdapterSelection;

use crate::engine::{Engine, EngineError, LogitsFor, LogitsRows, SequenceId, SequenceOptions, StepInput};
use crate::kv_cache::{BLOCK_TOKENS, KvCache};

/// Positions of KV cache for sequences of these lengths at once: each takes whole blocks.
#[must_use]
pub fn kv_tokens_for(lengths: impl IntoIterator<Item = usize>) -> usize {
    lengths.into_iter().map(KvCache::blocks_for).sum::<usize>() * BLOCK_TOKENS
}

/// One request as the engine sees it.
pub(crate) struct BatchRequest<'a> {
    pub(crate) selection: &'a AdapterSelection,
    pub(crate) prompt: &'a [u32],
    /// Tokens that the sequence will hold in the end.
    pub(crate) total_tokens: usize,
}

/// Sequences of one engine; dropping the batch finishes those that still run.
pub(crate) struct Batch<'a> {
    engine: &'a mut Engine,
    sequences: Vec<SequenceId>,
}

impl<'a> Batch<'a> {
    /// Adds a sequence for each request, or none.
    ///
    /// # Errors
    /// [`EngineError::KvFull`] when they do not all fit to their ends, and what [`Engine::add_sequence`] refuses.
    pub(crate) fn begin(engine: &'a mut Engine, requests: &[BatchRequest<'_>]) -> Result<Self, EngineError> {
        let usage = engine.kv_usage();
        let needed_blocks = requests.iter().map(|request| KvCache::blocks_for(request.total_tokens)).sum();
        if needed_blocks > usage.free_blocks {
            let (free_blocks, num_blocks) = (usage.free_blocks, usage.num_blocks);
            return Err(EngineError::KvFull { needed_blocks, free_blocks, num_blocks });
        }
        let mut batch = Batch { engine, sequences: Vec::with_capacity(requests.len()) };
        for request in requests {
            let selection = request.selection.clone();
            let options =
                SequenceOptions { selection, prompt_tokens: Some(request.prompt.len()), ..SequenceOptions::default() };
            batch.sequences.push(batch.engine.add_sequence_with(&options)?);
        }
        Ok(batch)
    }

    /// Feeds all prompts in steps of as many rows as fit, requests in order; prompts are cut where a step is full.
    /// `take` gets each request's index with logits: all of them in order of position, or those of its last token.
    pub(crate) fn prefill(
        &mut self,
        prompts: &[&[u32]],
        wanted: LogitsFor,
        mut take: impl FnMut(usize, LogitsRows<'_>),
    ) -> Result<(), EngineError> {
        let max_rows = self.engine.max_step_rows();
        let mut waiting: VecDeque<(usize, &[u32])> = prompts.iter().copied().enumerate().collect();
        let (mut inputs, mut requests) = (Vec::new(), Vec::new());
        while !waiting.is_empty() {
            inputs.clear();
            requests.clear();
            let mut room = max_rows;
            while let Some((request, prompt)) = waiting.pop_front() {
                let (token_ids, rest) = prompt.split_at(prompt.len().min(room));
                let logits = if rest.is_empty() || wanted == LogitsFor::All { wanted } else { LogitsFor::None };
                inputs.push(StepInput { sequence: self.sequences[request], token_ids, logits });
                requests.push(request);
                room -= token_ids.len();
                if !rest.is_empty() {
                    waiting.push_front((request, rest));
                }
                if room == 0 {
                    break;
                }
            }
            let output = self.engine.step(&inputs)?;
            for (index, request) in requests.iter().enumerate() {
                let logits = output.logits(index);
                if logits.num_rows() > 0 {
                    take(*request, logits);
                }
            }
        }
        Ok(())
    }

    /// Feeds one token to each of these requests; `take` gets each request's index with the logits after it.
    pub(crate) fn decode(
        &mut self,
        tokens: &[(usize, u32)],
        mut take: impl FnMut(usize, &[f32]),
    ) -> Result<(), EngineError> {
        for tokens in tokens.chunks(self.engine.max_step_rows()) {
            let inputs: Vec<StepInput<'_>> = tokens
                .iter()
                .map(|(request, token)| StepInput {
                    sequence: self.sequences[*request],
                    token_ids: std::slice::from_ref(token),
                    logits: LogitsFor::Last,
                })
                .collect();
            let output = self.engine.step(&inputs)?;
            for (index, (request, _)) in tokens.iter().enumerate() {
                if let Some(row) = output.logits(index).last() {
                    take(*request, row);
                }
            }
        }
        Ok(())
    }

    /// Ends one request before the batch does.
    pub(crate) fn finish(&mut self, request: usize) -> Result<(), EngineError> {
        self.engine.finish(self.sequences[request])
    }
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        for sequence in &self.sequences {
            // Requests that ended early are unknown by now.
            let _ = self.engine.finish(*sequence);
        }
    }
}
