//! What a request says about adapters, and what that means for a step.

use thiserror::Error;

use crate::site::SlotId;

/// What a request says. Base is a variant of its own, never a number.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub enum AdapterSelection {
    /// The base model, whatever is active.
    #[default]
    Base,
    /// The pool's active adapter; base where there is no pool or none is active.
    Active,
    /// The adapter with this name.
    Named(String),
    /// The adapter that lives in this slot.
    Slot(SlotId),
}

/// What one token row does: nothing, or the deltas of the adapter in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Route {
    /// The base model alone.
    #[default]
    Base,
    /// The adapter in this slot.
    Slot(SlotId),
}

impl Route {
    /// The slot, if any.
    pub fn slot(self) -> Option<SlotId> {
        match self {
            Route::Base => None,
            Route::Slot(slot) => Some(slot),
        }
    }
}

/// A selection that names nothing resident.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SelectionError {
    /// No adapter has this name.
    #[error("no adapter named {name:?} is loaded")]
    UnknownName {
        /// The name asked for.
        name: String,
    },
    /// The slot's number is past the last slot.
    #[error("{slot} is out of range: the pool has {num_slots} slots")]
    SlotOutOfRange {
        /// The slot asked for.
        slot: SlotId,
        /// Slots of the pool.
        num_slots: usize,
    },
    /// Nothing is resident in the slot.
    #[error("{slot} holds no adapter")]
    EmptySlot {
        /// The slot asked for.
        slot: SlotId,
    },
    /// An adapter was named, and there is no pool.
    #[error("an adapter was asked for ({what}), and no adapter pool is open")]
    NoPool {
        /// The name or the slot asked for.
        what: String,
    },
}

/// What a resolver needs to know of a pool.
pub trait Residents {
    /// Slots of the pool.
    fn num_slots(&self) -> usize;
    /// The slot of the adapter with this name.
    fn slot_of(&self, name: &str) -> Option<SlotId>;
    /// Whether an adapter is resident in `slot`.
    fn is_resident(&self, slot: SlotId) -> bool;
    /// The slot of the active adapter.
    fn active(&self) -> Option<SlotId>;
}

/// Turns a selection into a route: the one resolver. `pool` is none where no pool is open.
pub fn resolve(selection: &AdapterSelection, pool: Option<&dyn Residents>) -> Result<Route, SelectionError> {
    match (selection, pool) {
        (AdapterSelection::Base, _) | (AdapterSelection::Active, None) => Ok(Route::Base),
        (AdapterSelection::Active, Some(pool)) => Ok(pool.active().map_or(Route::Base, Route::Slot)),
        (AdapterSelection::Named(name), Some(pool)) => match pool.slot_of(name) {
            Some(slot) => Ok(Route::Slot(slot)),
            None => Err(SelectionError::UnknownName { name: name.clone() }),
        },
        (AdapterSelection::Slot(slot), Some(pool)) => {
            let (slot, num_slots) = (*slot, pool.num_slots());
            if slot.index() >= num_slots {
                Err(SelectionError::SlotOutOfRange { slot, num_slots })
            } else if pool.is_resident(slot) {
                Ok(Route::Slot(slot))
            } else {
                Err(SelectionError::EmptySlot { slot })
            }
        }
        (AdapterSelection::Named(name), None) => Err(SelectionError::NoPool { what: format!("name {name:?}") }),
        (AdapterSelection::Slot(slot), None) => Err(SelectionError::NoPool { what: slot.to_string() }),
    }
}
