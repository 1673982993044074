//! Loads, evictions and leases from many threads at once.

mod common;

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use common::*;
use lora_math::AdapterSelection;
use lora_pool::{LoraPool, PoolError};

const NUM_NAMES: usize = 6;

/// Loaders go on until readers have read this often, within reason.
const NUM_READS: usize = 500;
const MAX_ROUNDS: usize = 200_000;

#[test]
fn one_name_loaded_by_many_threads_is_loaded_once() {
    let (pool, control) = test_pool(options(2));
    let prepared = full_adapter(1, 8);
    let barrier = Barrier::new(16);
    let ids: Vec<_> = thread::scope(|scope| {
        let load = || {
            barrier.wait();
            pool.load("a", &prepared).unwrap()
        };
        let threads: Vec<_> = (0..16).map(|_| scope.spawn(load)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
    assert_eq!(control.take_events().len(), 3, "one buffer, one copy, one publication");
}

#[test]
fn a_load_that_waited_for_a_failed_one_goes_on_itself() {
    let (pool, control) = test_pool(options(1));
    let prepared = full_adapter(1, 8);
    control.fail_in(2);
    let barrier = Barrier::new(8);
    let results: Vec<_> = thread::scope(|scope| {
        let load = || {
            barrier.wait();
            pool.load("a", &prepared)
        };
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(load)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let id = lease(&pool, "a").id();
    assert_eq!(results.iter().filter(|result| **result == Ok(id)).count(), 7, "{results:?}");
    assert!(results.contains(&Err(PoolError::Memory(INJECTED))));
}

/// More loaders than slots: what a loader gets is leased to it before any other can evict it.
#[test]
fn a_leased_load_is_never_evicted_before_its_loader_has_it() {
    let (pool, _) = test_pool(options(1));
    let adapters: Vec<_> = (0..4).map(small_adapter).collect();
    let barrier = Barrier::new(adapters.len());
    let num_leased = AtomicUsize::new(0);
    thread::scope(|scope| {
        for (index, prepared) in adapters.iter().enumerate() {
            let (pool, barrier, num_leased) = (&pool, &barrier, &num_leased);
            scope.spawn(move || {
                let expected = adapter_pairs(pool.layout(), prepared);
                barrier.wait();
                for _ in 0..300 {
                    match pool.load_leased(&format!("adapter {index}"), prepared) {
                        Ok(lease) => {
                            assert_eq!(device_pairs(pool, &lease), expected);
                            num_leased.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(error) => assert!(error.is_retryable(), "{error}"),
                    }
                }
            });
        }
    });
    assert!(num_leased.into_inner() > 0);
    assert_eq!(pool.snapshot().num_leases(), 0);
}

/// Readers hold leases and look at their slots twice while loaders push adapters through fewer slots than names.
#[test]
fn leased_slots_never_change_under_traffic() {
    let pool = LoraPool::open(&shape(), options(3)).unwrap();
    let adapters: Vec<_> = (0..NUM_NAMES).map(|index| full_adapter(index as u64, 1 + 3 * index % MAX_RANK)).collect();
    let expected: Vec<_> = adapters.iter().map(|prepared| adapter_pairs(pool.layout(), prepared)).collect();
    let names: Vec<String> = (0..NUM_NAMES).map(|index| format!("adapter {index}")).collect();
    let done = AtomicBool::new(false);
    let (num_loads, num_reads, table) = (AtomicUsize::new(0), AtomicUsize::new(0), pool.table());

    thread::scope(|scope| {
        let loaders: Vec<_> = (0..3usize)
            .map(|loader| {
                let (pool, adapters, names) = (&pool, &adapters, &names);
                let (num_loads, num_reads) = (&num_loads, &num_reads);
                scope.spawn(move || {
                    for round in 0..MAX_ROUNDS {
                        if round >= 400 && num_reads.load(Ordering::Relaxed) >= NUM_READS {
                            break;
                        }
                        let index = (round * (loader + 1) + loader) % NUM_NAMES;
                        match pool.load(&names[index], &adapters[index]) {
                            Ok(id) => {
                                assert_eq!(id.content, adapters[index].content());
                                num_loads.fetch_add(1, Ordering::Relaxed);
                            }
                            Err(error) => assert!(error.is_retryable(), "{error}"),
                        }
                        if round % 3 == 0 {
                            match pool.evict(&names[(index + 1) % NUM_NAMES]) {
                                Ok(()) | Err(PoolError::NotFound { .. }) => {}
                                Err(error) => assert!(error.is_retryable(), "{error}"),
                            }
                        }
                        thread::yield_now();
                    }
                })
            })
            .collect();
        for reader in 0..3usize {
            let (pool, names, expected, done, num_reads) = (&pool, &names, &expected, &done, &num_reads);
            scope.spawn(move || {
                let mut turn = reader;
                while !done.load(Ordering::Acquire) {
                    turn += 1;
                    let index = turn % NUM_NAMES;
                    let lease = match pool.acquire(&AdapterSelection::Named(names[index].clone())) {
                        Ok(lease) => lease.unwrap(),
                        Err(_) => {
                            thread::yield_now();
                            continue;
                        }
                    };
                    assert_eq!(lease.name(), names[index]);
                    for _ in 0..2 {
                        assert_eq!(device_pairs(pool, &lease), expected[index], "{lease:?}");
                        thread::yield_now();
                    }
                    num_reads.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        // Readers end also when a loader has failed.
        let results: Vec<_> = loaders.into_iter().map(|loader| loader.join()).collect();
        done.store(true, Ordering::Release);
        assert!(results.iter().all(|result| result.is_ok()));
    });
    assert!(num_loads.into_inner() > 100 && num_reads.into_inner() >= NUM_READS);
    assert_eq!(pool.table(), table);
    let snapshot = pool.snapshot();
    assert_eq!((snapshot.num_leases(), snapshot.loading.len()), (0, 0));
    for resident in &snapshot.residents {
        pool.evict(&resident.name).unwrap();
    }
    assert_eq!(pool.snapshot().num_free, 3);
}
