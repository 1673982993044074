//! Loads, evictions and reloads, one at a time: what stands in a slot is the adapter that its name names, and
//! no trace of what stood there before can be reached.

mod common;

use std::sync::Arc;

use common::*;
use lora_adapter::{Adapter, LoraPair, Matrix, prepare};
use lora_math::scaling::ScalingRule;
use lora_math::shape::MlpSize;
use lora_math::{
    AdapterSelection, Features, LayerShape, LayoutError, ModelShape, Module, ModuleSet, Site, SiteEntry, SlotDtype,
    SlotId,
};
use lora_pool::{
    FixedStride, HostMemory, HostStream, LoraPool, PoolCounters, PoolError, PoolOptions, Staged, packed_layout,
};

fn host_pool(num_slots: usize) -> Arc<LoraPool<HostMemory>> {
    LoraPool::open(&shape(), options(num_slots)).unwrap()
}

#[test]
fn a_loaded_adapter_is_read_through_the_table() {
    let pool = host_pool(3);
    for (name, prepared) in
        [("full", full_adapter(1, MAX_RANK)), ("odd", full_adapter(2, 3)), ("one", small_adapter(3))]
    {
        let id = pool.load(name, &prepared).unwrap();
        let lease = lease(&pool, name);
        assert_eq!((lease.id(), lease.name(), id.content), (id, name, prepared.content()));
        assert_eq!(device_entries(&pool, &lease), pool.entries(&lease).unwrap());
        assert_eq!(device_pairs(&pool, &lease), adapter_pairs(pool.layout(), &prepared));
    }
}

#[test]
fn the_table_stays_where_it_is() {
    let pool = host_pool(2);
    let table = pool.table();
    assert_eq!((table.num_slots, table.num_sites, table.dtype), (2, 17, SlotDtype::F32));
    assert_eq!(table.address % 64, 0);
    let mut starts = Vec::new();
    for round in 0..10 {
        for name in ["a", "b"] {
            pool.load(name, &full_adapter(round, 8)).unwrap();
            assert_eq!(pool.table(), table);
            let lease = lease(&pool, name);
            let entry = pool.entries(&lease).unwrap()[0];
            assert_eq!(entry.a % 64, 0);
            starts.push((lease.slot(), entry.a));
        }
        pool.evict("a").unwrap();
        pool.evict("b").unwrap();
    }
    // Fixed stride: the address of a slot follows from its number.
    let base = starts[0].1;
    for (slot, start) in starts {
        assert_eq!(start, base + pool.layout().slot_base_offset(slot).unwrap() as u64);
    }
}

#[test]
fn a_smaller_adapter_in_a_used_slot_shows_nothing_of_the_larger_one() {
    let (large, small) = (full_adapter(1, MAX_RANK), small_adapter(2));
    let fresh = {
        let (pool, _) = test_pool(options(1));
        pool.load("small", &small).unwrap();
        device_pairs(&pool, &lease(&pool, "small"))
    };
    let (pool, _) = test_pool(options(1));
    for _ in 0..2 {
        pool.load("large", &large).unwrap();
        assert_eq!(device_pairs(&pool, &lease(&pool, "large")), adapter_pairs(pool.layout(), &large));
        pool.load("small", &small).unwrap();
        let lease = lease(&pool, "small");
        assert_eq!(device_pairs(&pool, &lease), fresh);
        let adapted: Vec<SiteEntry> =
            device_entries(&pool, &lease).into_iter().filter(|entry| *entry != SiteEntry::EMPTY).collect();
        assert_eq!(adapted.len(), 1);
        assert_eq!((adapted[0].rank, adapted[0].scaling), (4, 2.0));
        assert_eq!(pool.scaling(lease.slot(), Site::layer(0, Module::QProj)), 2.0);
        assert_eq!(pool.scaling(lease.slot(), Site::layer(0, Module::KProj)), 0.0);
        assert_eq!(pool.scaling(lease.slot(), Site::layer(9, Module::QProj)), 0.0);
        assert_eq!(pool.scaling(SlotId::new(1), Site::layer(0, Module::QProj)), 0.0);
    }
    assert_eq!(pool.acquire(&AdapterSelection::Base).unwrap().map(|lease| lease.slot()), None);
}

#[test]
fn only_real_bytes_are_copied_and_poison_is_out_of_reach() {
    let (pool, control) = test_pool(options(1));
    let prepared = full_adapter(1, 3);
    pool.load("a", &prepared).unwrap();
    let lease = lease(&pool, "a");
    let pairs = device_pairs(&pool, &lease);
    assert_eq!(pairs, adapter_pairs(pool.layout(), &prepared));
    assert!(
        pairs
            .iter()
            .flatten()
            .all(|(scaling, a, b)| { scaling.is_finite() && a.iter().chain(b).all(|value| value.is_finite()) })
    );
    // Behind the real rank of every A and B the poison still stands.
    let bytes = pool.read_slot(&lease).unwrap();
    for span in pool.layout().spans() {
        for (offset, num_bytes, width) in [
            (span.a_offset, span.a_bytes, span.features.in_features),
            (span.b_offset, span.b_bytes, span.features.out_features),
        ] {
            let real = (3 * width * 4).next_multiple_of(64);
            assert!(bytes[offset..offset + num_bytes][real..].iter().all(|&byte| byte == 0xFF), "{}", span.site);
        }
    }
    drop(lease);

    // At full rank an image is one run.
    control.take_events();
    pool.evict("a").unwrap();
    pool.load("full", &full_adapter(2, MAX_RANK)).unwrap();
    let events = control.take_events();
    assert!(matches!(events[1], Event::Copy { num_runs: 1, first_target: 0, .. }), "{events:?}");
}

#[test]
fn an_evicted_adapter_comes_back_to_the_bit() {
    let pool = host_pool(1);
    let adapters = [("a", full_adapter(1, 4)), ("b", full_adapter(2, MAX_RANK)), ("c", small_adapter(3))];
    let mut first: [Option<(Vec<SiteEntry>, _)>; 3] = [None, None, None];
    let mut generations = Vec::new();
    for index in [0, 1, 0, 1, 0, 2, 0, 2, 1, 0] {
        let (name, prepared) = &adapters[index];
        let id = pool.load(name, prepared).unwrap();
        generations.push(id.generation);
        let lease = lease(&pool, name);
        let seen = (device_entries(&pool, &lease), device_pairs(&pool, &lease));
        assert_eq!(seen.1, adapter_pairs(pool.layout(), prepared));
        assert_eq!(*first[index].get_or_insert_with(|| seen.clone()), seen, "{name}");
    }
    assert!(generations.is_sorted_by(|a, b| a < b), "{generations:?}");
}

#[test]
fn a_hundred_rounds_leave_nothing_behind() {
    let pool = host_pool(2);
    let start = pool.snapshot();
    for round in 0..100 {
        pool.load("x", &full_adapter(round, 1 + round as usize % MAX_RANK)).unwrap();
        if round % 2 == 0 {
            drop(lease(&pool, "x"));
        }
        pool.evict("x").unwrap();
        assert_eq!(pool.snapshot(), start);
    }
    pool.load("y", &small_adapter(1)).unwrap();
    pool.load("z", &small_adapter(2)).unwrap();
    assert_eq!((pool.snapshot().num_free, pool.snapshot().residents.len()), (0, 2));
}

#[test]
fn the_same_contents_again_are_the_same_generation() {
    let (pool, control) = test_pool(options(2));
    let id = pool.load("a", &full_adapter(1, 4)).unwrap();
    control.take_events();
    assert_eq!(pool.load("a", &full_adapter(1, 4)).unwrap(), id);
    assert!(matches!(pool.stage("a", &full_adapter(1, 4)).unwrap(), Staged::Resident(same) if same.id() == id));
    assert_eq!(control.take_events(), []);

    let other = full_adapter(2, 4);
    let refused = pool.load("a", &other).unwrap_err();
    assert_eq!(refused, PoolError::NameTaken { name: "a".to_owned(), resident: id, offered: other.content() });
    assert!(!refused.is_retryable());
    // The same contents under another name are another residence.
    let twin = pool.load("b", &full_adapter(1, 4)).unwrap();
    assert_eq!(twin.content, id.content);
    assert_ne!(twin.generation, id.generation);
}

#[test]
fn names_are_compared_byte_by_byte() {
    let pool = host_pool(4);
    for name in ["a", "A", "a ", "а"] {
        assert_refused(pool.acquire(&named(name)), false, &format!("no adapter named {name:?} is loaded"));
        pool.load(name, &small_adapter(1)).unwrap();
    }
    assert_eq!(pool.snapshot().residents.len(), 4);
    assert_refused(pool.load("", &small_adapter(1)), false, "an adapter's name must not be empty");
    assert_refused(
        pool.load(&"n".repeat(10_000), &small_adapter(1)),
        false,
        "an adapter's name has 10000 bytes; at most 256 are allowed",
    );
    pool.evict("a").unwrap();
    assert_refused(pool.acquire(&named("a")), false, "no adapter named \"a\" is loaded");
    assert_eq!(pool.load(&"n".repeat(256), &small_adapter(1)).unwrap(), lease(&pool, &"n".repeat(256)).id());
}

#[test]
fn selections_resolve_as_one() {
    let pool = host_pool(2);
    assert_eq!(pool.acquire(&AdapterSelection::Active).unwrap().map(|lease| lease.id()), None);
    let id = pool.load("a", &small_adapter(1)).unwrap();
    assert_eq!(pool.acquire(&AdapterSelection::Slot(SlotId::new(0))).unwrap().unwrap().id(), id);
    assert_refused(pool.acquire(&AdapterSelection::Slot(SlotId::new(1))), false, "slot 1 holds no adapter");
    assert_refused(
        pool.acquire(&AdapterSelection::Slot(SlotId::new(2))),
        false,
        "slot 2 is out of range: the pool has 2 slots",
    );
    assert_refused(pool.set_active("b"), false, "no adapter named \"b\" is resident");
    assert_eq!(pool.set_active("a").unwrap(), id);
    assert_eq!(pool.active(), Some(("a".into(), id)));
    let active = pool.acquire(&AdapterSelection::Active).unwrap().unwrap();
    assert_eq!((active.id(), active.slot()), (id, SlotId::new(0)));
    let other = pool.load("b", &small_adapter(2)).unwrap();
    pool.set_active("b").unwrap();
    assert_eq!(active.id(), id, "a lease stays where it is");
    assert_eq!(pool.acquire(&AdapterSelection::Active).unwrap().unwrap().id(), other);
    pool.clear_active();
    assert_eq!(pool.acquire(&AdapterSelection::Active).unwrap().map(|lease| lease.id()), None);
}

#[test]
fn the_active_adapter_is_neither_victim_nor_evicted() {
    let pool = host_pool(1);
    pool.load("a", &small_adapter(1)).unwrap();
    pool.set_active("a").unwrap();
    assert_refused(
        pool.evict("a"),
        false,
        "\"a\" is the active adapter: make another active, or none, before it is evicted",
    );
    assert_refused(
        pool.load("b", &small_adapter(2)),
        false,
        "no slot is free or idle: of 1 slots 0 are in use and 1 are pinned",
    );
    pool.clear_active();
    pool.load("b", &small_adapter(2)).unwrap();
    assert_refused(pool.evict("a"), false, "no adapter named \"a\" is resident");
}

#[test]
fn victims_are_idle_unpinned_and_least_recently_used() {
    let pool = host_pool(3);
    for (name, seed) in [("a", 1), ("b", 2), ("c", 3)] {
        pool.load(name, &small_adapter(seed)).unwrap();
    }
    let on_b = lease(&pool, "b");
    drop(lease(&pool, "a"));
    pool.load("d", &small_adapter(4)).unwrap();
    assert_eq!(pool.snapshot().resident("d").unwrap().slot, SlotId::new(2), "c was used longest ago");
    pool.pin("a").unwrap();
    pool.load("e", &small_adapter(5)).unwrap();
    assert_eq!(pool.snapshot().resident("e").unwrap().slot, SlotId::new(2), "a is pinned, b is leased");
    pool.pin("e").unwrap();
    assert_refused(
        pool.load("f", &small_adapter(6)),
        true,
        "no slot is free or idle: of 3 slots 1 are in use and 2 are pinned",
    );
    let twin = on_b.clone();
    drop(on_b);
    assert_refused(pool.evict("b"), true, "\"b\" is in use: 1 leases");
    drop(twin);
    pool.load("f", &small_adapter(6)).unwrap();
    assert_eq!(pool.snapshot().resident("f").unwrap().slot, SlotId::new(1));
    pool.unpin("a").unwrap();
    pool.load("g", &small_adapter(7)).unwrap();
    assert_eq!(pool.snapshot().resident("g").unwrap().slot, SlotId::new(0));
    pool.evict("e").unwrap();
}

#[test]
fn an_adapter_that_does_not_fit_changes_nothing() {
    let (pool, control) = test_pool(PoolOptions {
        modules: ModuleSet::from_iter([Module::QProj, Module::DownProj]),
        max_rank: 8,
        dtype: SlotDtype::F16,
        ..options(1)
    });
    pool.load("victim", &small_adapter(1)).unwrap();
    let before = pool.snapshot();
    control.take_events();

    let q_proj = Site::layer(0, Module::QProj);
    let outside = adapter(2, &[(q_proj, 2), (Site::layer(1, Module::UpProj), 2), (Site::layer(2, Module::KProj), 2)]);
    assert_refused(
        pool.load("b", &outside),
        false,
        "the adapter has 2 sites that this pool's slots do not cover, the first is layer 1 up_proj",
    );
    let large = adapter(2, &[(q_proj, 9), (Site::layer(1, Module::DownProj), 12), (Site::layer(2, Module::QProj), 8)]);
    assert_refused(
        pool.load("b", &large),
        false,
        "rank 12 at layer 1 down_proj is larger than the pool's max_rank 8 (2 sites are too large)",
    );

    let mlp = MlpSize { hidden_size: 8, intermediate_size: 24 };
    let other_model = ModelShape::uniform(8, 32, 1, LayerShape::new().with_mlp(mlp)).unwrap();
    let pair = |rows, value| {
        let a = Matrix::from_f32(1, rows, &vec![value; rows]).unwrap();
        let b = Matrix::from_f32(8, 1, &[1.0; 8]).unwrap();
        LoraPair::new(a, b, 1.0, ScalingRule::Standard).unwrap()
    };
    let foreign = Adapter::from_pairs([(Site::layer(0, Module::DownProj), pair(24, 1.0))]).unwrap();
    assert!(matches!(
        pool.load("b", &prepare(foreign, &other_model).unwrap()),
        Err(PoolError::FeatureMismatch { expected, found, .. })
            if (expected.in_features, found.in_features) == (20, 24)
    ));
    assert_eq!(control.take_events(), [], "refused before anything was packed");

    let huge = Adapter::from_pairs([(Site::layer(1, Module::DownProj), pair(20, 70_000.0))]).unwrap();
    let error = pool.load("b", &prepare(huge, &shape()).unwrap()).unwrap_err();
    assert!(matches!(error, PoolError::Narrowing { .. }) && !error.is_retryable(), "{error}");
    assert!(error.to_string().contains("70000"), "{error}");

    assert_eq!(pool.snapshot(), before);
    pool.load("b", &small_adapter(2)).unwrap();
}

#[test]
fn a_lease_that_comes_with_the_load_keeps_the_adapter() {
    let (pool, control) = test_pool(options(1));
    let first = pool.load_leased("a", &small_adapter(1)).unwrap();
    assert_eq!(pool.snapshot().resident("a").unwrap().num_leases, 1);
    assert_refused(
        pool.load("b", &small_adapter(2)),
        true,
        "no slot is free or idle: of 1 slots 1 are in use and 0 are pinned",
    );
    let again = pool.load_leased("a", &small_adapter(1)).unwrap();
    let Staged::Resident(staged) = pool.stage("a", &small_adapter(1)).unwrap() else { panic!() };
    assert_eq!((first.id(), pool.snapshot().num_leases()), (again.id(), 3));
    drop((first, again));
    assert_refused(pool.evict("a"), true, "\"a\" is in use: 1 leases");
    drop(staged);
    assert_eq!(pool.snapshot().num_leases(), 0);

    let Staged::Landing(landing) = pool.stage("b", &small_adapter(2)).unwrap() else { panic!() };
    let lease = landing.publish_leased(&HostStream).unwrap();
    assert_eq!((lease.name(), device_pairs(&pool, &lease)), ("b", adapter_pairs(pool.layout(), &small_adapter(2))));
    assert_refused(pool.evict("b"), true, "\"b\" is in use: 1 leases");
    drop(lease);
    pool.evict("b").unwrap();
    for failing in 1..=3 {
        control.fail_in(failing);
        assert!(matches!(pool.load_leased("c", &small_adapter(3)), Err(PoolError::Memory(_))));
        assert_eq!((pool.snapshot().num_free, pool.snapshot().num_leases()), (1, 0));
    }
}

/// What is told before a pool is opened is what it then takes.
#[test]
fn sizes_are_known_without_a_pool() {
    let (pool, _) = test_pool(options(3));
    let sizes = FixedStride::new(pool.layout().clone(), 3).unwrap();
    let mut allocated = 0;
    LoraPool::open_in(&shape(), options(3), |num_bytes| {
        allocated = num_bytes;
        HostMemory::allocate(num_bytes)
    })
    .unwrap();
    assert_eq!((sizes.memory_bytes(), sizes.bytes_per_slot() * 3), (allocated, allocated));
    assert_eq!(sizes.table_bytes(), 3 * 17 * SiteEntry::BYTES);

    for (name, prepared) in [("full", full_adapter(1, 5)), ("small", small_adapter(2))] {
        pool.load(name, &prepared).unwrap();
        let image_bytes = packed_layout(&prepared, pool.layout()).unwrap().image_bytes();
        assert_eq!(pool.snapshot().resident(name).unwrap().image_bytes, image_bytes);
    }
    let too_large = packed_layout(&full_adapter(1, MAX_RANK + 1), pool.layout());
    assert!(matches!(too_large, Err(PoolError::TooLarge { num_sites: 17, .. })), "{too_large:?}");
}

/// Experts have no place in a slot, embedding and head only where the pool was opened for them: an adapter with more than
/// its slot covers would be applied in part.
#[test]
fn sites_that_a_slot_does_not_cover_are_refused_by_name() {
    let mlp = MlpSize { hidden_size: 8, intermediate_size: 20 };
    let shape = ModelShape::uniform(8, 32, 1, LayerShape::new().with_mlp(mlp).with_experts(2, mlp)).unwrap();
    let module = Module::ExpertUpProj;
    let refused = LoraPool::open(&shape, PoolOptions { modules: ModuleSet::DENSE.with(module), ..options(1) });
    assert_eq!(refused.unwrap_err(), PoolError::Layout(LayoutError::PartNotPlaced { module }));
    let pool = LoraPool::open(&shape, options(1)).unwrap();
    for (site, name) in [
        (Site::Expert { layer: 0, expert: 1, module: Module::ExpertUpProj }, "layer 0 expert 1 experts.up_proj"),
        (Site::Vocabulary { module: Module::EmbedTokens }, "embed_tokens"),
        (Site::Vocabulary { module: Module::LmHead }, "lm_head"),
    ] {
        let pair = |site| {
            let Features { in_features, out_features } = shape.features(site).unwrap();
            let a = Matrix::from_f32(1, in_features, &vec![0.5; in_features]).unwrap();
            let b = Matrix::from_f32(out_features, 1, &vec![0.5; out_features]).unwrap();
            (site, LoraPair::new(a, b, 1.0, ScalingRule::Standard).unwrap())
        };
        let adapter = Adapter::from_pairs([Site::layer(0, Module::UpProj), site].map(pair)).unwrap();
        assert_refused(
            pool.load("a", &prepare(adapter, &shape).unwrap()),
            false,
            &format!("the adapter has 1 sites that this pool's slots do not cover, the first is {name}"),
        );
        assert_eq!(pool.snapshot().num_free, 1);
    }
}

#[test]
fn slots_hold_the_pools_dtype() {
    for (dtype, to_bytes) in [
        (SlotDtype::F16, (|value| half::f16::from_f32(value).to_le_bytes()) as fn(f32) -> [u8; 2]),
        (SlotDtype::Bf16, |value| half::bf16::from_f32(value).to_le_bytes()),
    ] {
        let pool = LoraPool::open(&shape(), PoolOptions { dtype, ..options(1) }).unwrap();
        let prepared = small_adapter(1);
        pool.load("a", &prepared).unwrap();
        let lease = lease(&pool, "a");
        let bytes = pool.read_slot(&lease).unwrap();
        let span = pool.layout().spans()[0];
        let pair = prepared.pair(span.site).unwrap();
        let a: Vec<u8> = pair.a().to_f32().into_iter().flat_map(to_bytes).collect();
        let b: Vec<u8> = pair.b().to_f32().into_iter().flat_map(to_bytes).collect();
        assert_eq!(bytes[span.a_offset..][..a.len()], a);
        assert_eq!(bytes[span.b_offset..][..b.len()], b);
        assert_eq!(pool.table().dtype, dtype);
    }
}

#[test]
fn leases_belong_to_one_pool_and_keep_its_memory() {
    let (pool, other) = (host_pool(1), host_pool(1));
    for pool in [&pool, &other] {
        pool.load("a", &small_adapter(1)).unwrap();
    }
    let lease = lease(&pool, "a");
    assert!(lease.belongs_to(&pool) && lease.clone().belongs_to(&pool) && !lease.belongs_to(&other));
    assert_refused(other.entries(&lease), false, "the lease on \"a\" belongs to another pool");
    assert_refused(other.read_slot(&lease), false, "the lease on \"a\" belongs to another pool");
    let entries = pool.entries(&lease).unwrap();
    let seen = Arc::downgrade(&pool);
    drop(pool);
    assert_eq!(seen.upgrade().unwrap().entries(&lease).unwrap(), entries);
    drop(lease);
    assert!(seen.upgrade().is_none());
}

#[test]
fn a_pool_that_cannot_be_is_refused_with_numbers() {
    let open = |options| LoraPool::open(&shape(), options);
    assert_refused(open(options(0)), false, "a pool needs at least one slot");
    assert_refused(
        open(PoolOptions { max_rank: 0, ..options(1) }),
        false,
        "max_rank is 0; a slot needs at least rank 1",
    );
    let slot_bytes = host_pool(1).layout().slot_bytes();
    for num_slots in [1 << 31, usize::MAX] {
        let expected = format!("{num_slots} slots of {slot_bytes} bytes are too many");
        assert_refused(open(options(num_slots)), false, &expected);
    }
    let too_small = LoraPool::open_in(&shape(), options(1), |num_bytes| HostMemory::allocate(num_bytes - 1));
    assert!(matches!(too_small, Err(PoolError::Memory(_))), "{too_small:?}");
}

#[test]
fn what_happens_is_counted() {
    let (pool, control) = test_pool(options(2));
    assert_eq!(pool.counters(), PoolCounters::default());
    pool.load("a", &small_adapter(1)).unwrap();
    pool.load("a", &small_adapter(1)).unwrap(); // there already
    pool.load("b", &full_adapter(2, 8)).unwrap();
    pool.load("c", &small_adapter(3)).unwrap(); // takes the slot of a
    let image_bytes = |name| pool.snapshot().resident(name).unwrap().image_bytes as u64;
    let small = image_bytes("c");
    let loaded_bytes = image_bytes("b") + 2 * small;
    let held = lease(&pool, "c");
    pool.acquire(&named("a")).unwrap_err();
    assert!(pool.acquire(&AdapterSelection::Base).unwrap().is_none());
    let counted = PoolCounters { loads: 3, loaded_bytes, victims: 1, hits: 1, misses: 1, ..PoolCounters::default() };
    assert_eq!(pool.counters(), counted);

    control.fail_in(2);
    pool.load("d", &small_adapter(4)).unwrap_err(); // its victim is gone all the same
    pool.evict("c").unwrap_err();
    drop(held);
    pool.replace("c", &small_adapter(5), None).unwrap();
    pool.evict("c").unwrap();
    pool.load("e", &small_adapter(6)).unwrap();
    assert!(pool.unload("e").unwrap().is_done());
    let counted = PoolCounters {
        loads: 5,
        loaded_bytes: loaded_bytes + 2 * small,
        replacements: 1,
        abandoned_loads: 1,
        victims: 2,
        evictions: 1,
        unloads: 1,
        ..counted
    };
    assert_eq!(pool.counters(), counted);
}
