//! The state of a pool without its memory: which slot holds what, which name points where, who uses it.
//!
//! ```text
//!           take_slot              install            install of a newer one, or unload, under lease
//!   Free ──────────────▶ Landing ───────────▶ Resident ──────────────────────────────────▶ Retired
//!    ▲ ▲                  │  ▲                 │  │                                            │
//!    │ └──── abandon ─────┘  └─ take_slot ─────┘  │ both only without leases                   │
//!    └─────── evict, unload, install of a newer one ┴────────────── the last lease is released ─┘
//! ```
//!
//! A name is reserved before anything is packed, so that two loads of one name never run side by side; it points to a
//! slot only from `install` on, and to the old slot until then where a generation is replaced. A retired generation has no
//! name: nothing finds it any more, and whoever holds it keeps it. Every function here is one step of the protocol, done under the pool's mutex; none
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
    /// The name that is active, whatever it points to.
    active: Option<Arc<str>>,
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
    /// No name points to it any more: it goes when its last lease does.
    retired: bool,
}

/// What a name stands for. At least one of the two is there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Named {
    resident: Option<SlotId>,
    /// A load that makes it point to something else.
    loading: Option<Loading>,
}

/// What a load does with a name that points to other contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Existing {
    /// Refuses.
    Keep,
    /// Makes the name point to the new generation.
    Replace,
    /// As `Replace`, if the name points to this generation and to no other.
    ReplaceOnly(AdapterId),
}

/// What an installation did.
#[derive(Debug)]
pub(crate) struct Installed {
    pub(crate) leased: Leased,
    /// The generation that the name pointed to before.
    pub(crate) replaced: Option<AdapterId>,
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
        existing: Existing,
    ) -> Result<Reserved, PoolError> {
        let named = self.names.get(name).copied().unwrap_or_default();
        if let Some(other) = named.loading {
            return Ok(Reserved::UnderWay(other));
        }
        let found = named.resident.map(|slot| (slot, self.resident_mut(slot).id));
        match found {
            // What is asked for is there, whichever call brought it: a repeated call succeeds.
            Some((slot, id)) if id.content == content => return Ok(Reserved::Resident(self.count_use(slot))),
            Some((_, resident)) if existing == Existing::Keep => {
                return Err(PoolError::NameTaken { name: name.to_string(), resident, offered: content });
            }
            _ => self.check_expected(name, existing, found.map(|(_, id)| id))?,
        }
        self.names.insert(name.clone(), Named { loading: Some(loading), ..named });
        Ok(Reserved::New)
    }

    /// Whether the name points to the generation that a replacement expects.
    fn check_expected(&self, name: &str, existing: Existing, found: Option<AdapterId>) -> Result<(), PoolError> {
        match existing {
            Existing::ReplaceOnly(expected) if found != Some(expected) => {
                Err(PoolError::WrongGeneration { name: name.to_owned(), expected, found })
            }
            _ => Ok(()),
        }
    }

    /// The slot that the next landing would take: a free one, else the victim's.
    pub(crate) fn choose_slot(&self) -> Result<SlotId, PoolError> {
        let uses = self.slots.iter().map(|slot| self.slot_use(slot));
        Ok(choose_victim(&uses.collect::<Vec<_>>())?)
    }

    /// Takes a slot for a landing. Gives the victim's name too, if there was one.
    pub(crate) fn take_slot(&mut self) -> Result<(SlotId, Option<Arc<str>>), PoolError> {
        let slot = self.choose_slot()?;
        let victim = self.vacate(slot);
        self.slots[slot.index()] = Slot::Landing;
        Ok((slot, victim))
    }

    fn slot_use(&self, slot: &Slot) -> SlotUse {
        match slot {
            Slot::Free => SlotUse::Free,
            Slot::Landing => SlotUse::Busy,
            Slot::Resident(resident) if resident.retired => SlotUse::Busy,
            Slot::Resident(resident) => {
                let is_active = self.active.as_ref() == Some(&resident.name);
                // A generation that is being replaced stays until the new one is there.
                let is_replaced = self.names.get(&resident.name).is_some_and(|named| named.loading.is_some());
                if resident.pinned || is_active {
                    SlotUse::Pinned
                } else if resident.num_leases > 0 || is_replaced {
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
    /// no other load can evict it before its loader has it. What the name pointed to before is retired; its pin stays with
    /// the name.
    ///
    /// # Errors
    /// [`PoolError::WrongGeneration`]: the name points to another generation than the one to be replaced.
    pub(crate) fn install(
        &mut self,
        (slot, name): (SlotId, &Arc<str>),
        content: ContentDigest,
        (size, vectors): (ImageSize, Arc<AdapterVectors>),
        existing: Existing,
    ) -> Result<Installed, PoolError> {
        let old = self.names.get(name).and_then(|named| named.resident);
        let replaced = old.map(|slot| self.resident_mut(slot).id);
        self.check_expected(name, existing, replaced)?;
        let pinned = old.is_some_and(|slot| self.resident_mut(slot).pinned);
        let id = AdapterId { content, generation: next_generation() };
        let (num_leases, last_use, retired) = (0, 0, false);
        let name = name.clone();
        self.names.insert(name.clone(), Named { resident: Some(slot), loading: None });
        self.slots[slot.index()] =
            Slot::Resident(Resident { name, id, size, vectors, num_leases, last_use, pinned, retired });
        if let Some(old) = old {
            self.retire(old);
        }
        Ok(Installed { leased: self.count_use(slot), replaced })
    }

    /// Takes a generation from its name: it goes now, or with its last lease.
    fn retire(&mut self, slot: SlotId) {
        let resident = self.resident_mut(slot);
        resident.retired = true;
        if resident.num_leases == 0 {
            self.empty(slot);
        }
    }

    /// Gives up a load: the name points to what it did before, or is free again, and so is the slot if it had one.
    pub(crate) fn abandon(&mut self, name: &str, slot: Option<SlotId>) {
        match self.names.get_mut(name) {
            Some(named) if named.resident.is_some() => named.loading = None,
            _ => drop(self.names.remove(name)),
        }
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

    /// Gives back one use. Only a lease calls this, once, so its generation is still in its slot and counted. True where that
    /// freed the slot of a retired generation.
    pub(crate) fn release(&mut self, leased: &Leased) -> bool {
        let last_use = self.tick();
        let resident = self.resident_mut(leased.slot);
        debug_assert_eq!(resident.id, leased.id);
        resident.num_leases -= 1;
        resident.last_use = last_use;
        let frees = resident.retired && resident.num_leases == 0;
        if frees {
            self.empty(leased.slot);
        }
        frees
    }

    /// Takes the name from the generation that it points to, which goes with its last lease. Gives its slot and identity.
    pub(crate) fn unload(&mut self, name: &str) -> Result<(SlotId, AdapterId), PoolError> {
        let slot = self.slot_to_drop(name)?;
        let id = self.resident_mut(slot).id;
        self.names.remove(name);
        self.retire(slot);
        Ok((slot, id))
    }

    /// Whether the name points to a resident generation.
    pub(crate) fn is_loaded(&self, name: &str) -> bool {
        self.slot_of(name).is_some()
    }

    /// Whether this generation is still in this slot.
    pub(crate) fn holds(&self, slot: SlotId, id: AdapterId) -> bool {
        matches!(self.slots.get(slot.index()), Some(Slot::Resident(resident)) if resident.id == id)
    }

    /// The slot of a name that is neither active nor being replaced.
    fn slot_to_drop(&self, name: &str) -> Result<SlotId, PoolError> {
        let slot = self.slot_named(name)?;
        if self.names.get(name).is_some_and(|named| named.loading.is_some()) {
            return Err(PoolError::LoadUnderWay { name: name.to_owned() });
        }
        if self.active.as_deref() == Some(name) {
            return Err(PoolError::IsActive { name: name.to_owned() });
        }
        Ok(slot)
    }

    /// Drops the generation that `name` points to.
    pub(crate) fn evict(&mut self, name: &str) -> Result<SlotId, PoolError> {
        let slot = self.slot_to_drop(name)?;
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
        let resident = self.resident_mut(slot);
        let (name, id) = (resident.name.clone(), resident.id);
        self.active = Some(name);
        Ok(id)
    }

    /// Leaves no adapter active.
    pub(crate) fn clear_active(&mut self) {
        self.active = None;
    }

    /// Name and generation of the active adapter.
    pub(crate) fn active_adapter(&self) -> Option<(Arc<str>, AdapterId)> {
        match &self.slots[self.active()?.index()] {
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
        match self.slots.get(slot.index()) {
            Some(Slot::Resident(_)) => self.table.scaling(slot, site),
            _ => 0.0,
        }
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
                active: !resident.retired && self.active.as_ref() == Some(&resident.name),
                retired: resident.retired,
            }),
        });
        let mut loading: Vec<String> =
            self.names.iter().filter(|(_, named)| named.loading.is_some()).map(|(name, _)| name.to_string()).collect();
        loading.sort();
        PoolSnapshot {
            num_slots: self.slots.len(),
            slot_bytes,
            num_free: self.slots.iter().filter(|slot| matches!(slot, Slot::Free)).count(),
            residents: residents.collect(),
            loading,
        }
    }

    /// Frees `slot` if something idle is resident there under a name, and gives the name, which is free too.
    fn vacate(&mut self, slot: SlotId) -> Option<Arc<str>> {
        let resident = self.empty(slot)?;
        self.names.remove(&resident.name);
        Some(resident.name)
    }

    /// Frees a slot without leases, and gives what was resident there.
    fn empty(&mut self, slot: SlotId) -> Option<Resident> {
        let Slot::Resident(resident) = std::mem::replace(&mut self.slots[slot.index()], Slot::Free) else {
            return None;
        };
        self.table.clear_row(slot).expect("the table has a row for each slot");
        Some(resident)
    }

    fn slot_named(&self, name: &str) -> Result<SlotId, PoolError> {
        match self.names.get(name) {
            Some(&Named { resident: Some(slot), .. }) => Ok(slot),
            Some(_) => Err(PoolError::LoadUnderWay { name: name.to_owned() }),
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
        self.names.get(name)?.resident
    }

    fn is_resident(&self, slot: SlotId) -> bool {
        matches!(self.slots.get(slot.index()), Some(Slot::Resident(resident)) if !resident.retired)
    }

    fn active(&self) -> Option<SlotId> {
        self.slot_of(self.active.as_ref()?)
    }
}
