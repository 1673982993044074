//! Images that stay on the host: found by contents, bounded in bytes, never mixed up.

mod common;

use std::thread;

use common::*;
use lora_adapter::PreparedAdapter;
use lora_math::ContentDigest;
use lora_pool::{HostStream, HostTierSnapshot, LoraPool, PoolError, PoolOptions, Staged};

/// Bytes of a full adapter's image at rank 8 in f32, what stands beside it included.
fn image_bytes() -> usize {
    let pool = LoraPool::open(&shape(), with_host_bytes(usize::MAX)).unwrap();
    pool.load("a", &full_adapter(1, 8)).unwrap();
    pool.host_tier_snapshot().num_bytes
}

fn with_host_bytes(host_bytes: usize) -> PoolOptions {
    PoolOptions { host_bytes, ..options(1) }
}

/// Publishes an image that the tier must hold.
fn promote(pool: &std::sync::Arc<LoraPool>, name: &str, content: ContentDigest) {
    let Some(Staged::Landing(landing)) = pool.stage_kept(name, content).unwrap() else { panic!("{name} is not kept") };
    landing.publish(&HostStream).unwrap();
}

fn assert_holds(pool: &std::sync::Arc<LoraPool>, name: &str, adapter: &PreparedAdapter) {
    let lease = lease(pool, name);
    assert_eq!(device_pairs(pool, &lease), adapter_pairs(pool.layout(), adapter));
    assert_eq!(lease.id().content, adapter.content());
}

#[test]
fn what_left_its_slot_comes_back_without_its_files() {
    let pool = LoraPool::open(&shape(), with_host_bytes(usize::MAX)).unwrap();
    let (a, b) = (full_adapter(1, 8), small_adapter(2));
    pool.load("a", &a).unwrap();
    pool.load("b", &b).unwrap(); // takes the only slot
    promote(&pool, "a", a.content());
    assert_holds(&pool, "a", &a);
    // Under another name, and over a smaller one: a name says nothing of contents.
    promote(&pool, "c", b.content());
    assert_holds(&pool, "c", &b);
    promote(&pool, "a", a.content());
    assert_holds(&pool, "a", &a);
    // Resident already: nothing is copied.
    assert!(matches!(pool.stage_kept("a", a.content()).unwrap(), Some(Staged::Resident(_))));
    // A name with other contents is not overwritten.
    assert!(matches!(pool.stage_kept("a", b.content()), Err(PoolError::NameTaken { .. })));
    assert!(pool.stage_kept("d", small_adapter(9).content()).unwrap().is_none());
    assert_eq!(pool.stage_kept("", a.content()).unwrap_err(), PoolError::EmptyName);
    let snapshot = pool.host_tier_snapshot();
    assert_eq!((snapshot.num_images, snapshot.hits, snapshot.misses), (2, 5, 3));
}

#[test]
fn a_load_of_kept_contents_does_not_pack() {
    let (pool, control) = test_pool(with_host_bytes(usize::MAX));
    let adapter = full_adapter(1, 8);
    pool.load("a", &adapter).unwrap();
    pool.evict("a").unwrap();
    control.take_events();
    pool.load("a", &adapter).unwrap();
    let events = control.take_events();
    assert!(matches!(events[..], [Event::Copy { .. }, Event::Publish { .. }]), "{events:?}");
}

#[test]
fn bytes_are_bounded_and_the_oldest_use_goes_first() {
    let one = image_bytes();
    let pool = LoraPool::open(&shape(), with_host_bytes(2 * one)).unwrap();
    let adapters: Vec<_> = (1..=3).map(|seed| full_adapter(seed, 8)).collect();
    let kept = |index: usize| pool.stage_kept("probe", adapters[index].content()).unwrap().is_some();
    for (index, adapter) in adapters[..2].iter().enumerate() {
        pool.load(&index.to_string(), adapter).unwrap();
    }
    assert!(kept(0), "and is now the last one used");
    pool.load("2", &adapters[2]).unwrap();
    let HostTierSnapshot { num_bytes, num_images, max_bytes, .. } = pool.host_tier_snapshot();
    assert_eq!((num_bytes, num_images, max_bytes), (2 * one, 2, 2 * one));
    assert_eq!([kept(0), kept(1), kept(2)], [true, false, true]);

    // Larger than the tier: not kept, and nothing leaves for it.
    let pool = LoraPool::open(&shape(), with_host_bytes(one)).unwrap();
    pool.load("0", &adapters[0]).unwrap();
    pool.load("large", &full_adapter(4, 16)).unwrap();
    let HostTierSnapshot { num_bytes, num_images, .. } = pool.host_tier_snapshot();
    assert_eq!((num_bytes, num_images), (one, 1));
    // Loading it worked all the same.
    assert_holds(&pool, "large", &full_adapter(4, 16));
}

#[test]
fn without_bytes_nothing_is_kept() {
    let pool = LoraPool::open(&shape(), options(1)).unwrap();
    pool.load("a", &small_adapter(1)).unwrap();
    let expected = HostTierSnapshot { misses: 1, ..HostTierSnapshot::default() };
    assert_eq!(pool.host_tier_snapshot(), expected);
    pool.evict("a").unwrap();
    assert!(pool.stage_kept("a", small_adapter(1).content()).unwrap().is_none());
}

#[test]
fn a_failed_load_keeps_its_image_for_the_next_try() {
    let (pool, control) = test_pool(with_host_bytes(usize::MAX));
    let adapter = full_adapter(1, 8);
    for failing in 2..=3 {
        let pool = pool.clone();
        control.fail_in(if failing == 2 { 2 } else { failing - 1 });
        pool.load("a", &adapter).unwrap_err();
        assert!(pool.snapshot().residents.is_empty());
    }
    control.take_events();
    pool.load("a", &adapter).unwrap();
    assert!(!control.take_events().contains(&Event::HostBuffer), "packed once");
    let lease = lease(&pool, "a");
    assert_eq!(device_pairs(&pool, &lease), adapter_pairs(pool.layout(), &adapter));
}

#[test]
fn threads_that_load_and_promote_at_once_never_mix_contents() {
    let one = image_bytes();
    let pool = LoraPool::open(&shape(), PoolOptions { host_bytes: 3 * one, ..options(3) }).unwrap();
    let adapters: Vec<_> = (1..=6).map(|seed| full_adapter(seed, 8)).collect();
    thread::scope(|scope| {
        for worker in 0..4usize {
            let (pool, adapters) = (&pool, &adapters);
            scope.spawn(move || {
                for round in 0..60 {
                    let index = (worker * 7 + round * 5) % adapters.len();
                    let (name, adapter) = (index.to_string(), &adapters[index]);
                    let staged = match pool.stage_kept(&name, adapter.content()) {
                        Ok(None) => pool.stage(&name, adapter),
                        Ok(Some(staged)) => Ok(staged),
                        Err(error) => Err(error),
                    };
                    let lease = match staged {
                        Ok(Staged::Resident(lease)) => lease,
                        Ok(Staged::Landing(landing)) => landing.publish_leased(&HostStream).unwrap(),
                        Err(error) => {
                            assert!(error.is_retryable(), "{error}");
                            continue;
                        }
                    };
                    assert_eq!(device_pairs(pool, &lease), adapter_pairs(pool.layout(), adapter));
                }
            });
        }
    });
    let snapshot = pool.host_tier_snapshot();
    assert!(snapshot.num_bytes <= 3 * one && snapshot.num_images <= 3);
    assert_eq!(snapshot.num_bytes, snapshot.num_images * one);
    assert!(snapshot.hits > 0 && snapshot.misses >= 6);
}
