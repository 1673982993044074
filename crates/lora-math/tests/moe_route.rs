//! MoE routes: every combination of row, adapter content and back-end ability, and every join.

use lora_math::moe_route::ExpertAbility::{ActiveOnly, Nothing, PerRow};
use lora_math::moe_route::MoeRoute::{self, Fold, Refuse, Skip};
use lora_math::{Route, SlotId};

#[test]
fn every_row_adapter_and_ability() {
    let (this, other) = (SlotId::new(0), SlotId::new(1));
    let active_this = ActiveOnly { active: Some(this) };
    let active_other = ActiveOnly { active: Some(other) };
    let active_none = ActiveOnly { active: None };
    let (base, row) = (Route::Base, Route::Slot(this));
    for (route, has_expert_deltas, ability, expected) in [
        (base, false, PerRow, Skip),
        (base, false, active_this, Skip),
        (base, false, active_none, Skip),
        (base, false, Nothing, Skip),
        (base, true, PerRow, Skip),
        (base, true, active_this, Skip),
        (base, true, active_none, Skip),
        (base, true, Nothing, Skip),
        (row, false, PerRow, Skip),
        (row, false, active_this, Skip),
        (row, false, active_other, Skip),
        (row, false, active_none, Skip),
        (row, false, Nothing, Skip),
        (row, true, PerRow, Fold),
        (row, true, active_this, Fold),
        (row, true, active_other, Refuse),
        (row, true, active_none, Refuse),
        (row, true, Nothing, Refuse),
    ] {
        let stamped = MoeRoute::stamp(route, has_expert_deltas, ability);
        assert_eq!(stamped, expected, "{route:?}, expert deltas {has_expert_deltas}, {ability:?}");
    }
}

#[test]
fn a_join_is_the_worst() {
    for (a, b, expected) in [
        (Skip, Skip, Skip),
        (Skip, Fold, Fold),
        (Skip, Refuse, Refuse),
        (Fold, Fold, Fold),
        (Fold, Refuse, Refuse),
        (Refuse, Refuse, Refuse),
    ] {
        assert_eq!((a.join(b), b.join(a)), (expected, expected), "{a:?} {b:?}");
    }
    assert_eq!(MoeRoute::join_all([]), Skip);
    assert_eq!(MoeRoute::join_all([Skip, Fold, Skip]), Fold);
    assert_eq!(MoeRoute::join_all([Skip, Refuse, Fold, Skip]), Refuse);
}
