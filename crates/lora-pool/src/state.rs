//! The state of a pool without its memory: which slot holds what, which name points where, who uses it.
//!
//! ```text
//!           take_slot              install
//!   Free ──────────────▶ Landing ───────────▶ Resident
//!    ▲ ▲                  │  ▲                 │  │
//!    │ └──── abandon ─────┘  └─ take_slot ─────┘  │
//!    └──────────────── evict ─────────────────────┘   both only without leases
//! ```
//!
//! A name is reserved before anything is packed, so that two loads of one name never run side by side; it points to a
//! slot only from `install` on. Every function here is one step of the protocol, done under the pool's mutex; none
//! waits, copies, or takes time that grows with the size of an adapter.

use std::collections::HashMap;
use std::sync::Arc;

use lora_adapter::AdapterVectors;
use lora_math::selection::{Residents, resolve};
use lora_math::victim::{SlotUse, choose_victim};
use lora_math::{AdapterId, AdapterSelection, ContentDigest, Route, SiteEntry, SiteTable, SlotId};

use crate::error::PoolError;
use crate::generation::next_generation;
use crate::image::ImageSize;
use crate::lease::Leased;
use crate::snapshot::{PoolSnapshot, ResidentSnapshot};

/// The slots, the names, and the host's copy of the slot table.
#[derive(Debug)]
pub(crate) struct PoolState {
    slots: Vec<Slot>,
    names: HashMap<Arc<str>, Named>,
    active: Option<SlotId>,
    table: SiteTable,
    clock: u64,
}

#[derive(Debug)]
enum Slot {
    Free,
    Landing,
    Resident(Resident),
}

#[derive(Debug)]
struct Resident {
    name: Arc<str>,
    id: AdapterId,
    size: ImageSize,
    vectors: Arc<AdapterVectors>,
    num_leases: usize,
    last_use: u64,
    pinned: bool,
}

/// What a name points to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Named {
    Loading(Loading),
    Resident(SlotId),
}

/// How a load goes on to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loading {
    /// By the thread that runs it: waiting for it is bounded by packing and copying.
    Running,
    /// When the holder of a landing publishes it or drops it, whenever that is.
    Staged,
}

/// The answer to a wish to load.
#[derive(Debug)]
#[must_use = "a reserved name or a counted use must be given back"]
pub(crate) enum Reserved {
    /// The name is the caller's until it installs or abandons.
    New,
    /// These contents are resident under that name already. The use is counted.
    Resident(Leased),
    /// Another load of the name is under way.
    UnderWay(Loading),
}

impl PoolState {
    /// All slots free. `table` has one row for each slot.
    pub(crate) fn new(table: SiteTable) -> Self {
        let slots = (0..table.num_slots()).map(|_| Slot::Free).collect();
        PoolState { slots, names: HashMap::new(), active: None, table, clock: 0 }
    }

    /// Reserves `name` for a load of `content` that goes on as `loading` says.
    pub(crate) fn reserve(
        &mut self,
        name: &Arc<str>,
        content: ContentDigest,
        loading: Loading,
    ) -> Result<Reserved, PoolError> {
        match self.names.get(name) {
            None => {
                self.names.insert(name.clone(), Named::Loading(loading));
                Ok(Reserved::New)
            }
            Some(&Named::Loading(other)) => Ok(Reserved::UnderWay(other)),
            Some(&Named::Resident(slot)) => {
                let resident = self.resident_mut(slot);
                if resident.id.content != content {
                    return Err(PoolError::NameTaken {
                        name: name.to_string(),
                        resident: resident.id,
                        offered: content,
                    });
                }
                Ok(Reserved::Resident(self.count_use(slot)))
            }
        }
    }

    /// The slot that the next landing would take: a free one, else the victim's.
    pub(crate) fn choose_slot(&self) -> Result<SlotId, PoolError> {
        let uses = self.slots.iter().enumerate().map(|(index, slot)| self.slot_use(index, slot));
        Ok(choose_victim(&uses.collect::<Vec<_>>())?)
    }

    /// Takes a slot for a landing. Gives the victim's name too, if there was one.
    pub(crate) fn take_slot(&mut self) -> Result<(SlotId, Option<Arc<str>>), PoolError> {
        let slot = self.choose_slot()?;
        let victim = self.vacate(slot);
        self.slots[slot.index()] = Slot::Landing;
        Ok((slot, victim))
    }

    fn slot_use(&self, index: usize, slot: &Slot) -> SlotUse {
        match slot {
            Slot::Free => SlotUse::Free,
            Slot::Landing => SlotUse::Busy,
            Slot::Resident(resident) => {
                let active = self.active.is_some_and(|active| active.index() == index);
                if resident.pinned || active {
                    SlotUse::Pinned
                } else if resident.num_leases > 0 {
                    SlotUse::Busy
                } else {
                    SlotUse::Idle { last_use: resident.last_use }
                }
            }
        }
    }

    /// Sets the row of a landing slot in the table. Gives its offset in the table and its bytes.
    pub(crate) fn write_row(&mut self, slot: SlotId, row: &[SiteEntry]) -> Result<(usize, Vec<u8>), PoolError> {
        self.table.set_row(slot, row)?;
        Ok((self.table.row_offset(slot)?, self.table.row_bytes(slot)?))
    }

    /// Makes what landed in `slot`, whose row has been written, resident under the reserved `name`, and counts a use of it:
    /// no other load can evict it before its loader has it.
    pub(crate) fn install(
        &mut self,
        (slot, name): (SlotId, &Arc<str>),
        content: ContentDigest,
        size: ImageSize,
        vectors: Arc<AdapterVectors>,
    ) -> Leased {
        let id = AdapterId { content, generation: next_generation() };
        self.slots[slot.index()] = Slot::Resident(Resident {
            name: name.clone(),
            id,
            size,
            vectors,
            num_leases: 0,
            last_use: 0,
            pinned: false,
        });
        self.names.insert(name.clone(), Named::Resident(slot));
        self.count_use(slot)
    }

    /// Gives up a load: the name is free again, and so is the slot if it had one.
    pub(crate) fn abandon(&mut self, name: &str, slot: Option<SlotId>) {
        self.names.remove(name);
        if let Some(slot) = slot {
            self.slots[slot.index()] = Slot::Free;
            self.table.clear_row(slot).expect("the table has a row for each slot");
        }
    }

    /// Resolves `selection` and counts a use of what it names, in one step. None is the base model.
    pub(crate) fn acquire(&mut self, selection: &AdapterSelection) -> Result<Option<Leased>, PoolError> {
        let slot = match resolve(selection, Some(&*self)) {
            Ok(Route::Base) => return Ok(None),
            Ok(Route::Slot(slot)) => slot,
            Err(error) => match selection {
                AdapterSelection::Named(name) if self.names.contains_key(name.as_str()) => {
                    return Err(PoolError::LoadUnderWay { name: name.clone() });
                }
                _ => return Err(error.into()),
            },
        };
        Ok(Some(self.count_use(slot)))
    }

    /// Counts a use of what is resident in `slot`.
    fn count_use(&mut self, slot: SlotId) -> Leased {
        let last_use = self.tick();
        let resident = self.resident_mut(slot);
        resident.num_leases += 1;
        resident.last_use = last_use;
        Leased { slot, id: resident.id, name: resident.name.clone(), vectors: resident.vectors.clone() }
    }

    /// Gives back one use. Only a lease calls this, once, so its generation is still in its slot and counted.
    pub(crate) fn release(&mut self, leased: &Leased) {
        let last_use = self.tick();
        let resident = self.resident_mut(leased.slot);
        debug_assert_eq!(resident.id, leased.id);
        resident.num_leases -= 1;
        resident.last_use = last_use;
    }

    /// Drops the generation that `name` points to.
    pub(crate) fn evict(&mut self, name: &str) -> Result<SlotId, PoolError> {
        let slot = self.slot_named(name)?;
        if self.active == Some(slot) {
            return Err(PoolError::IsActive { name: name.to_owned() });
        }
        let num_leases = self.resident_mut(slot).num_leases;
        if num_leases > 0 {
            return Err(PoolError::InUse { name: name.to_owned(), num_leases });
        }
        self.vacate(slot);
        Ok(slot)
    }

    /// Sets whether the adapter may be a victim.
    pub(crate) fn set_pinned(&mut self, name: &str, pinned: bool) -> Result<(), PoolError> {
        let slot = self.slot_named(name)?;
        self.resident_mut(slot).pinned = pinned;
        Ok(())
    }

    /// Makes the adapter the active one.
    pub(crate) fn set_active(&mut self, name: &str) -> Result<AdapterId, PoolError> {
        let slot = self.slot_named(name)?;
        self.active = Some(slot);
        Ok(self.resident_mut(slot).id)
    }

    /// Leaves no adapter active.
    pub(crate) fn clear_active(&mut self) {
        self.active = None;
    }

    /// Name and generation of the active adapter.
    pub(crate) fn active_adapter(&self) -> Option<(Arc<str>, AdapterId)> {
        match &self.slots[self.active?.index()] {
            Slot::Resident(resident) => Some((resident.name.clone(), resident.id)),
            Slot::Free | Slot::Landing => None,
        }
    }

    /// The host's copy of the slot table. A slot that is landing may have its row already.
    pub(crate) fn table(&self) -> &SiteTable {
        &self.table
    }

    /// The scaling of what is resident in `slot` at the site with index `site`; 0 without one.
    pub(crate) fn scaling(&self, slot: SlotId, site: usize) -> f32 {
        if self.is_resident(slot) { self.table.scaling(slot, site) } else { 0.0 }
    }

    /// A copy of what is there.
    pub(crate) fn snapshot(&self, slot_bytes: usize) -> PoolSnapshot {
        let residents = self.slots.iter().zip(0u32..).filter_map(|(slot, index)| match slot {
            Slot::Free | Slot::Landing => None,
            Slot::Resident(resident) => Some(ResidentSnapshot {
                name: resident.name.to_string(),
                slot: SlotId::new(index),
                id: resident.id,
                image_bytes: resident.size.image_bytes,
                vector_bytes: resident.vectors.num_bytes(),
                max_rank: resident.size.max_rank,
                num_sites: resident.size.num_sites,
                num_leases: resident.num_leases,
                last_use: resident.last_use,
                pinned: resident.pinned,
                active: self.active == Some(SlotId::new(index)),
            }),
        });
        let mut loading: Vec<String> = self
            .names
            .iter()
            .filter(|(_, named)| matches!(named, Named::Loading(_)))
            .map(|(name, _)| name.to_string())
            .collect();
        loading.sort();
        PoolSnapshot {
            num_slots: self.slots.len(),
            slot_bytes,
            num_free: self.slots.iter().filter(|slot| matches!(slot, Slot::Free)).count(),
            residents: residents.collect(),
            loading,
        }
    }

    /// Frees `slot` if something idle is resident there, and gives its name.
    fn vacate(&mut self, slot: SlotId) -> Option<Arc<str>> {
        let Slot::Resident(resident) = std::mem::replace(&mut self.slots[slot.index()], Slot::Free) else {
            return None;
        };
        self.names.remove(&resident.name);
        self.table.clear_row(slot).expect("the table has a row for each slot");
        Some(resident.name)
    }

    fn slot_named(&self, name: &str) -> Result<SlotId, PoolError> {
        match self.names.get(name) {
            Some(&Named::Resident(slot)) => Ok(slot),
            Some(Named::Loading(_)) => Err(PoolError::LoadUnderWay { name: name.to_owned() }),
            None => Err(PoolError::NotFound { name: name.to_owned() }),
        }
    }

    /// The resident of a slot that a name, the active mark or a lease points to.
    fn resident_mut(&mut self, slot: SlotId) -> &mut Resident {
        match &mut self.slots[slot.index()] {
            Slot::Resident(resident) => resident,
            Slot::Free | Slot::Landing => unreachable!("{slot} is pointed to and holds nothing"),
        }
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }
}

impl Residents for PoolState {
    fn num_slots(&self) -> usize {
        self.slots.len()
    }

    fn slot_of(&self, name: &str) -> Option<SlotId> {
        match self.names.get(name)? {
            Named::Resident(slot) => Some(*slot),
            Named::Loading(_) => None,
        }
    }

    fn is_resident(&self, slot: SlotId) -> bool {
        matches!(self.slots.get(slot.index()), Some(Slot::Resident(_)))
    }

    fn active(&self) -> Option<SlotId> {
        self.active
    }
}
