//! The life of a sequence: added with a selection, stepped, finished.

use std::sync::Arc;

use lora_math::AdapterSelection;
use lora_math::selection::resolve;
use lora_pool::Lease;

use super::{Engine, EngineError, SequenceId, SequenceOptions};
use crate::kv_cache::BlockTable;
use crate::model::vectors::PlacedVectors;

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
        self.add_sequence_with(&SequenceOptions { selection: selection.clone(), prompt_tokens: None })
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
        self.sequences.insert(id, Sequence { lease, vectors, table, length: 0, prompt_tokens, seen_in_step: 0 });
        Ok(id)
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
