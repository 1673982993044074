//! Names that move on while generations are in use: replaced, unloaded, and never mixed up.

mod common;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use common::*;
use lora_math::AdapterSelection;
use lora_pool::{LoraPool, PoolError, PoolOptions, Staged};

#[test]
fn a_lease_keeps_its_generation_through_a_replacement() {
    let (pool, _) = test_pool(options(2));
    let (old, new) = (full_adapter(1, 3), full_adapter(2, 5));
    let first = pool.load("a", &old).unwrap();
    let held = lease(&pool, "a");
    let replaced = pool.replace("a", &new, Some(first)).unwrap();
    assert_eq!((replaced.previous, replaced.id.content), (Some(first), new.content()));
    assert_ne!(replaced.id.generation, first.generation);
    // The running request sees its own weights, the next one the new ones.
    assert_eq!(device_pairs(&pool, &held), adapter_pairs(pool.layout(), &old));
    let next = lease(&pool, "a");
    assert_eq!(next.id(), replaced.id);
    assert_eq!(device_pairs(&pool, &next), adapter_pairs(pool.layout(), &new));
    assert_ne!(held.slot(), next.slot());

    // Nobody finds the old one any more, not even by its slot, and it goes with its last lease.
    let by_slot = pool.acquire(&AdapterSelection::Slot(held.slot()));
    assert!(by_slot.is_err(), "{by_slot:?}");
    let snapshot = pool.snapshot();
    assert_eq!((snapshot.residents.len(), snapshot.num_free), (2, 0));
    assert!(snapshot.residents.iter().any(|resident| resident.retired && resident.id == first));
    assert_eq!(snapshot.resident("a").unwrap().id, replaced.id);
    let clone = held.clone();
    drop(held);
    assert_eq!(pool.snapshot().num_free, 0, "a clone is a use");
    drop(clone);
    assert_eq!((pool.snapshot().residents.len(), pool.snapshot().num_free), (1, 1));
}

#[test]
fn a_replacement_needs_the_generation_that_it_names() {
    let (pool, _) = test_pool(options(3));
    let adapters = [full_adapter(1, 3), full_adapter(2, 3), full_adapter(3, 3)];
    let none = pool.replace("a", &adapters[0], Some(pool.load("b", &adapters[1]).unwrap()));
    assert!(matches!(none, Err(PoolError::WrongGeneration { found: None, .. })), "{none:?}");
    let first = pool.replace("a", &adapters[0], None).unwrap();
    assert_eq!(first.previous, None);
    let second = pool.replace("a", &adapters[1], Some(first.id)).unwrap();
    // Two who replace the same generation: one of them loses, and says what is there.
    let late = pool.replace("a", &adapters[2], Some(first.id));
    let expected = PoolError::WrongGeneration { name: "a".into(), expected: first.id, found: Some(second.id) };
    assert_eq!(late.unwrap_err(), expected);
    // The same call again finds its work done.
    let again = pool.replace("a", &adapters[1], Some(first.id)).unwrap();
    assert_eq!((again.id, again.previous), (second.id, Some(second.id)));
    assert_eq!(pool.snapshot().num_leases(), 0);
}

#[test]
fn a_failed_replacement_keeps_the_old_generation() {
    let (pool, control) = test_pool(options(2));
    let (old, new) = (full_adapter(1, 3), full_adapter(2, 5));
    let first = pool.load("a", &old).unwrap();
    for operation in 1..=3 {
        control.fail_in(operation);
        assert!(pool.replace("a", &new, None).is_err());
        control.cancel_failure();
        let held = lease(&pool, "a");
        assert_eq!(held.id(), first, "operation {operation}");
        assert_eq!(device_pairs(&pool, &held), adapter_pairs(pool.layout(), &old));
        assert_eq!(pool.snapshot().num_free, 1);
    }
    // Too large for a slot: refused before anything is taken.
    assert!(matches!(pool.replace("a", &full_adapter(2, MAX_RANK + 1), None), Err(PoolError::TooLarge { .. })));
    // No room beside the one in use: refused, not swapped under it.
    pool.load("b", &small_adapter(7)).unwrap();
    let (a, b) = (lease(&pool, "a"), lease(&pool, "b"));
    assert!(matches!(pool.replace("a", &new, None), Err(PoolError::Full(_))));
    assert_eq!(a.id(), first);
    // An idle generation is no victim for its own successor: the name would point to nothing for a while.
    drop(a);
    assert!(matches!(pool.replace("a", &new, None), Err(PoolError::Full(_))));
    drop(b);
    assert_eq!(pool.replace("a", &new, None).unwrap().previous, Some(first));
}

#[test]
fn a_name_points_to_the_old_generation_until_the_new_one_is_published() {
    let (pool, _) = test_pool(options(2));
    let (old, new) = (full_adapter(1, 3), full_adapter(2, 5));
    let first = pool.load("a", &old).unwrap();
    for publishes in [false, true] {
        let Staged::Landing(landing) = pool.stage_replace("a", &new, None).unwrap() else {
            panic!("it is another one")
        };
        assert_eq!(lease(&pool, "a").id(), first);
        assert!(matches!(pool.unload("a"), Err(PoolError::LoadUnderWay { .. })));
        assert!(matches!(pool.evict("a"), Err(PoolError::LoadUnderWay { .. })));
        assert!(matches!(pool.replace("a", &old, None), Err(PoolError::LoadUnderWay { .. })));
        match publishes {
            true => assert_eq!(landing.publish(&lora_pool::HostStream).unwrap().content, new.content()),
            false => drop(landing),
        }
        let now = lease(&pool, "a").id();
        assert_eq!(now.content, if publishes { new.content() } else { old.content() });
        assert_eq!(pool.snapshot().loading, Vec::<String>::new());
    }
}

#[test]
fn pin_and_active_mark_stay_with_the_name() {
    let (pool, _) = test_pool(options(2));
    let first = pool.load("a", &full_adapter(1, 3)).unwrap();
    pool.pin("a").unwrap();
    pool.set_active("a").unwrap();
    let held = pool.acquire(&AdapterSelection::Active).unwrap().unwrap();
    let second = pool.replace("a", &full_adapter(2, 3), Some(first)).unwrap().id;
    assert_eq!(pool.active().unwrap(), ("a".into(), second));
    assert_eq!(pool.acquire(&AdapterSelection::Active).unwrap().unwrap().id(), second);
    assert_eq!(held.id(), first, "the running request stays where it is");
    let snapshot = pool.snapshot();
    let marks: Vec<_> = snapshot.residents.iter().map(|r| (r.id == second, r.pinned, r.active, r.retired)).collect();
    assert!(marks.contains(&(true, true, true, false)), "{marks:?}");
    assert!(marks.iter().any(|mark| !mark.0 && !mark.2 && mark.3), "{marks:?}");
    drop(held);
    pool.load("b", &small_adapter(3)).unwrap();
    let full = pool.load("c", &small_adapter(4)).unwrap();
    assert_eq!(pool.snapshot().resident("c").unwrap().id, full, "b was the victim, not the pinned a");
    assert_eq!(lease(&pool, "a").id(), second);
}

#[test]
fn unloading_refuses_new_use_at_once_and_waits_for_the_last_lease() {
    let (pool, _) = test_pool(options(1));
    let prepared = full_adapter(1, 3);
    let id = pool.load("a", &prepared).unwrap();
    let held = lease(&pool, "a");
    let unloading = pool.unload("a").unwrap();
    assert_eq!((unloading.id(), unloading.is_done()), (id, false));
    assert!(pool.acquire(&named("a")).is_err());
    assert!(matches!(pool.unload("a"), Err(PoolError::NotFound { .. })));
    assert_eq!(device_pairs(&pool, &held), adapter_pairs(pool.layout(), &prepared));
    let full = pool.load("a", &prepared).unwrap_err();
    assert!(matches!(full, PoolError::Full(_)) && full.is_retryable(), "its slot is still in use: {full}");

    let freed = AtomicBool::new(false);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            unloading.wait();
            assert!(freed.load(Ordering::SeqCst), "the wait ended before the lease");
        });
        thread::sleep(Duration::from_millis(20));
        freed.store(true, Ordering::SeqCst);
        drop(held);
        waiter.join().unwrap();
    });
    assert!(unloading.is_done());
    unloading.wait();
    // The name is free, and a new generation of the same contents is another one.
    let again = pool.load("a", &prepared).unwrap();
    assert_eq!(again.content, id.content);
    assert_ne!(again.generation, id.generation);
    assert!(unloading.is_done(), "it tells of the old generation only");
    // With nobody on it, it is gone at once.
    assert!(pool.unload("a").unwrap().is_done());
    assert_eq!(pool.snapshot().num_free, 1);
}

/// Threads that acquire, check what they hold and release, while others replace and unload the same names: no lease ever
/// shows the weights of another generation, and everything comes back.
#[test]
fn threads_never_see_a_mixture() {
    let pool = LoraPool::open(&shape(), PoolOptions { num_slots: 4, ..options(4) }).unwrap();
    let adapters: Vec<_> = (0..4).map(|seed| full_adapter(seed, 2 + seed as usize)).collect();
    let expected: Vec<_> = adapters.iter().map(|adapter| adapter_pairs(pool.layout(), adapter)).collect();
    let contents: Vec<_> = adapters.iter().map(|adapter| adapter.content()).collect();
    let stop = AtomicBool::new(false);
    let num_checked = AtomicUsize::new(0);
    thread::scope(|scope| {
        for reader in 0..3 {
            let (pool, stop, contents, expected, num_checked) = (&pool, &stop, &contents, &expected, &num_checked);
            scope.spawn(move || {
                while !stop.load(Ordering::SeqCst) {
                    let Ok(Some(held)) = pool.acquire(&named(["a", "b"][reader % 2])) else { continue };
                    let index = contents.iter().position(|content| *content == held.id().content).unwrap();
                    for _ in 0..2 {
                        assert_eq!(device_pairs(pool, &held), expected[index]);
                        thread::yield_now();
                    }
                    num_checked.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        let writers: Vec<_> = ["a", "b"]
            .into_iter()
            .map(|name| {
                let (pool, adapters, num_checked) = (&pool, &adapters, &num_checked);
                scope.spawn(move || {
                    for round in 0.. {
                        // Enough on both sides, whatever the scheduler prefers.
                        if round >= 400 && num_checked.load(Ordering::SeqCst) > 50 {
                            break;
                        }
                        match pool.replace(name, &adapters[round % 4], None) {
                            Ok(_) | Err(PoolError::Full(_)) => {}
                            Err(error) => panic!("{error}"),
                        }
                        if round % 7 == 6 {
                            match pool.unload(name) {
                                Ok(_) | Err(PoolError::NotFound { .. }) => {}
                                Err(error) => panic!("{error}"),
                            }
                        }
                    }
                })
            })
            .collect();
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        stop.store(true, Ordering::SeqCst);
    });
    for name in ["a", "b"] {
        match pool.unload(name) {
            Ok(unloading) => assert!(unloading.is_done()),
            Err(error) => assert!(matches!(error, PoolError::NotFound { .. }), "{error}"),
        }
    }
    assert_eq!((pool.snapshot().num_free, pool.snapshot().num_leases()), (4, 0));
}
