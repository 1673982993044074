//! Slots in memory that looks like a pool's, seeded values, steps of rows, and the comparison with the oracle.

#![allow(dead_code, reason = "each test binary uses a part of it")]

pub(crate) mod bodies;
pub(crate) mod embedding;
pub(crate) mod refusals;

use half::{bf16, f16};
use lora_kernels::{Rows, RowsMut, ShrinkBuffer, ShrinkCapacity, SiteRef, SlotTable};
use lora_math::rows::RowsCapacity;
use lora_math::{Features, RowAdapter, SiteEntry, SlotDtype, SlotId, StepRows};

/// A NaN that no operation makes, for bytes that must be neither read nor written.
pub(crate) const POISON: u32 = 0x7FC5_A5A5;

/// A seeded source of values.
pub(crate) struct Values(u64);

impl Values {
    pub(crate) fn new(seed: u64) -> Self {
        Values(seed)
    }

    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// In −1..1.
    pub(crate) fn value(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(crate) fn vector(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.value()).collect()
    }
}

/// The bytes of `values` in `dtype`.
pub(crate) fn encode(values: &[f32], dtype: SlotDtype) -> Vec<u8> {
    match dtype {
        SlotDtype::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        SlotDtype::F16 => values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect(),
        SlotDtype::Bf16 => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
    }
}

/// Matrices of one site of one slot, poisoned to their full size and placed one element past an aligned address.
struct Room {
    a: Vec<u64>,
    b: Vec<u64>,
}

/// Slots and their table.
pub(crate) struct Slots {
    dtype: SlotDtype,
    num_slots: usize,
    pub(crate) sites: Vec<SiteRef>,
    max_rank: usize,
    rooms: Vec<Room>,
    entries: Vec<SiteEntry>,
}

impl Slots {
    pub(crate) fn new(dtype: SlotDtype, num_slots: usize, max_rank: usize, features: &[(usize, usize)]) -> Self {
        let sites: Vec<_> = features
            .iter()
            .enumerate()
            .map(|(index, &(in_features, out_features))| SiteRef {
                index,
                features: Features { in_features, out_features },
            })
            .collect();
        let poisoned = |values: usize| vec![u64::MAX; (values + 1) * dtype.bytes() / 8 + 2];
        let rooms = (0..num_slots)
            .flat_map(|_| &sites)
            .map(|site| Room {
                a: poisoned(max_rank * site.features.in_features),
                b: poisoned(max_rank * site.features.out_features),
            })
            .collect();
        let entries = vec![SiteEntry::EMPTY; num_slots * sites.len()];
        Slots { dtype, num_slots, sites, max_rank, rooms, entries }
    }

    /// Fills one site of a slot with seeded values; h and the delta stay near 1.
    pub(crate) fn put(&mut self, slot: usize, site: usize, rank: usize, seed: u64) {
        let Features { in_features, out_features } = self.sites[site].features;
        let mut values = Values::new(seed);
        let mut scaled = |len: usize, fan_in: usize| {
            let scale = (3.0 / fan_in as f32).sqrt();
            values.vector(len).into_iter().map(|value| value * scale).collect::<Vec<_>>()
        };
        let a = encode(&scaled(rank * in_features, in_features), self.dtype);
        let b = encode(&scaled(out_features * rank, rank), self.dtype);
        let place = slot * self.sites.len() + site;
        let room = &mut self.rooms[place];
        let offset = self.dtype.bytes();
        bytemuck::cast_slice_mut::<_, u8>(&mut room.a)[offset..][..a.len()].copy_from_slice(&a);
        bytemuck::cast_slice_mut::<_, u8>(&mut room.b)[offset..][..b.len()].copy_from_slice(&b);
        self.entries[place] = SiteEntry {
            a: room.a.as_ptr() as u64 + offset as u64,
            b: room.b.as_ptr() as u64 + offset as u64,
            rank: rank as u32,
            scaling: 0.5 + (seed % 4) as f32,
        };
    }

    /// Fills all sites of all slots at one rank.
    pub(crate) fn put_all(&mut self, rank: usize, seed: u64) {
        for slot in 0..self.num_slots {
            for site in 0..self.sites.len() {
                self.put(slot, site, rank, seed + (slot * self.sites.len() + site) as u64);
            }
        }
    }

    pub(crate) fn entry_mut(&mut self, slot: usize, site: usize) -> &mut SiteEntry {
        &mut self.entries[slot * self.sites.len() + site]
    }

    pub(crate) fn table(&self) -> SlotTable<'_> {
        // SAFETY: entries and rooms are borrowed with the table, and entries hold the features of `sites`.
        unsafe { SlotTable::from_raw(self.entries.as_ptr(), self.num_slots, self.sites.len(), self.dtype) }
    }

    /// A buffer for a step of this many entries.
    pub(crate) fn buffer(&self, max_entries: usize) -> ShrinkBuffer {
        ShrinkBuffer::new(ShrinkCapacity { max_entries, max_sites: self.sites.len(), max_rank: self.max_rank }).unwrap()
    }
}

/// The adapters of a row: slots, each with a scale of its own.
pub(crate) fn adapters(slots: &[usize]) -> Vec<RowAdapter> {
    let scale = |position: usize| [1.0, 0.75, -1.5][position % 3];
    let slot = |&slot: &usize| SlotId::new(slot as u32);
    slots.iter().enumerate().map(|(position, index)| RowAdapter { slot: slot(index), scale: scale(position) }).collect()
}

/// The metadata of a step whose row `i` uses `rows[i]`, with `padding` rows after them.
pub(crate) fn step(rows: &[Vec<RowAdapter>], num_slots: usize, padding: usize) -> StepRows {
    let padded_rows = rows.len() + padding;
    let max_entries = rows.iter().map(Vec::len).sum();
    let mut step = StepRows::with_capacity(RowsCapacity { max_rows: padded_rows, max_entries, num_slots });
    step.stamp(rows, padded_rows).expect("a step that fits its own capacity");
    step
}

/// Outputs before an operation: seeded values, or poison in rows that it must not touch.
pub(crate) fn outputs(step: &StepRows, width: usize, seed: u64) -> Vec<f32> {
    let mut y = Values::new(seed).vector(step.row_slots().len() * width);
    for (row, slot) in step.row_slots().iter().enumerate() {
        if *slot < 0 {
            y[row * width..][..width].fill(f32::from_bits(POISON));
        }
    }
    y
}

/// Views all outputs of a call.
pub(crate) fn views<'a>(sites: &[SiteRef], y: &'a mut [Vec<f32>]) -> Vec<RowsMut<'a>> {
    sites.iter().zip(y).map(|(site, y)| RowsMut::new(y, site.features.out_features).expect("whole rows")).collect()
}

/// Views inputs.
pub(crate) fn inputs<'a>(sites: &[SiteRef], x: &'a [f32]) -> Rows<'a> {
    Rows::new(x, sites[0].features.in_features).expect("whole rows")
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Fails unless ‖found − expected‖ / ‖expected‖ is within `bound`; names the first element that is off by more than
/// its share.
pub(crate) fn assert_close(what: &str, found: &[f64], expected: &[f64], width: usize, bound: f64) {
    assert_eq!(found.len(), expected.len(), "{what}: number of values");
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    let size = norm(&mut expected.iter().copied());
    let error = norm(&mut found.iter().zip(expected).map(|(found, expected)| found - expected));
    // Not `error > …`: NaN must fail.
    if error <= bound * size {
        return;
    }
    let share = bound * size / (expected.len() as f64).sqrt();
    let bad =
        found.iter().zip(expected).position(|(found, expected)| (found - expected).abs() > share || found.is_nan());
    let at = bad.map(|index| (index / width, index % width, found[index], expected[index]));
    panic!("{what}: relative error {:e} > {bound:e}; first bad (row, n, found, expected): {at:?}", error / size);
}
