//! Operands of a case: adapters in slots, rows that use them, inputs, and outputs to add to.

use half::{bf16, f16};
use lora_kernels::SiteRef;
use lora_math::rows::RowsCapacity;
use lora_math::{Features, RowAdapter, SiteEntry, SlotDtype, SlotId, StepRows, StepTiles};

use super::case::{Case, Routing};
use super::check::round_to;

/// Slots of every problem.
pub const NUM_SLOTS: usize = 5;
/// The largest rank of any case.
pub const MAX_RANK: usize = 512;

/// One adapter at one site. Values are exact in the type of the case.
#[derive(Clone, Debug)]
pub struct Pair {
    /// 0: the adapter does not touch the site.
    pub rank: usize,
    /// Factor of the site.
    pub scaling: f32,
    /// `[rank, in_features]`.
    pub a: Vec<f32>,
    /// `[out_features, rank]`.
    pub b: Vec<f32>,
}

/// A step and all its operands.
#[derive(Clone, Debug)]
pub struct Problem {
    /// What it was made of.
    pub case: Case,
    /// Columns of the slot table, one for each site; the table has one more that nothing reads.
    pub sites: Vec<SiteRef>,
    /// `[slot][site]`.
    pub pairs: Vec<Vec<Pair>>,
    /// Adapters of each row, without padding.
    pub rows: Vec<Vec<RowAdapter>>,
    /// `[rows with padding, in_features]`, exact in the type of the case.
    pub x: Vec<f32>,
    /// For each site `[rows with padding, out_features]`, exact in the type of the case.
    pub y: Vec<Vec<f32>>,
}

/// SplitMix64, of which the numbers are the same on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Between -1 and 1, exact in the type.
    fn value(&mut self, dtype: SlotDtype) -> f32 {
        round_to(dtype, f64::from(self.next() as u32) / f64::from(u32::MAX) * 2.0 - 1.0)
    }

    fn values(&mut self, dtype: SlotDtype, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.value(dtype)).collect()
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}

impl Problem {
    /// The operands of a case; `seed` chooses the values.
    #[must_use]
    pub fn new(case: Case, seed: u64) -> Self {
        let mut random = Random(seed);
        let dtype = case.dtype;
        // Columns are not in the order of the sites, and not from 0.
        let sites: Vec<SiteRef> = (0..case.num_sites)
            .map(|site| SiteRef {
                index: case.num_sites - site,
                features: Features { in_features: case.in_features, out_features: case.out_features + 9 * site },
            })
            .collect();
        let pairs = (0..NUM_SLOTS)
            .map(|slot| {
                let pair = |site: &SiteRef| {
                    let rank = rank_of(&case, slot, site.index);
                    let Features { in_features, out_features } = site.features;
                    Pair {
                        rank,
                        scaling: [0.5, 2.0, 1.0, 0.25, 1.5][slot],
                        a: random.values(dtype, rank * in_features),
                        b: random.values(dtype, out_features * rank),
                    }
                };
                sites.iter().map(pair).collect()
            })
            .collect();
        let rows: Vec<_> = (0..case.num_rows).map(|row| route(case.routing, row, &mut random)).collect();
        let total = case.num_rows + case.padding;
        let x = random.values(dtype, total * case.in_features);
        let y = sites.iter().map(|site| random.values(dtype, total * site.features.out_features)).collect();
        Problem { case, sites, pairs, rows, x, y }
    }

    /// Rows with padding.
    #[must_use]
    pub fn num_rows(&self) -> usize {
        self.rows.len() + self.case.padding
    }

    /// Sizes of the step.
    #[must_use]
    pub fn capacity(&self) -> RowsCapacity {
        let max_entries = self.rows.iter().map(Vec::len).sum();
        RowsCapacity { max_rows: self.num_rows(), max_entries, num_slots: NUM_SLOTS }
    }

    /// The step's groups, and its tiles where the case has them.
    #[must_use]
    pub fn step(&self) -> (StepRows, Option<StepTiles>) {
        let mut step = StepRows::with_capacity(self.capacity());
        if !self.case.tiled {
            step.stamp(&self.rows, self.num_rows()).expect("a step that fits");
            return (step, None);
        }
        let mut tiles = StepTiles::with_capacity(self.capacity());
        tiles.stamp(&self.rows).expect("a step that fits");
        step.stamp_beside(&self.rows, self.num_rows(), &tiles).expect("a step that fits");
        (step, Some(tiles))
    }

    /// The same with row `row` alone.
    #[must_use]
    pub fn alone(&self, row: usize) -> Self {
        let of = |values: &[f32], width: usize| values[row * width..][..width].to_vec();
        Problem {
            case: Case { num_rows: 1, padding: 0, tiled: false, ..self.case },
            rows: vec![self.rows[row].clone()],
            x: of(&self.x, self.case.in_features),
            y: self.y.iter().zip(&self.sites).map(|(y, site)| of(y, site.features.out_features)).collect(),
            ..self.clone()
        }
    }

    /// Bits of a value in the type of the case.
    #[must_use]
    pub fn bits(&self, value: f32) -> u16 {
        match self.case.dtype {
            SlotDtype::F16 => f16::from_f32(value).to_bits(),
            _ => bf16::from_f32(value).to_bits(),
        }
    }
}

/// A and B of all slots as they lie in memory, and the slot table over them.
#[derive(Clone, Debug)]
pub struct Image {
    /// Bits of 16-bit values, with garbage between matrices where the case pads them.
    pub values: Vec<u16>,
    /// Columns of the slot table.
    pub num_sites: usize,
    /// For each place of the table the first values of A and B, rank, and scaling.
    places: Vec<(usize, [usize; 2], u32, f32)>,
}

impl Image {
    /// The image of a problem's adapters.
    #[must_use]
    pub fn new(problem: &Problem) -> Self {
        let num_sites = problem.sites.len() + 2;
        let (mut values, mut places) = (Vec::new(), Vec::new());
        for (slot, pairs) in problem.pairs.iter().enumerate() {
            for (pair, site) in pairs.iter().zip(&problem.sites) {
                let mut place = |matrix: &[f32]| {
                    if !problem.case.packed {
                        values.resize((values.len() + 32usize).next_multiple_of(32), u16::MAX);
                    }
                    let first = values.len();
                    values.extend(matrix.iter().map(|&value| problem.bits(value)));
                    first
                };
                let firsts = [place(&pair.a), place(&pair.b)];
                places.push((slot * num_sites + site.index, firsts, pair.rank as u32, pair.scaling));
            }
        }
        Image { values, num_sites, places }
    }

    /// The slot table `[slot][site]` where the values stand at `base`. Columns that no site has lead nowhere.
    #[must_use]
    pub fn entries(&self, base: u64) -> Vec<SiteEntry> {
        let garbage = SiteEntry { a: 2, b: 2, rank: 9999, scaling: f32::NAN };
        let mut entries = vec![garbage; NUM_SLOTS * self.num_sites];
        for &(place, firsts, rank, scaling) in &self.places {
            let [a, b] = firsts.map(|first| base + 2 * first as u64);
            entries[place] = SiteEntry { a, b, rank, scaling };
        }
        entries
    }
}

/// Ranks differ between the slots of a batch, and one slot has none at some sites.
fn rank_of(case: &Case, slot: usize, column: usize) -> usize {
    match slot {
        1 => case.rank.div_ceil(2),
        2 => (case.rank + 5).min(MAX_RANK),
        3 if column % 2 == 1 => 0,
        4 => (case.rank * 2).min(MAX_RANK),
        _ => case.rank,
    }
}

fn route(routing: Routing, row: usize, random: &mut Random) -> Vec<RowAdapter> {
    let one = |slot: usize, scale: f32| RowAdapter { slot: SlotId::new(slot as u32), scale };
    match routing {
        Routing::Base => vec![],
        Routing::One => vec![one(2, 1.0)],
        Routing::Turns => match row % (NUM_SLOTS + 1) {
            NUM_SLOTS => vec![],
            slot => vec![one(slot, 1.0)],
        },
        Routing::LastSlot => vec![one(if row % 3 == 1 { 0 } else { NUM_SLOTS - 1 }, 1.0)],
        Routing::Several => {
            let first = random.below(NUM_SLOTS);
            let scales = [0.75, -1.0, 0.125];
            let slots = [first, (first + 1 + random.below(3)) % NUM_SLOTS, first];
            slots.iter().zip(scales).take(random.below(4)).map(|(&slot, scale)| one(slot, scale)).collect()
        }
        Routing::Runs => match row {
            0..13 => vec![one(1, 1.0)],
            13..15 => vec![],
            15..34 => vec![one(4, 0.5), one(0, 1.0)],
            34..37 => vec![one(3, 1.0)],
            _ => vec![one(2, 1.0)],
        },
    }
}
