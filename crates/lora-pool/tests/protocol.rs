//! The pool against a simple model: thousands of random operations, with a failure of the memory put into one load in
//! three, and everything compared after each.

mod common;

use std::sync::Arc;

use common::*;
use lora_adapter::PreparedAdapter;
use lora_math::{AdapterId, AdapterSelection, Module, Site, SlotId};
use lora_pool::{Landing, Lease, LoraPool, PoolError, Staged};
use proptest::prelude::*;

const NUM_SLOTS: usize = 3;
const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];
const NUM_ADAPTERS: usize = 5;

/// Indices are taken modulo what there is at that moment.
#[derive(Clone, Debug)]
enum Op {
    /// The memory operation that fails: 1 the host buffer, 2 the copy, 3 the publication; 0 and above 3 none.
    Load {
        name: usize,
        adapter: usize,
        fail: i64,
    },
    Stage {
        name: usize,
        adapter: usize,
        fail: i64,
    },
    /// `expect`: 0 replaces anything, 1 what is there, 2 a generation of another pool.
    Replace {
        name: usize,
        adapter: usize,
        fail: i64,
        stage_only: bool,
        expect: usize,
    },
    Unload {
        name: usize,
    },
    Publish {
        landing: usize,
        fail: i64,
    },
    GiveUp {
        landing: usize,
    },
    Evict {
        name: usize,
    },
    AcquireName {
        name: usize,
    },
    AcquireSlot {
        slot: u32,
    },
    AcquireActive,
    CloneLease {
        lease: usize,
    },
    DropLease {
        lease: usize,
    },
    Pin {
        name: usize,
        pinned: bool,
    },
    SetActive {
        name: usize,
    },
    ClearActive,
}

fn op() -> impl Strategy<Value = Op> {
    let name = 0..NAMES.len();
    let index = 0..64usize;
    let load = (name.clone(), 0..NUM_ADAPTERS, 0..9i64);
    prop_oneof![
        5 => load.clone().prop_map(|(name, adapter, fail)| Op::Load { name, adapter, fail }),
        2 => load.clone().prop_map(|(name, adapter, fail)| Op::Stage { name, adapter, fail }),
        4 => (load, any::<bool>(), 0..3usize).prop_map(|((name, adapter, fail), stage_only, expect)| Op::Replace {
            name, adapter, fail, stage_only, expect
        }),
        2 => name.clone().prop_map(|name| Op::Unload { name }),
        2 => (index.clone(), 0..4i64).prop_map(|(landing, fail)| Op::Publish { landing, fail }),
        1 => index.clone().prop_map(|landing| Op::GiveUp { landing }),
        3 => name.clone().prop_map(|name| Op::Evict { name }),
        4 => name.clone().prop_map(|name| Op::AcquireName { name }),
        1 => (0..NUM_SLOTS as u32 + 1).prop_map(|slot| Op::AcquireSlot { slot }),
        1 => Just(Op::AcquireActive),
        1 => index.clone().prop_map(|lease| Op::CloneLease { lease }),
        5 => index.prop_map(|lease| Op::DropLease { lease }),
        1 => (name.clone(), any::<bool>()).prop_map(|(name, pinned)| Op::Pin { name, pinned }),
        1 => name.prop_map(|name| Op::SetActive { name }),
        1 => Just(Op::ClearActive),
    ]
}

/// What the model knows of one slot.
#[derive(Clone, Debug, PartialEq)]
enum ModelSlot {
    Free,
    Landing { name: usize },
    Resident { name: usize, adapter: usize, id: AdapterId, pinned: bool, last_use: usize, retired: bool },
}

/// What a load does with a name that points to other contents.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Existing {
    Keep,
    Replace(Option<AdapterId>),
}

struct Run {
    pool: Arc<LoraPool<TestMemory>>,
    control: Arc<Control>,
    adapters: Vec<PreparedAdapter>,
    slots: Vec<ModelSlot>,
    /// The active name.
    active: Option<usize>,
    /// A generation that no name here ever points to.
    foreign: AdapterId,
    /// Each lease with its use; clones share a use.
    leases: Vec<(Lease, usize)>,
    landings: Vec<(Landing<TestMemory>, usize)>,
    next_use: usize,
    now: usize,
}

impl Run {
    fn new() -> Self {
        let (pool, control) = test_pool(options(NUM_SLOTS));
        let mut adapters = vec![full_adapter(10, MAX_RANK), small_adapter(11)];
        adapters.extend((adapters.len()..NUM_ADAPTERS).map(|index| full_adapter(index as u64, 2 * index + 1)));
        let (other, _) = test_pool(options(1));
        let foreign = other.load("other", &adapters[0]).unwrap();
        Run {
            foreign,
            pool,
            control,
            adapters,
            slots: vec![ModelSlot::Free; NUM_SLOTS],
            active: None,
            leases: Vec::new(),
            landings: Vec::new(),
            next_use: 0,
            now: 0,
        }
    }

    fn slot_of(&self, wanted: usize) -> Option<usize> {
        self.slots
            .iter()
            .position(|slot| matches!(slot, ModelSlot::Resident { name, retired: false, .. } if *name == wanted))
    }

    fn active_slot(&self) -> Option<usize> {
        self.slot_of(self.active?)
    }

    /// Takes the name from what is resident in `slot`.
    fn retire(&mut self, slot: usize) {
        let in_use = self.num_leases(slot) > 0;
        match &mut self.slots[slot] {
            ModelSlot::Resident { retired, .. } if in_use => *retired = true,
            other => *other = ModelSlot::Free,
        }
    }

    fn is_loading(&self, wanted: usize) -> bool {
        self.slots.iter().any(|slot| matches!(slot, ModelSlot::Landing { name } if *name == wanted))
    }

    fn num_leases(&self, slot: usize) -> usize {
        let on_slot = self.leases.iter().filter(|(lease, _)| lease.slot().index() == slot);
        let mut uses: Vec<usize> = on_slot.map(|(_, number)| *number).collect();
        uses.sort();
        uses.dedup();
        uses.len()
    }

    fn touch(&mut self, slot: usize) {
        self.now += 1;
        if let ModelSlot::Resident { last_use, .. } = &mut self.slots[slot] {
            *last_use = self.now;
        }
    }

    /// The slot that a load must take, which is never `kept`.
    fn victim_but(&self, kept_slot: Option<usize>) -> Option<usize> {
        let idle = |&index: &usize| match self.slots[index] {
            ModelSlot::Resident { name, pinned, retired, .. } => {
                let kept = pinned || retired || self.active == Some(name) || self.is_loading(name);
                !kept && kept_slot != Some(index) && self.num_leases(index) == 0
            }
            _ => false,
        };
        let age = |&index: &usize| match self.slots[index] {
            ModelSlot::Resident { last_use, .. } => last_use,
            _ => usize::MAX,
        };
        let free = self.slots.iter().position(|slot| *slot == ModelSlot::Free);
        free.or_else(|| (0..NUM_SLOTS).filter(idle).min_by_key(age))
    }

    /// Loads or stages, and updates the model by what must come of it.
    fn load(&mut self, name: usize, adapter: usize, fail: i64, (stage_only, existing): (bool, Existing)) {
        let prepared = self.adapters[adapter].clone();
        let before = self.slot_of(name).map(|slot| match self.slots[slot] {
            ModelSlot::Resident { adapter, id, .. } => (slot, adapter, id),
            _ => unreachable!(),
        });
        self.control.fail_in(fail);
        let text = NAMES[name];
        let result = match (stage_only, existing) {
            (true, Existing::Keep) => self.pool.stage(text, &prepared),
            (true, Existing::Replace(expected)) => self.pool.stage_replace(text, &prepared, expected),
            (false, Existing::Keep) => self.pool.load_leased(text, &prepared).map(Staged::Resident),
            (false, Existing::Replace(expected)) => self.pool.replace(text, &prepared, expected).map(|replaced| {
                let same = before.filter(|(_, present, _)| *present == adapter);
                assert_eq!(replaced.previous, before.map(|(.., id)| id));
                assert!(same.is_none_or(|(.., id)| id == replaced.id));
                Staged::Resident(self.pool.acquire(&named(text)).unwrap().unwrap())
            }),
        };
        self.control.cancel_failure();

        if self.is_loading(name) {
            assert!(matches!(result, Err(PoolError::LoadUnderWay { .. })), "{result:?}");
            return;
        }
        if let Some((slot, _, id)) = before.filter(|(_, present, _)| *present == adapter) {
            assert!(matches!(result, Ok(Staged::Resident(ref same)) if same.id() == id), "{result:?}");
            self.touch(slot);
            return;
        }
        match existing {
            Existing::Keep if before.is_some() => {
                assert!(matches!(result, Err(PoolError::NameTaken { .. })), "{result:?}");
                return;
            }
            Existing::Replace(Some(expected)) if before.map(|(.., id)| id) != Some(expected) => {
                assert!(matches!(result, Err(PoolError::WrongGeneration { .. })), "{result:?}");
                return;
            }
            _ => {}
        }
        // What is replaced is no victim for it: as if its name were loading already.
        let old = before.map(|(slot, ..)| slot);
        let Some(victim) = self.victim_but(old) else {
            assert!(matches!(result, Err(PoolError::Full(_))), "{result:?}");
            return;
        };
        let last_operation = if stage_only { 2 } else { 3 };
        if fail == 1 {
            assert!(matches!(result, Err(PoolError::Memory(_))), "{result:?}");
            return;
        }
        self.slots[victim] = ModelSlot::Free;
        if (2..=last_operation).contains(&fail) {
            assert_eq!(result.unwrap_err(), PoolError::Memory(INJECTED));
            return;
        }
        match result.unwrap() {
            Staged::Landing(landing) => {
                assert_eq!((landing.slot().index(), landing.name()), (victim, NAMES[name]));
                self.slots[victim] = ModelSlot::Landing { name };
                self.landings.push((landing, adapter));
            }
            Staged::Resident(lease) => {
                let id = lease.id();
                drop(lease);
                self.become_resident(victim, name, adapter, id);
            }
        }
    }

    fn become_resident(&mut self, slot: usize, name: usize, adapter: usize, id: AdapterId) {
        assert_eq!(id.content, self.adapters[adapter].content());
        self.now += 1;
        let mut pinned = false;
        if let Some(old) = self.slot_of(name) {
            pinned = matches!(self.slots[old], ModelSlot::Resident { pinned: true, .. });
            self.retire(old);
        }
        self.slots[slot] = ModelSlot::Resident { name, adapter, id, pinned, last_use: self.now, retired: false };
    }

    /// Checks what an acquire gave against the slot that it must be on.
    fn acquired(&mut self, result: Result<Option<Lease>, PoolError>, expected: Option<usize>) {
        match expected {
            Some(slot) => {
                let lease = result.unwrap().unwrap();
                assert_eq!(lease.slot().index(), slot);
                self.touch(slot);
                self.leases.push((lease, self.next_use));
                self.next_use += 1;
            }
            None => assert!(!matches!(result, Ok(Some(_))), "{result:?}"),
        }
    }

    fn apply(&mut self, op: Op) {
        match op {
            Op::Load { name, adapter, fail } => self.load(name, adapter, fail, (false, Existing::Keep)),
            Op::Stage { name, adapter, fail } => self.load(name, adapter, fail, (true, Existing::Keep)),
            Op::Replace { name, adapter, fail, stage_only, expect } => {
                let current = self.slot_of(name).map(|slot| match self.slots[slot] {
                    ModelSlot::Resident { id, .. } => id,
                    _ => unreachable!(),
                });
                let expected = [None, current, Some(self.foreign)][expect];
                self.load(name, adapter, fail, (stage_only, Existing::Replace(expected)));
            }
            Op::Unload { name } => {
                let result = self.pool.unload(NAMES[name]);
                match self.slot_of(name) {
                    _ if self.is_loading(name) => assert!(matches!(result, Err(PoolError::LoadUnderWay { .. }))),
                    None => assert!(matches!(result, Err(PoolError::NotFound { .. }))),
                    Some(_) if self.active == Some(name) => assert!(matches!(result, Err(PoolError::IsActive { .. }))),
                    Some(slot) => {
                        self.retire(slot);
                        assert_eq!(result.unwrap().is_done(), self.slots[slot] == ModelSlot::Free);
                    }
                }
            }
            Op::Publish { landing, fail } if !self.landings.is_empty() => {
                let (landing, adapter) = self.landings.swap_remove(landing % self.landings.len());
                let slot = landing.slot().index();
                let ModelSlot::Landing { name } = self.slots[slot] else { panic!("{:?}", self.slots) };
                self.control.fail_in(fail);
                let result = landing.publish(&lora_pool::HostStream);
                self.control.cancel_failure();
                if fail == 1 {
                    assert_eq!(result.unwrap_err(), PoolError::Memory(INJECTED));
                    self.slots[slot] = ModelSlot::Free;
                } else {
                    self.become_resident(slot, name, adapter, result.unwrap());
                }
            }
            Op::GiveUp { landing } if !self.landings.is_empty() => {
                let (landing, _) = self.landings.swap_remove(landing % self.landings.len());
                self.slots[landing.slot().index()] = ModelSlot::Free;
            }
            Op::Evict { name } => {
                let result = self.pool.evict(NAMES[name]);
                match self.slot_of(name) {
                    _ if self.is_loading(name) => assert!(matches!(result, Err(PoolError::LoadUnderWay { .. }))),
                    None => assert!(matches!(result, Err(PoolError::NotFound { .. }))),
                    Some(_) if self.active == Some(name) => {
                        assert!(matches!(result, Err(PoolError::IsActive { .. })));
                    }
                    Some(slot) if self.num_leases(slot) > 0 => {
                        let num_leases = self.num_leases(slot);
                        assert_eq!(result, Err(PoolError::InUse { name: NAMES[name].to_owned(), num_leases }));
                    }
                    Some(slot) => {
                        result.unwrap();
                        self.slots[slot] = ModelSlot::Free;
                    }
                }
            }
            Op::AcquireName { name } => {
                let result = self.pool.acquire(&named(NAMES[name]));
                if self.slot_of(name).is_none() {
                    let under_way = matches!(result, Err(PoolError::LoadUnderWay { .. }));
                    assert_eq!(under_way, self.is_loading(name));
                    assert!(result.is_err());
                }
                self.acquired(result, self.slot_of(name));
            }
            Op::AcquireSlot { slot } => {
                let result = self.pool.acquire(&AdapterSelection::Slot(SlotId::new(slot)));
                let slot = slot as usize;
                let resident = matches!(self.slots.get(slot), Some(ModelSlot::Resident { retired: false, .. }));
                assert_eq!(result.is_ok(), resident);
                self.acquired(result, resident.then_some(slot));
            }
            Op::AcquireActive => {
                let result = self.pool.acquire(&AdapterSelection::Active);
                assert!(result.is_ok());
                self.acquired(result, self.active_slot());
            }
            Op::CloneLease { lease } if !self.leases.is_empty() => {
                let lease = self.leases[lease % self.leases.len()].clone();
                self.leases.push(lease);
            }
            Op::DropLease { lease } if !self.leases.is_empty() => {
                let (lease, number) = self.leases.swap_remove(lease % self.leases.len());
                if self.leases.iter().all(|(_, other)| *other != number) {
                    let slot = lease.slot().index();
                    self.touch(slot);
                    if matches!(self.slots[slot], ModelSlot::Resident { retired: true, .. })
                        && self.num_leases(slot) == 0
                    {
                        self.slots[slot] = ModelSlot::Free;
                    }
                }
            }
            Op::Pin { name, pinned } => {
                let result = if pinned { self.pool.pin(NAMES[name]) } else { self.pool.unpin(NAMES[name]) };
                let slot = self.slot_of(name);
                assert_eq!(result.is_ok(), slot.is_some());
                if let Some(ModelSlot::Resident { pinned: mark, .. }) = slot.map(|slot| &mut self.slots[slot]) {
                    *mark = pinned;
                }
            }
            Op::SetActive { name } => {
                let result = self.pool.set_active(NAMES[name]);
                let slot = self.slot_of(name);
                assert_eq!(result.is_ok(), slot.is_some());
                self.active = slot.map(|_| name).or(self.active);
            }
            Op::ClearActive => {
                self.pool.clear_active();
                self.active = None;
            }
            Op::Publish { .. } | Op::GiveUp { .. } | Op::CloneLease { .. } | Op::DropLease { .. } => {}
        }
    }

    /// The pool tells of itself what the model knows, and every lease is on what it was acquired on.
    fn check(&self) {
        let snapshot = self.pool.snapshot();
        assert_eq!(snapshot.num_free, self.slots.iter().filter(|slot| **slot == ModelSlot::Free).count());
        let mut residents = snapshot.residents.iter();
        let mut loading = Vec::new();
        for (index, slot) in self.slots.iter().enumerate() {
            match *slot {
                ModelSlot::Free => {}
                ModelSlot::Landing { name } => loading.push(NAMES[name]),
                ModelSlot::Resident { name, adapter, id, pinned, retired, .. } => {
                    let found = residents.next().unwrap();
                    assert_eq!((found.slot.index(), &*found.name, found.id), (index, NAMES[name], id));
                    let active = self.active_slot() == Some(index);
                    assert_eq!((found.pinned, found.active, found.retired), (pinned, active, retired));
                    assert_eq!(found.num_leases, self.num_leases(index));
                    let prepared = &self.adapters[adapter];
                    assert_eq!((found.max_rank, found.num_sites), (prepared.max_rank(), prepared.pairs().len()));
                }
            }
        }
        assert_eq!(residents.next(), None);
        loading.sort();
        assert_eq!(snapshot.loading, loading);
        let site = Site::layer(0, Module::QProj);
        for (slot, index) in self.slots.iter().zip(0..) {
            // Every adapter here has this site, with alpha twice its rank.
            let expected = if matches!(slot, ModelSlot::Resident { .. }) { 2.0 } else { 0.0 };
            assert_eq!(self.pool.scaling(SlotId::new(index), site), expected);
        }
        for (lease, _) in &self.leases {
            let ModelSlot::Resident { adapter, id, .. } = self.slots[lease.slot().index()] else {
                panic!("{lease:?} is on {:?}", self.slots)
            };
            assert_eq!(lease.id(), id);
            assert_eq!(device_entries(&self.pool, lease), self.pool.entries(lease).unwrap());
            let expected = adapter_pairs(self.pool.layout(), &self.adapters[adapter]);
            assert_eq!(device_pairs(&self.pool, lease), expected);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_pool_does_what_the_model_does(ops in prop::collection::vec(op(), 1..200)) {
        let mut run = Run::new();
        let empty = run.pool.snapshot();
        for op in ops {
            run.apply(op);
            run.check();
        }
        run.landings.clear();
        run.leases.clear();
        run.pool.clear_active();
        for resident in run.pool.snapshot().residents {
            run.pool.evict(&resident.name).unwrap();
        }
        prop_assert_eq!(run.pool.snapshot(), empty);
    }
}
