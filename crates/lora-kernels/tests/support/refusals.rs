//! Calls whose sizes do not agree: refused with the numbers, before anything is written.

use lora_kernels::{DeltaRun, KernelError, LoraKernels, Operand, Rows, RowsMut, ShrinkBuffer, ShrinkCapacity, SiteRef};
use lora_math::{Features, RowRun, SlotDtype, SlotId, StepRows};

use super::{Slots, Values, adapters, bits, inputs, step, views};

const WIDTHS: [(usize, usize); 2] = [(16, 24), (16, 8)];

fn slots() -> Slots {
    let mut slots = Slots::new(SlotDtype::F32, 2, 8, &WIDTHS);
    slots.put_all(8, 1);
    slots
}

fn two_rows() -> StepRows {
    step(&[adapters(&[0]), adapters(&[1])], 2, 1)
}

fn site(index: usize, in_features: usize, out_features: usize) -> SiteRef {
    SiteRef { index, features: Features { in_features, out_features } }
}

/// Shrinks and returns the error; h and what it says of itself must be as before.
fn shrink_error(
    kernels: &dyn LoraKernels,
    slots: &Slots,
    sites: &[SiteRef],
    num_rows: usize,
    h: &mut ShrinkBuffer,
) -> KernelError {
    let x = Values::new(2).vector(num_rows * 16);
    let before = format!("{h:?}");
    let error = kernels
        .shrink(&slots.table(), &two_rows(), sites, Rows::new(&x, 16).expect("whole rows"), h)
        .expect_err("sizes that do not agree");
    assert_eq!(format!("{h:?}"), before, "{error}");
    error
}

pub(crate) fn shrink(kernels: &dyn LoraKernels) {
    let mut slots = slots();
    let sites = slots.sites.clone();
    let buffer = |max_entries, max_sites, max_rank| {
        ShrinkBuffer::new(ShrinkCapacity { max_entries, max_sites, max_rank }).unwrap()
    };
    // The first product wraps to 0: a buffer of no values that says it holds all of these.
    for (max_entries, max_sites, max_rank) in [(1 << 62, 4, 4), (usize::MAX, 1, 2), (1 << 40, 1 << 10, 64)] {
        assert_eq!(
            ShrinkBuffer::new(ShrinkCapacity { max_entries, max_sites, max_rank }).unwrap_err(),
            KernelError::ShrinkBufferSize { max_entries, max_sites, max_rank }
        );
    }
    let error = |sites: &[SiteRef], rows, h: &mut ShrinkBuffer| shrink_error(kernels, &slots, sites, rows, h);

    assert_eq!(
        error(&sites, 2, &mut buffer(2, 2, 8)),
        KernelError::RowCount { operand: Operand::Input, expected: 3, found: 2 }
    );
    assert_eq!(
        error(&[site(0, 15, 24)], 3, &mut buffer(2, 2, 8)),
        KernelError::Width { operand: Operand::Input, expected: 15, found: 16 }
    );
    assert_eq!(
        error(&[site(2, 16, 24)], 3, &mut buffer(2, 2, 8)),
        KernelError::SiteOutOfRange { site: 2, num_sites: 2 }
    );
    assert_eq!(
        error(&sites, 3, &mut buffer(1, 2, 8)),
        KernelError::ShrinkTooLarge { entries: 2, sites: 2, max_entries: 1, max_sites: 2 }
    );
    assert_eq!(
        error(&sites, 3, &mut buffer(2, 1, 8)),
        KernelError::ShrinkTooLarge { entries: 2, sites: 2, max_entries: 2, max_sites: 1 }
    );
    assert_eq!(
        error(&sites, 3, &mut buffer(2, 2, 7)),
        KernelError::RankTooLarge { slot: 0, site: 0, rank: 8, max_rank: 7 }
    );
    slots.entry_mut(1, 1).b = 0;
    let error = shrink_error(kernels, &slots, &sites, 3, &mut buffer(2, 2, 8));
    assert_eq!(error, KernelError::NullAddress { slot: 1, site: 1, rank: 8 });

    let narrow = Slots::new(SlotDtype::F32, 1, 8, &WIDTHS);
    let error = shrink_error(kernels, &narrow, &sites, 3, &mut buffer(2, 2, 8));
    assert_eq!(error, KernelError::SlotOutOfRange { slot: 1, num_slots: 1 });
}

pub(crate) fn expand(kernels: &dyn LoraKernels) {
    let slots = slots();
    let sites = slots.sites.clone();
    let x = Values::new(2).vector(3 * 16);
    let mut h = slots.buffer(2);
    kernels.shrink(&slots.table(), &two_rows(), &sites, inputs(&sites, &x), &mut h).expect("shrink");
    let before = [Values::new(3).vector(3 * 24), Values::new(4).vector(3 * 8)];
    let error = |step: &StepRows, sites: &[SiteRef], h: &ShrinkBuffer, cut: [(usize, usize); 2], outputs: usize| {
        let mut y = before.clone();
        let mut y: Vec<_> = y
            .iter_mut()
            .zip(cut)
            .take(outputs)
            .map(|(y, (values, width))| RowsMut::new(&mut y[..values], width).expect("whole rows"))
            .collect();
        let error = kernels.expand(&slots.table(), step, sites, h, &mut y).expect_err("sizes that do not agree");
        for ((y, before), (values, _)) in y.iter_mut().zip(&before).zip(cut) {
            assert_eq!(bits(y.data_mut()), bits(&before[..values]), "{error}");
        }
        error
    };
    let fits = [(72, 24), (24, 8)];

    assert_eq!(error(&two_rows(), &sites, &h, fits, 1), KernelError::OutputCount { sites: 2, outputs: 1 });
    assert_eq!(
        error(&two_rows(), &sites, &h, [(72, 24), (16, 8)], 2),
        KernelError::RowCount { operand: Operand::Output, expected: 3, found: 2 }
    );
    assert_eq!(
        error(&two_rows(), &sites, &h, [(72, 24), (24, 4)], 2),
        KernelError::Width { operand: Operand::Output, expected: 8, found: 4 }
    );
    assert_eq!(
        error(&step(&[adapters(&[0]), vec![]], 2, 1), &sites, &h, fits, 2),
        KernelError::ShrinkMismatch { entries: 1, sites: 2, held_entries: 2, held_sites: 2 }
    );
    assert_eq!(
        error(&two_rows(), &sites[..1], &h, fits, 1),
        KernelError::ShrinkMismatch { entries: 2, sites: 1, held_entries: 2, held_sites: 2 }
    );
}

pub(crate) fn delta(kernels: &dyn LoraKernels) {
    let slots = slots();
    let x = Values::new(2).vector(4 * 16);
    let before = [Values::new(3).vector(4 * 24), Values::new(4).vector(4 * 8)];
    let error = |run: RowRun, scratch: &mut ShrinkBuffer| {
        let mut y = before.clone();
        let run = DeltaRun { table: &slots.table(), run: &run, scale: 1.0, sites: &slots.sites };
        let error = kernels
            .delta(run, inputs(&slots.sites, &x), &mut views(&slots.sites, &mut y), scratch)
            .expect_err("sizes that do not agree");
        assert!(y.iter().zip(&before).all(|(y, before)| bits(y) == bits(before)), "{error}");
        error
    };
    let run = |slot, rows| RowRun { slot: SlotId::new(slot), rows };

    assert_eq!(error(run(0, 2..5), &mut slots.buffer(4)), KernelError::RunOutOfRange { start: 2, end: 5, num_rows: 4 });
    assert_eq!(error(run(2, 0..4), &mut slots.buffer(4)), KernelError::SlotOutOfRange { slot: 2, num_slots: 2 });
    assert_eq!(
        error(run(0, 0..4), &mut slots.buffer(0)),
        KernelError::ShrinkTooLarge { entries: 1, sites: 2, max_entries: 0, max_sites: 2 }
    );
    let narrow = ShrinkCapacity { max_entries: 4, max_sites: 2, max_rank: 4 };
    assert_eq!(
        error(run(0, 0..4), &mut ShrinkBuffer::new(narrow).unwrap()),
        KernelError::RankTooLarge { slot: 0, site: 0, rank: 8, max_rank: 4 }
    );
}
