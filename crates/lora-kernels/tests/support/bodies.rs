//! What every back end must do, one body a behaviour; each takes the back end to check.

use lora_kernels::reference::oracle;
use lora_kernels::{DeltaRun, LoraKernels};
use lora_math::{RowAdapter, RowRun, SlotDtype, SlotId, StepRows};

use super::{Slots, Values, adapters, assert_close, bits, inputs, outputs, step, views};

pub(crate) const DTYPES: [SlotDtype; 3] = [SlotDtype::F32, SlotDtype::F16, SlotDtype::Bf16];
const RANKS: [usize; 11] = [1, 2, 3, 4, 8, 12, 16, 24, 33, 64, 128];
const FEATURES: [usize; 7] = [1, 7, 31, 64, 100, 576, 1027];
const ROWS: [usize; 7] = [0, 1, 3, 5, 8, 9, 64];
const NUM_SLOTS: usize = 5;
/// Largest relative error of f32 sums of these lengths.
const BOUND: f64 = 2e-6;

/// Which slots the rows of a step use.
#[derive(Clone, Copy, Debug)]
enum Pattern {
    AllBase,
    LastSlot,
    Distinct,
    Mixed,
    Several,
}

const PATTERNS: [Pattern; 5] =
    [Pattern::AllBase, Pattern::LastSlot, Pattern::Distinct, Pattern::Mixed, Pattern::Several];

impl Pattern {
    fn rows(self, num_rows: usize) -> Vec<Vec<RowAdapter>> {
        let slots = |row: usize| match self {
            Pattern::AllBase => vec![],
            Pattern::LastSlot => vec![NUM_SLOTS - 1],
            Pattern::Distinct => vec![row % NUM_SLOTS],
            Pattern::Mixed => [vec![], vec![2], vec![NUM_SLOTS - 1], vec![2]][row % 4].clone(),
            Pattern::Several => [vec![3, 0, 4], vec![1], vec![], vec![0, 3], vec![2, 2]][row % 5].clone(),
        };
        (0..num_rows).map(|row| adapters(&slots(row))).collect()
    }
}

/// Runs shrink and expand of all sites on `y`.
fn bgmv(kernels: &dyn LoraKernels, slots: &Slots, step: &StepRows, x: &[f32], y: &mut [Vec<f32>]) {
    let mut h = slots.buffer(step.entries().len());
    kernels.shrink(&slots.table(), step, &slots.sites, inputs(&slots.sites, x), &mut h).expect("shrink");
    kernels.expand(&slots.table(), step, &slots.sites, &h, &mut views(&slots.sites, y)).expect("expand");
}

/// Every value of every parameter, and most pairs of them, against the oracle; rows without adapters keep their bits.
pub(crate) fn matches_the_oracle(kernels: &dyn LoraKernels) {
    for (i, &rank) in RANKS.iter().enumerate() {
        for (j, &in_features) in FEATURES.iter().enumerate() {
            let pick = i * FEATURES.len() + j;
            let out_features = [FEATURES[(i + j) % 7], FEATURES[(i + 3 * j + 1) % 7]];
            let num_rows = ROWS[(i + 2 * j) % 7];
            let pattern = PATTERNS[(i + 3 * j) % 5];
            let dtype = DTYPES[(pick + i) % 3];
            let features = out_features.map(|out_features| (in_features, out_features));
            let mut slots = Slots::new(dtype, NUM_SLOTS, rank, &features[..1 + pick % 2]);
            slots.put_all(rank, pick as u64);
            let step = step(&pattern.rows(num_rows), NUM_SLOTS, pick % 3);
            let what = format!("rank {rank}, in {in_features}, {num_rows} rows, {pattern:?}, {dtype:?}");
            check_against_oracle(kernels, &slots, &step, &what);
        }
    }
}

fn check_against_oracle(kernels: &dyn LoraKernels, slots: &Slots, step: &StepRows, what: &str) {
    let in_features = slots.sites[0].features.in_features;
    let x = Values::new(77).vector(step.row_slots().len() * in_features);
    let before: Vec<_> = slots.sites.iter().map(|site| outputs(step, site.features.out_features, 78)).collect();
    let mut after = before.clone();
    bgmv(kernels, slots, step, &x, &mut after);

    for ((site, before), after) in slots.sites.iter().zip(&before).zip(&after) {
        let width = site.features.out_features;
        let delta = oracle::step_delta(&slots.table(), step, site, inputs(&slots.sites, &x)).expect("oracle");
        let (mut found, mut expected) = (Vec::new(), Vec::new());
        for (row, slot) in step.row_slots().iter().enumerate() {
            let range = row * width..(row + 1) * width;
            if *slot < 0 {
                assert_eq!(bits(&before[range.clone()]), bits(&after[range]), "{what}: row {row} was touched");
            } else {
                found.extend(after[range.clone()].iter().map(|&value| f64::from(value)));
                expected.extend(range.map(|index| f64::from(before[index]) + delta[index]));
            }
        }
        let what = format!("{what}, out {width} (rows counted without base rows)");
        assert_close(&what, &found, &expected, width, BOUND);
    }
}

/// Ranks that differ by site and slot, with sites that an adapter does not touch; everything past a rank is NaN.
pub(crate) fn reads_nothing_past_the_rank(kernels: &dyn LoraKernels) {
    for dtype in DTYPES {
        let mut slots = Slots::new(dtype, 3, 64, &[(100, 70), (100, 1), (100, 33)]);
        for (slot, ranks) in [[5, 0, 17], [1, 64, 0], [0, 0, 0]].into_iter().enumerate() {
            for (site, rank) in ranks.into_iter().enumerate().filter(|(_, rank)| *rank > 0) {
                slots.put(slot, site, rank, (slot * 3 + site) as u64);
            }
        }
        let rows: Vec<_> = [vec![0], vec![1], vec![2], vec![], vec![1, 2, 0], vec![0]].map(|row| adapters(&row)).into();
        check_against_oracle(kernels, &slots, &step(&rows, 3, 1), &format!("ranks that differ, {dtype:?}"));
    }
}

/// An entry whose rank is 0 leaves the bits of its row.
pub(crate) fn rank_zero_touches_nothing(kernels: &dyn LoraKernels) {
    let mut slots = Slots::new(SlotDtype::F32, 2, 8, &[(20, 20), (20, 20)]);
    slots.put(0, 1, 8, 1);
    let step = step(&[adapters(&[0]), adapters(&[1])], 2, 0);
    let x = Values::new(1).vector(40);
    let before = Values::new(2).vector(40);
    let mut y = [before.clone(), before.clone()];
    bgmv(kernels, &slots, &step, &x, &mut y);
    assert_eq!(bits(&y[0]), bits(&before), "neither slot touches site 0");
    assert_eq!(bits(&y[1][20..]), bits(&before[20..]), "slot 1 touches no site");
    assert_ne!(bits(&y[1][..20]), bits(&before[..20]), "slot 0 touches site 1");
}

/// A row gives the same bits alone, in any company, in any group, and as part of a run.
pub(crate) fn rows_do_not_depend_on_company(kernels: &dyn LoraKernels) {
    const NUM_ROWS: usize = 150;
    for (dtype, rank) in DTYPES.into_iter().zip([16, 5, 70]) {
        let (in_features, out_features) = (1100, [131, 64]);
        let mut slots = Slots::new(dtype, 3, rank, &out_features.map(|out_features| (in_features, out_features)));
        slots.put_all(rank, 9);
        let x = Values::new(3).vector(NUM_ROWS * in_features);
        let before = out_features.map(|width| Values::new(4).vector(NUM_ROWS * width));

        // Each of these runs all rows with slot 1, one row a call, all in one call, in a run, in short runs.
        let slot = vec![adapters(&[1])];
        let mut alone = before.clone();
        for row in 0..NUM_ROWS {
            let mut y: Vec<_> =
                alone.iter().zip(out_features).map(|(y, width)| y[row * width..][..width].to_vec()).collect();
            bgmv(kernels, &slots, &step(&slot, 3, 0), &x[row * in_features..][..in_features], &mut y);
            for ((alone, y), width) in alone.iter_mut().zip(y).zip(out_features) {
                alone[row * width..][..width].copy_from_slice(&y);
            }
        }
        let mut together = before.clone();
        bgmv(kernels, &slots, &step(&vec![adapters(&[1]); NUM_ROWS], 3, 0), &x, &mut together);
        let mut run = before.clone();
        delta(kernels, &slots, 0..NUM_ROWS, &x, &mut run, NUM_ROWS);
        let mut short_runs = before.clone();
        for start in (0..NUM_ROWS).step_by(7) {
            delta(kernels, &slots, start..(start + 7).min(NUM_ROWS), &x, &mut short_runs, 3);
        }
        for (site, alone) in alone.iter().enumerate() {
            let what = format!("{dtype:?}, rank {rank}, site {site}");
            assert_eq!(bits(alone), bits(&together[site]), "{what}: alone and together");
            assert_eq!(bits(alone), bits(&run[site]), "{what}: alone and as a run");
            assert_eq!(bits(alone), bits(&short_runs[site]), "{what}: alone and as short runs");
        }

        // Rows of slot 1 among rows of other slots, base rows and rows with several entries.
        let mut company: Vec<_> =
            (0..NUM_ROWS).map(|row| adapters([&[1][..], &[0], &[], &[1], &[2, 0], &[1]][row % 6])).collect();
        company[8] = adapters(&[1]);
        let mut mixed = before.clone();
        bgmv(kernels, &slots, &step(&company, 3, 0), &x, &mut mixed);
        for (row, _) in company.iter().enumerate().filter(|(_, row)| **row == slot[0]) {
            for ((alone, mixed), width) in alone.iter().zip(&mixed).zip(out_features) {
                let range = row * width..(row + 1) * width;
                assert_eq!(bits(&alone[range.clone()]), bits(&mixed[range]), "{dtype:?}, row {row} in company");
            }
        }
    }
}

fn delta(
    kernels: &dyn LoraKernels,
    slots: &Slots,
    rows: std::ops::Range<usize>,
    x: &[f32],
    y: &mut [Vec<f32>],
    scratch_rows: usize,
) {
    let run = RowRun { slot: SlotId::new(1), rows };
    let run = DeltaRun { table: &slots.table(), run: &run, scale: 1.0, sites: &slots.sites };
    let x = inputs(&slots.sites, x);
    kernels.delta(run, x, &mut views(&slots.sites, y), &mut slots.buffer(scratch_rows)).expect("delta");
}

/// Several entries of a row are added in the order that the request gives, whatever the order of the slots.
pub(crate) fn entries_are_added_in_order(kernels: &dyn LoraKernels) {
    let mut slots = Slots::new(SlotDtype::F32, 4, 8, &[(64, 90)]);
    slots.put_all(8, 5);
    let x = Values::new(6).vector(64);
    let before = Values::new(7).vector(90);
    let order = [2, 0, 3, 0];
    let mut together = [before.clone()];
    bgmv(kernels, &slots, &step(&[adapters(&order)], 4, 0), &x, &mut together);

    let mut one_by_one = [before.clone()];
    for adapter in adapters(&order) {
        bgmv(kernels, &slots, &step(&[vec![adapter]], 4, 0), &x, &mut one_by_one);
    }
    assert_eq!(bits(&together[0]), bits(&one_by_one[0]));

    let mut reversed = [before];
    for adapter in adapters(&order).into_iter().rev() {
        bgmv(kernels, &slots, &step(&[vec![adapter]], 4, 0), &x, &mut reversed);
    }
    assert_ne!(bits(&together[0]), bits(&reversed[0]), "these values cannot tell one order from another");
}

/// A run touches its own rows only, and follows its scale.
pub(crate) fn a_run_keeps_to_its_rows(kernels: &dyn LoraKernels) {
    let mut slots = Slots::new(SlotDtype::Bf16, 2, 16, &[(31, 40)]);
    slots.put_all(12, 8);
    let x = Values::new(9).vector(10 * 31);
    let before = Values::new(10).vector(10 * 40);
    for rows in [0..0, 3..7, 9..10, 10..10] {
        let mut y = [before.clone()];
        delta(kernels, &slots, rows.clone(), &x, &mut y, 2);
        assert_eq!(bits(&y[0][..rows.start * 40]), bits(&before[..rows.start * 40]), "before {rows:?}");
        assert_eq!(bits(&y[0][rows.end * 40..]), bits(&before[rows.end * 40..]), "after {rows:?}");
        for row in rows {
            assert_ne!(bits(&y[0][row * 40..][..40]), bits(&before[row * 40..][..40]), "row {row}");
        }
    }
}

/// The number of threads and their schedule do not change a bit.
pub(crate) fn threads_do_not_change_bits(kernels: &dyn LoraKernels) {
    let features = [(1536, 700), (1536, 300), (1536, 64)];
    let mut slots = Slots::new(SlotDtype::Bf16, NUM_SLOTS, 64, &features);
    slots.put_all(48, 11);
    let step = step(&Pattern::Several.rows(40), NUM_SLOTS, 0);
    let x = Values::new(12).vector(40 * 1536);
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
        pool.install(|| {
            let mut y = features.map(|(_, width)| Values::new(13).vector(40 * width));
            bgmv(kernels, &slots, &step, &x, &mut y);
            delta(kernels, &slots, 3..40, &x, &mut y, 40);
            y.map(|y| bits(&y))
        })
    };
    let one = run(1);
    for threads in [2, 3, 8] {
        assert!(one == run(threads), "{threads} threads give other bits than one");
    }
}
