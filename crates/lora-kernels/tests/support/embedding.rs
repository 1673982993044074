//! The embedding's shrink: A read by token.

use half::{bf16, f16};
use lora_kernels::{KernelError, LoraKernels, RowsMut};
use lora_math::{SlotDtype, StepRows};

use super::bodies::DTYPES;
use super::{Slots, adapters, assert_close, bits, outputs, step};

const VOCAB_SIZE: usize = 37;
const WIDTH: usize = 24;

fn value(address: u64, dtype: SlotDtype, index: usize) -> f64 {
    let first = std::ptr::with_exposed_provenance::<u8>(address as usize);
    // SAFETY: the callers stay inside A and B of the entry whose address it is.
    unsafe {
        match dtype {
            SlotDtype::F32 => f64::from(first.cast::<f32>().add(index).read_unaligned()),
            SlotDtype::F16 => first.cast::<f16>().add(index).read_unaligned().to_f64(),
            SlotDtype::Bf16 => first.cast::<bf16>().add(index).read_unaligned().to_f64(),
        }
    }
}

fn slots(dtype: SlotDtype, rank: usize) -> Slots {
    let mut slots = Slots::new(dtype, 3, rank, &[(VOCAB_SIZE, WIDTH)]);
    slots.put_all(rank, 5);
    slots
}

fn run(kernels: &dyn LoraKernels, slots: &Slots, step: &StepRows, token_ids: &[u32], y: &mut [f32]) {
    let mut h = slots.buffer(step.entries().len());
    let site = slots.sites[0];
    kernels.gather(&slots.table(), step, &site, token_ids, &mut h).expect("gather");
    let y = RowsMut::new(y, WIDTH).expect("whole rows");
    kernels.expand(&slots.table(), step, &[site], &h, &mut [y]).expect("expand");
}

/// Against sums in f64, with padding rows, base rows and rows of several adapters; those without keep their bits.
pub(crate) fn gathers_by_token(kernels: &dyn LoraKernels) {
    for dtype in DTYPES {
        for rank in [1, 4, 16, 33] {
            let mut slots = slots(dtype, rank);
            // One adapter lacks the embedding.
            slots.entry_mut(1, 0).rank = 0;
            let rows = [vec![0], vec![], vec![2, 0], vec![1], vec![2]].map(|slots| adapters(&slots));
            let step = step(&rows, 3, 2);
            let token_ids = [36, 0, 5, 17, 0, u32::MAX, 3];
            let before = outputs(&step, WIDTH, 9);
            let mut after = before.clone();
            run(kernels, &slots, &step, &token_ids, &mut after);
            let (mut found, mut expected) = (Vec::new(), Vec::new());
            for (row, adapters) in rows.iter().enumerate() {
                let (before, after) = (&before[row * WIDTH..][..WIDTH], &after[row * WIDTH..][..WIDTH]);
                if adapters.iter().all(|adapter| adapter.slot.index() == 1) {
                    assert_eq!(bits(before), bits(after), "row {row}");
                    continue;
                }
                for (n, (before, after)) in before.iter().zip(after).enumerate() {
                    let delta = adapters.iter().map(|adapter| {
                        let entry = *slots.entry_mut(adapter.slot.index(), 0);
                        let token = token_ids[row] as usize;
                        let product = |r| value(entry.a, dtype, token * rank + r) * value(entry.b, dtype, n * rank + r);
                        let sum: f64 = (0..entry.rank as usize).map(product).sum();
                        f64::from(adapter.scale) * f64::from(entry.scaling) * sum
                    });
                    expected.push(f64::from(*before) + delta.sum::<f64>());
                    found.push(f64::from(*after));
                }
            }
            assert_eq!(bits(&before[5 * WIDTH..]), bits(&after[5 * WIDTH..]), "padding");
            assert_close(&format!("{dtype:?}, rank {rank}"), &found, &expected, WIDTH, 2e-6);
        }
    }
}

/// A token past the vocabulary is refused with its numbers, before h is written.
pub(crate) fn refuses_other_tokens(kernels: &dyn LoraKernels) {
    let slots = slots(SlotDtype::F32, 4);
    let step = step(&[adapters(&[0]), adapters(&[2])], 3, 0);
    let mut h = slots.buffer(2);
    let before = format!("{h:?}");
    let found = kernels.gather(&slots.table(), &step, &slots.sites[0], &[0, 37], &mut h);
    assert_eq!(found, Err(KernelError::TokenOutOfRange { row: 1, token_id: 37, vocab_size: 37 }));
    assert_eq!(format!("{h:?}"), before);
    assert!(kernels.gather(&slots.table(), &step, &slots.sites[0], &[0], &mut h).is_err(), "too few tokens");
}
