//! Victim choice: the rule by cases, and its promises on any mixture of slots.

use lora_math::SlotId;
use lora_math::victim::{PoolFull, SlotUse, choose_victim};
use proptest::prelude::*;

use SlotUse::{Busy, Free, Pinned};

fn idle(last_use: u64) -> SlotUse {
    SlotUse::Idle { last_use }
}

#[test]
fn the_rule_by_cases() {
    for (slots, expected) in [
        (vec![Free, Free], 0),
        (vec![idle(0), Free, Free], 1),
        (vec![Busy, Pinned, idle(0), Free], 3),
        (vec![idle(7), idle(3), idle(5)], 1),
        (vec![idle(7), Busy, idle(7)], 0),
        (vec![Pinned, idle(u64::MAX), Busy], 1),
    ] {
        assert_eq!(choose_victim(&slots), Ok(SlotId::new(expected)), "{slots:?}");
    }
}

#[test]
fn a_full_pool_says_what_holds_it() {
    let full = choose_victim(&[Busy, Pinned, Busy]).unwrap_err();
    assert_eq!(full, PoolFull { num_slots: 3, num_busy: 2, num_pinned: 1 });
    assert!(full.is_retryable());
    assert!(!choose_victim(&[Pinned]).unwrap_err().is_retryable());
    assert!(!choose_victim(&[]).unwrap_err().is_retryable());
}

fn any_slot() -> impl Strategy<Value = SlotUse> {
    prop_oneof![
        1 => Just(Free),
        4 => (0u64..6).prop_map(idle),
        4 => Just(Busy),
        2 => Just(Pinned),
    ]
}

proptest! {
    #[test]
    fn a_victim_is_free_first_then_the_oldest_idle(slots in prop::collection::vec(any_slot(), 0..12)) {
        let choice = choose_victim(&slots);
        prop_assert_eq!(choice, choose_victim(&slots));
        match choice {
            Ok(slot) => match slots[slot.index()] {
                Free => prop_assert!(!slots[..slot.index()].contains(&Free)),
                SlotUse::Idle { last_use } => {
                    prop_assert!(!slots.contains(&Free));
                    for (index, other) in slots.iter().enumerate() {
                        if let SlotUse::Idle { last_use: other } = *other {
                            prop_assert!((last_use, slot.index()) <= (other, index));
                        }
                    }
                }
                held => prop_assert!(false, "{slot} is {held:?}"),
            },
            Err(full) => {
                prop_assert_eq!(full.num_busy + full.num_pinned, slots.len());
                prop_assert!(slots.iter().all(|slot| matches!(slot, Busy | Pinned)));
            }
        }
    }
}
