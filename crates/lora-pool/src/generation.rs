//! Numbers for generations.
//!
//! A generation is unique in the process, so that prefix caches and engines over several pools never take one for
//! another: hence one counter for all pools. Nothing is decided by its value but equality.

use std::sync::{Mutex, PoisonError};

use lora_math::Generation;

static LAST: Mutex<Generation> = Mutex::new(Generation::ZERO);

/// A generation that nobody in this process has had.
pub(crate) fn next_generation() -> Generation {
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    *last = last.next();
    *last
}
