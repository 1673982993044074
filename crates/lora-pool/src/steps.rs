//! The last step that the engine told of: what a freed slot waits for before it is written anew.
//!
//! Fences are made one at a time, each behind everything launched before it, so the last one made stands behind all steps
//! told of. A fence that could not be made leaves a step that nothing stands behind, until a later one is made.

use std::sync::Arc;

use crate::error::PoolError;
use crate::memory::{DeviceMemory, MemoryError};

/// The fence behind the last step.
pub(crate) struct Steps<M: DeviceMemory> {
    last: Option<Arc<M::StepFence>>,
    /// Whether a step was launched behind which no fence stands.
    unfenced: bool,
}

impl<M: DeviceMemory> Steps<M> {
    /// No step yet.
    pub(crate) fn new() -> Self {
        Steps { last: None, unfenced: false }
    }

    /// A step has been launched on `stream`.
    pub(crate) fn launched(&mut self, memory: &M, stream: &M::Stream) -> Result<(), MemoryError> {
        self.unfenced = true;
        self.last = Some(Arc::new(memory.fence(stream)?));
        self.unfenced = false;
        Ok(())
    }

    /// The fence behind every step told of; none where there was no step.
    pub(crate) fn fence(&self) -> Result<Option<Arc<M::StepFence>>, PoolError> {
        if self.unfenced { Err(PoolError::StepUnfenced) } else { Ok(self.last.clone()) }
    }
}
