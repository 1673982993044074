//! The life of a sequence: added with a selection, stepped, finished.

use std::sync::Arc;

use lora_math::AdapterSelection;
use lora_math::selection::resolve;
use lora_pool::Lease;

use super::{Engine, EngineError, SequenceId, SequenceOptions};
use crate::checkpoint::config::RopeScaling;
use crate::kv_cache::{BLOCK_TOKENS, BlockTable};
use crate::model::vectors::PlacedVectors;
use crate::prefix::{PrefixKey, PrefixState};

/// One running sequence. It owns its blocks and holds its lease until it is finished or the engine is dropped.
#[derive(Debug)]
pub(super) struct Sequence {
    /// The adapter's generation; none is the base model.
    pub(super) lease: Option<Lease>,
    /// The adapter's gains, shifts and norms; none where it has none.
    pub(super) vectors: Option<Arc<PlacedVectors>>,
    pub(super) table: BlockTable,
    /// Tokens in the cache.
    pub(super) length: usize,
    pub(super) prompt_tokens: Option<usize>,
    /// Keys of its whole blocks; none where blocks cannot be shared.
    pub(super) prefix: Option<PrefixState>,
    /// The last step whose inputs named it, by which a repeat in one step is seen.
    pub(super) seen_in_step: u64,
}

impl Engine {
    /// Adds an empty sequence that uses what `selection` names now, whatever that name means later.
    ///
    /// # Errors
    /// [`EngineError::Selection`] where an adapter is named and there is no pool, [`EngineError::Pool`] where the pool
    /// has none of that name, [`EngineError::VectorPlace`] where the adapter was prepared for another model.
    pub fn add_sequence(&mut self, selection: &AdapterSelection) -> Result<SequenceId, EngineError> {
        self.add_sequence_with(&SequenceOptions { selection: selection.clone(), ..SequenceOptions::default() })
    }

    /// [`add_sequence`](Self::add_sequence) with all options.
    ///
    /// # Errors
    /// As there.
    pub fn add_sequence_with(&mut self, options: &SequenceOptions) -> Result<SequenceId, EngineError> {
        let lease = match &self.lora {
            Some(lora) => lora.pool.acquire(&options.selection)?,
            None => {
                // Only base can come of it: the one resolver says what else is refused.
                resolve(&options.selection, None)?;
                None
            }
        };
        let vectors = match lease.as_ref().and_then(Lease::vectors) {
            Some(vectors) => Some(Arc::new(PlacedVectors::new(&self.model, vectors)?)),
            None => None,
        };
        let id = SequenceId(self.next_sequence);
        self.next_sequence += 1;
        let prompt_tokens = options.prompt_tokens;
        let table = BlockTable::default();
        // Under dynamic scaling the rotations of a prompt depend on its length, so equal tokens have unequal keys and values.
        let shares = !matches!(self.model.config().rope.scaling, RopeScaling::Dynamic { .. });
        let adapter = lease.as_ref().map(|lease| (lease.id().content, 1.0));
        let prefix = shares.then(|| PrefixState::new(PrefixKey::root(adapter, &options.salt)));
        self.sequences
            .insert(id, Sequence { lease, vectors, table, length: 0, prompt_tokens, prefix, seen_in_step: 0 });
        Ok(id)
    }

    /// Gives an empty sequence the blocks of the KV cache that an earlier one has filled with the same first tokens, under
    /// the same contents of an adapter (or the base) and the same salt; the number of tokens that it has by that, a multiple of
    /// the block's, and always fewer than `token_ids`, so that the last one is left to be computed. The next step goes on
    /// behind them, to the same bits.
    ///
    /// # Errors
    /// [`EngineError::UnknownSequence`], [`EngineError::NotEmpty`].
    pub fn reuse_prefix(&mut self, sequence: SequenceId, token_ids: &[u32]) -> Result<usize, EngineError> {
        let entry = self.sequences.get_mut(&sequence).ok_or(EngineError::UnknownSequence { sequence })?;
        if entry.length > 0 {
            return Err(EngineError::NotEmpty { sequence, length: entry.length });
        }
        let Some(prefix) = &mut entry.prefix else { return Ok(0) };
        let whole = token_ids.chunks_exact(BLOCK_TOKENS).take(token_ids.len().saturating_sub(1) / BLOCK_TOKENS);
        for block in whole {
            let key = prefix.key.next(block);
            if !self.cache.attach(&mut entry.table, key) {
                break;
            }
            prefix.key = key;
            prefix.num_blocks += 1;
            entry.length += BLOCK_TOKENS;
        }
        Ok(entry.length)
    }

    /// Ends a sequence: its blocks are free, and its use of the adapter is given back.
    ///
    /// # Errors
    /// [`EngineError::UnknownSequence`].
    pub fn finish(&mut self, sequence: SequenceId) -> Result<(), EngineError> {
        let ended = self.sequences.remove(&sequence).ok_or(EngineError::UnknownSequence { sequence })?;
        self.cache.release(ended.table);
        Ok(())
    }

    /// Tokens that a sequence holds.
    ///
    /// # Errors
    /// [`EngineError::UnknownSequence`].
    pub fn sequence_length(&self, sequence: SequenceId) -> Result<usize, EngineError> {
        self.sequences.get(&sequence).map(|s| s.length).ok_or(EngineError::UnknownSequence { sequence })
    }

    /// The lease that a sequence holds; none on the base model.
    ///
    /// # Errors
    /// [`EngineError::UnknownSequence`].
    pub fn lease(&self, sequence: SequenceId) -> Result<Option<&Lease>, EngineError> {
        self.sequences.get(&sequence).map(|s| s.lease.as_ref()).ok_or(EngineError::UnknownSequence { sequence })
    }

    /// Running sequences, oldest first.
    pub fn sequences(&self) -> impl Iterator<Item = SequenceId> {
        self.sequences.keys().copied()
    }
}
