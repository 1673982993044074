//! What the pool asks of its memory, and in which order: the part of the contract that host memory cannot show, since
//! there everything is done when its call returns.

mod common;

use std::thread;

use common::*;
use lora_math::{SiteEntry, SlotId};
use lora_pool::{HostStream, PoolError, Staged};

#[test]
fn an_image_is_copied_first_and_its_row_published_behind_it() {
    let (pool, control) = test_pool(options(2));
    let Staged::Landing(landing) = pool.stage("a", &small_adapter(1)).unwrap() else { panic!() };
    let [Event::HostBuffer, Event::Copy { token, first_target: 0, num_runs: 2, after: None }] =
        control.take_events()[..]
    else {
        panic!()
    };
    assert_eq!((landing.name(), landing.slot()), ("a", SlotId::new(0)));
    assert_refused(pool.acquire(&named("a")), true, "a load of \"a\" is under way");
    assert_refused(pool.evict("a"), true, "a load of \"a\" is under way");
    assert_refused(pool.stage("a", &small_adapter(1)), true, "a load of \"a\" is under way");
    // When the landing ends is its holder's to say: nobody waits for that, least of all the holder.
    assert_refused(pool.load("a", &small_adapter(1)), true, "a load of \"a\" is under way");
    assert_eq!(pool.snapshot().loading, ["a"]);

    let id = landing.publish(&HostStream).unwrap();
    let layout = pool.layout();
    let target_offset = 2 * layout.slot_bytes();
    let num_bytes = layout.num_sites() * SiteEntry::BYTES;
    assert_eq!(control.take_events(), [Event::Publish { token, target_offset, num_bytes }]);
    assert_eq!(lease(&pool, "a").id(), id);

    pool.load("b", &small_adapter(2)).unwrap();
    let events = control.take_events();
    assert!(matches!(events[1], Event::Copy { first_target, .. } if first_target == layout.slot_bytes()));
    assert!(matches!(events[2], Event::Publish { target_offset: row, .. } if row == target_offset + num_bytes));
}

#[test]
fn a_reused_slot_waits_for_the_last_step_launched() {
    let (pool, control) = test_pool(options(1));
    pool.load("a", &small_adapter(1)).unwrap();
    let lease = lease(&pool, "a");
    pool.step_launched(&HostStream).unwrap();
    pool.step_launched(&HostStream).unwrap();
    drop(lease);
    let Some(Event::Fence { fence }) = control.take_events().pop() else { panic!() };
    pool.load("b", &small_adapter(2)).unwrap();
    assert!(matches!(control.take_events()[1], Event::Copy { after: Some(after), .. } if after == fence));
}

/// Two threads tell of steps; the older fence comes back last.
#[test]
fn an_older_fence_never_replaces_a_newer_one() {
    let (pool, control) = test_pool(options(1));
    control.slow_down_a_fence();
    thread::scope(|scope| {
        scope.spawn(|| pool.step_launched(&HostStream).unwrap());
        while !control.has_made_a_fence() {
            thread::yield_now();
        }
        pool.step_launched(&HostStream).unwrap();
    });
    let [Event::Fence { fence: older }, Event::Fence { fence: newer }] = control.take_events()[..] else { panic!() };
    assert!(older < newer);
    pool.load("a", &small_adapter(1)).unwrap();
    assert!(matches!(control.take_events()[1], Event::Copy { after: Some(after), .. } if after == newer));
}

#[test]
fn no_slot_is_written_while_no_fence_stands_behind_a_step() {
    let (pool, control) = test_pool(options(2));
    pool.load("a", &small_adapter(1)).unwrap();
    let held = lease(&pool, "a");
    pool.step_launched(&HostStream).unwrap();
    control.fail_in(1);
    assert_eq!(pool.step_launched(&HostStream), Err(PoolError::Memory(INJECTED)));
    drop(held);
    pool.evict("a").unwrap();
    control.take_events();
    let empty = pool.snapshot();
    for name in ["a", "b"] {
        let expected = "no fence stands behind the last step, so no slot can be written until step_launched succeeds";
        assert_refused(pool.load(name, &small_adapter(2)), true, expected);
        assert_refused(pool.stage(name, &small_adapter(2)), true, expected);
    }
    assert_eq!((control.take_events().len(), pool.snapshot()), (0, empty));

    pool.step_launched(&HostStream).unwrap();
    let Some(Event::Fence { fence }) = control.take_events().pop() else { panic!() };
    pool.load("b", &small_adapter(2)).unwrap();
    assert!(matches!(control.take_events()[1], Event::Copy { after: Some(after), .. } if after == fence));
}

#[test]
fn a_load_given_up_leaves_slot_and_name_free() {
    let (pool, control) = test_pool(options(1));
    let empty = pool.snapshot();
    drop(pool.stage("a", &small_adapter(1)).unwrap());
    assert_eq!(pool.snapshot(), empty);
    for failing in 1..=3 {
        control.fail_in(failing);
        let error = pool.load("a", &full_adapter(2, 8)).unwrap_err();
        assert!(matches!(error, PoolError::Memory(_)), "{error}");
        assert_eq!(error.is_retryable(), failing == 1, "only an allocation is worth a retry");
        assert_eq!(pool.snapshot(), empty);
        assert_refused(pool.acquire(&named("a")), false, "no adapter named \"a\" is loaded");
    }
    pool.load("a", &small_adapter(3)).unwrap();
    let lease = lease(&pool, "a");
    assert_eq!(device_pairs(&pool, &lease), adapter_pairs(pool.layout(), &small_adapter(3)));
}

#[test]
fn nothing_is_packed_for_a_full_pool_and_no_victim_leaves_for_a_failed_pack() {
    let (pool, control) = test_pool(options(1));
    pool.load("a", &small_adapter(1)).unwrap();
    let held = lease(&pool, "a");
    control.take_events();
    assert!(pool.load("b", &small_adapter(2)).unwrap_err().is_retryable());
    assert_eq!(control.take_events(), []);
    drop(held);

    let before = pool.snapshot();
    control.fail_in(1);
    pool.load("b", &small_adapter(2)).unwrap_err();
    assert_eq!(pool.snapshot(), before);
    pool.load("b", &small_adapter(2)).unwrap();
}
