//! One step: check everything, lay out its rows, run the model, and only then advance the sequences.

use std::ops::Range;

use lora_kernels::SlotTable;
use lora_math::{RowAdapter, SiteEntry};

use super::{Engine, EngineError, Lora, SequenceId};
use crate::kv_cache::{BLOCK_TOKENS, KvCache};
use crate::model::attention::{RowPlace, StepPlaces};
use crate::model::forward::Step;
use crate::model::lora::LoraStep;
use crate::model::vectors::{RowVectors, StepVectors};

/// New tokens of one sequence.
#[derive(Debug, Clone, Copy)]
pub struct StepInput<'a> {
    /// The sequence.
    pub sequence: SequenceId,
    /// Its next tokens, at least one: a prompt, a part of one, or a decoded token.
    pub token_ids: &'a [u32],
    /// Which logits are wanted.
    pub logits: LogitsFor,
}

/// The positions of an input whose logits are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum LogitsFor {
    /// None: a chunk of a prompt that is not its last.
    None,
    /// The last token's: what sampling needs.
    #[default]
    Last,
    /// Every token's.
    All,
}

/// The logits of a step, in the engine's own buffer: take what you keep before the next step.
#[derive(Debug, Clone, Copy)]
pub struct StepOutput<'a> {
    logits: &'a [f32],
    inputs: &'a [Range<usize>],
    vocab_size: usize,
}

/// Logits of one input, a row for each position asked for.
#[derive(Debug, Clone, Copy)]
pub struct LogitsRows<'a> {
    data: &'a [f32],
    vocab_size: usize,
}

impl<'a> StepOutput<'a> {
    /// Inputs of the step.
    #[must_use]
    pub fn num_inputs(&self) -> usize {
        self.inputs.len()
    }

    /// Length of a row.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Logits of the input at `index`.
    ///
    /// # Panics
    /// If the step had no such input.
    #[must_use]
    pub fn logits(&self, index: usize) -> LogitsRows<'a> {
        let Range { start, end } = self.inputs[index];
        LogitsRows { data: &self.logits[start * self.vocab_size..end * self.vocab_size], vocab_size: self.vocab_size }
    }
}

impl<'a> LogitsRows<'a> {
    /// Positions whose logits were asked for.
    #[must_use]
    pub fn num_rows(&self) -> usize {
        self.data.len() / self.vocab_size
    }

    /// The rows in order of position, each `[vocab_size]`.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = &'a [f32]> {
        self.data.chunks_exact(self.vocab_size)
    }

    /// The last position's row; none when no logits were asked for.
    #[must_use]
    pub fn last(&self) -> Option<&'a [f32]> {
        self.rows().last()
    }
}

/// What a step is laid out in; refilled each step, never shrunk.
#[derive(Debug, Default)]
pub(super) struct StepBuffers {
    token_ids: Vec<u32>,
    places: StepPlaces,
    adapters: Vec<RowAdapters>,
    /// The adapters of the rows in `logit_rows`.
    logit_adapters: Vec<RowAdapters>,
    vectors: Vec<RowVectors>,
    logit_rows: Vec<usize>,
    /// Rows of the logits, for each input.
    inputs: Vec<Range<usize>>,
}

/// The adapters of a row: one, or none on the base model.
#[derive(Debug, Clone, Copy)]
struct RowAdapters(Option<RowAdapter>);

impl AsRef<[RowAdapter]> for RowAdapters {
    fn as_ref(&self) -> &[RowAdapter] {
        self.0.as_slice()
    }
}

impl Engine {
    /// Computes the next tokens of any number of sequences: prefill, decode, or both at once.
    ///
    /// A row's logits depend on its sequence alone, to the bit: not on the other inputs, nor on how its tokens were cut
    /// into steps, nor on threads. One exception: under dynamic rope scaling the rotations of a prompt depend on its
    /// length, so one that comes in several steps must say its length in
    /// [`SequenceOptions::prompt_tokens`](super::SequenceOptions::prompt_tokens).
    ///
    /// # Errors
    /// Everything is checked before anything changes: unknown or repeated sequences, empty inputs, tokens past the
    /// vocabulary, too many rows, a full context, a full KV cache ([`EngineError::is_retryable`] says which may pass).
    pub fn step(&mut self, inputs: &[StepInput<'_>]) -> Result<StepOutput<'_>, EngineError> {
        self.check(inputs)?;
        self.lay_out(inputs);
        let Engine { model, lora, cache, scratch, buffers, threads, .. } = self;
        let StepBuffers { token_ids, places, adapters, logit_adapters, vectors, logit_rows, .. } = &*buffers;
        let step = Step { token_ids, places, logit_rows, vectors: StepVectors(vectors) };
        let lora = match lora {
            Some(lora) => Some(lora.stamp(adapters, logit_adapters)?),
            None => None,
        };
        let run = threads.install(|| model.forward(&step, lora, cache, scratch));
        // Nothing outlives its adapter until the next step comes.
        buffers.vectors.clear();
        run?;
        for input in inputs {
            if let Some(sequence) = self.sequences.get_mut(&input.sequence) {
                sequence.length += input.token_ids.len();
                // Only what a step has computed to its end is found by others.
                let (cache, blocks) = (&mut self.cache, &sequence.table.blocks);
                if let Some(prefix) = &mut sequence.prefix {
                    prefix.push(input.token_ids, BLOCK_TOKENS, |index, key| cache.register(blocks[index], key));
                }
            }
        }
        let vocab_size = self.model.config().vocab_size;
        Ok(StepOutput { logits: &self.scratch.logits, inputs: &self.buffers.inputs, vocab_size })
    }

    /// Refuses what cannot run. Marks the inputs' sequences as seen in this step, and changes nothing else.
    fn check(&mut self, inputs: &[StepInput<'_>]) -> Result<(), EngineError> {
        if inputs.is_empty() {
            return Err(EngineError::EmptyStep);
        }
        self.num_steps += 1;
        let vocab_size = self.model.config().vocab_size;
        let (mut rows, mut needed_blocks) = (0, 0);
        for &StepInput { sequence, token_ids, .. } in inputs {
            let entry = self.sequences.get_mut(&sequence).ok_or(EngineError::UnknownSequence { sequence })?;
            if std::mem::replace(&mut entry.seen_in_step, self.num_steps) == self.num_steps {
                return Err(EngineError::DuplicateSequence { sequence });
            }
            let (length, added) = (entry.length, token_ids.len());
            if added == 0 {
                return Err(EngineError::EmptyInput { sequence });
            }
            if let Some(index) = token_ids.iter().position(|token| *token as usize >= vocab_size) {
                let token_id = token_ids[index];
                return Err(EngineError::TokenOutOfRange { sequence, index, token_id, vocab_size });
            }
            if added > self.max_context - length {
                return Err(EngineError::ContextFull { sequence, length, added, max_context: self.max_context });
            }
            rows += added;
            needed_blocks += KvCache::blocks_for(length + added).saturating_sub(entry.table.blocks.len());
        }
        if rows > self.max_step_rows {
            return Err(EngineError::TooManyRows { rows, max_rows: self.max_step_rows });
        }
        let usage = self.cache.usage();
        if needed_blocks > usage.free_blocks {
            let (free_blocks, num_blocks) = (usage.free_blocks, usage.num_blocks);
            return Err(EngineError::KvFull { needed_blocks, free_blocks, num_blocks });
        }
        Ok(())
    }

    /// Gives every sequence the blocks of its new tokens and writes the step's rows. [`check`](Self::check) has passed.
    fn lay_out(&mut self, inputs: &[StepInput<'_>]) {
        let StepBuffers { token_ids, places, adapters, logit_adapters, vectors, logit_rows, inputs: logits } =
            &mut self.buffers;
        token_ids.clear();
        places.rows.clear();
        places.blocks.clear();
        adapters.clear();
        logit_adapters.clear();
        vectors.clear();
        logit_rows.clear();
        logits.clear();
        let rotation_len = self.model.config().head_dim;
        for input in inputs {
            let Some(sequence) = self.sequences.get_mut(&input.sequence) else { continue };
            let end = sequence.length + input.token_ids.len();
            let covered = self.cache.grow(&mut sequence.table, end);
            debug_assert!(covered, "free blocks were counted");
            let first_block = places.blocks.len();
            places.blocks.extend_from_slice(&sequence.table.blocks);

            let first_row = token_ids.len();
            token_ids.extend_from_slice(input.token_ids);
            let adapter = sequence.lease.as_ref().map(|lease| RowAdapter { slot: lease.slot(), scale: 1.0 });
            if let Some(placed) = &sequence.vectors {
                vectors.push(RowVectors { rows: first_row..token_ids.len(), vectors: placed.clone() });
            }
            for position in sequence.length..end {
                // Of the prompt every token is rotated for the prompt's length, of the answer each for its own.
                let rotated_for = match sequence.prompt_tokens {
                    Some(prompt_tokens) => prompt_tokens.max(position + 1),
                    None => end,
                };
                let row = places.rows.len();
                let cos_sin = &mut self.scratch.cos_sin[row * rotation_len..(row + 1) * rotation_len];
                let (cos, sin) = cos_sin.split_at_mut(rotation_len / 2);
                self.rope.write_cos_sin(position, rotated_for, cos, sin);
                places.rows.push(RowPlace { position, first_block });
                adapters.push(RowAdapters(adapter));
            }

            let first_logits = logit_rows.len();
            let last_row = token_ids.len();
            logit_rows.extend(match input.logits {
                LogitsFor::None => last_row..last_row,
                LogitsFor::Last => last_row - 1..last_row,
                LogitsFor::All => first_row..last_row,
            });
            logit_adapters.extend(logit_rows[first_logits..].iter().map(|row| adapters[*row]));
            logits.push(first_logits..logit_rows.len());
        }
    }
}

impl Lora {
    /// Writes the rows' metadata and gives what the forward pass needs.
    fn stamp(&mut self, adapters: &[RowAdapters], logit_adapters: &[RowAdapters]) -> Result<LoraStep<'_>, EngineError> {
        self.rows.stamp(adapters, adapters.len())?;
        if let Some(rows) = &mut self.head_rows {
            rows.stamp(logit_adapters, logit_adapters.len())?;
        }
        let table = self.pool.table();
        // SAFETY: the table is host memory that lives as long as the pool, which `self` holds. A step names only the slots
        // of the leases that its sequences hold, and those leases live until after the step: `Engine::step` borrows the
        // engine for itself. The pool does not write the table row, A or B of a leased slot, and packs them by the layout
        // from which the plan's features are taken.
        let table = unsafe {
            let entries = table.address as usize as *const SiteEntry;
            SlotTable::from_raw(entries, table.num_slots, table.num_sites, table.dtype)
        };
        let Lora { kernels, plan, rows, head_rows, h, .. } = self;
        Ok(LoraStep { kernels: &**kernels, table, rows, head_rows: head_rows.as_ref(), plan, h })
    }
}
