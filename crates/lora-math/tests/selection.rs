//! Selections: every kind against no pool, a pool with an active adapter, and one without.

use lora_math::selection::{Residents, SelectionError, resolve};
use lora_math::{AdapterSelection, Route, SlotId};

/// Three slots; "red" lives in slot 0, "blue" in slot 2.
struct Pool {
    active: Option<SlotId>,
}

impl Residents for Pool {
    fn num_slots(&self) -> usize {
        3
    }

    fn slot_of(&self, name: &str) -> Option<SlotId> {
        match name {
            "red" => Some(SlotId::new(0)),
            "blue" => Some(SlotId::new(2)),
            _ => None,
        }
    }

    fn is_resident(&self, slot: SlotId) -> bool {
        slot != SlotId::new(1)
    }

    fn active(&self) -> Option<SlotId> {
        self.active
    }
}

#[test]
fn every_selection_and_pool() {
    let slot = |index| Route::Slot(SlotId::new(index));
    let named = |name: &str| AdapterSelection::Named(name.to_owned());
    let in_slot = |index| AdapterSelection::Slot(SlotId::new(index));
    let no_pool = |what: &str| Err(SelectionError::NoPool { what: what.to_owned() });
    let out_of_range = |index| Err(SelectionError::SlotOutOfRange { slot: SlotId::new(index), num_slots: 3 });
    let with_active = Pool { active: Some(SlotId::new(2)) };
    let without_active = Pool { active: None };
    let unknown = Err(SelectionError::UnknownName { name: "green".to_owned() });
    let empty = Err(SelectionError::EmptySlot { slot: SlotId::new(1) });

    // Selection, then its outcome without a pool, with an active adapter, with a pool and none active.
    for (selection, without, active, inactive) in [
        (AdapterSelection::Base, Ok(Route::Base), Ok(Route::Base), Ok(Route::Base)),
        (AdapterSelection::Active, Ok(Route::Base), Ok(slot(2)), Ok(Route::Base)),
        (named("red"), no_pool("name \"red\""), Ok(slot(0)), Ok(slot(0))),
        (named("blue"), no_pool("name \"blue\""), Ok(slot(2)), Ok(slot(2))),
        (named("green"), no_pool("name \"green\""), unknown.clone(), unknown),
        (in_slot(0), no_pool("slot 0"), Ok(slot(0)), Ok(slot(0))),
        (in_slot(1), no_pool("slot 1"), empty.clone(), empty),
        (in_slot(2), no_pool("slot 2"), Ok(slot(2)), Ok(slot(2))),
        (in_slot(3), no_pool("slot 3"), out_of_range(3), out_of_range(3)),
        (in_slot(u32::MAX), no_pool("slot 4294967295"), out_of_range(u32::MAX), out_of_range(u32::MAX)),
    ] {
        assert_eq!(resolve(&selection, None), without, "{selection:?} without a pool");
        assert_eq!(resolve(&selection, Some(&with_active)), active, "{selection:?} with an active adapter");
        assert_eq!(resolve(&selection, Some(&without_active)), inactive, "{selection:?} with none active");
    }
    assert_eq!(AdapterSelection::default(), AdapterSelection::Base);
}
