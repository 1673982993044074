//! Times of base products, and of shrink and expand, for comparing one commit with another on a quiet machine.
//!
//! `shares` says how close these come to what the machine allows. Weights here stay in a cache where they fit.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;
use lora_kernels::{Cpu, LoraKernels, Rows, RowsMut, ShrinkBuffer, ShrinkCapacity, SiteRef, SlotTable, WeightView};
use lora_math::rows::RowsCapacity;
use lora_math::{Features, RowAdapter, SiteEntry, SlotDtype, SlotId, StepRows};

/// The widest projections of SmolLM2-135M and Qwen3-0.6B.
const SHAPES: [Features; 2] =
    [Features { in_features: 576, out_features: 1536 }, Features { in_features: 1024, out_features: 3072 }];

fn base_products(criterion: &mut Criterion) {
    let cpu = Cpu::new();
    let mut group = criterion.benchmark_group("matmul bf16");
    for features in SHAPES {
        let Features { in_features, out_features } = features;
        let weight = vec![bf16::from_f32(0.25); in_features * out_features];
        let weight = WeightView::bf16(&weight, features).expect("sizes agree");
        for num_rows in [1, 8, 128] {
            let x = vec![0.5; num_rows * in_features];
            let mut y = vec![0.0; num_rows * out_features];
            group.throughput(Throughput::Elements((num_rows * in_features * out_features) as u64));
            group.bench_function(BenchmarkId::new(format!("{in_features}-{out_features}"), num_rows), |bencher| {
                bencher.iter(|| {
                    let x = Rows::new(&x, in_features).expect("whole rows");
                    let y = RowsMut::new(&mut y, out_features).expect("whole rows");
                    cpu.matmul(x, &weight, None, y)
                });
            });
        }
    }
}

fn adapters(criterion: &mut Criterion) {
    const NUM_ROWS: usize = 8;
    const RANK: usize = 16;
    let cpu = Cpu::new();
    let mut group = criterion.benchmark_group("shrink and expand bf16, rank 16, 8 rows");
    for features in SHAPES {
        let Features { in_features, out_features } = features;
        for num_slots in [1, 8] {
            let matrix = |values| vec![bf16::from_f32(0.125); values];
            let pairs: Vec<_> =
                (0..num_slots).map(|_| (matrix(RANK * in_features), matrix(out_features * RANK))).collect();
            let entries: Vec<_> = pairs
                .iter()
                .map(|(a, b)| SiteEntry { a: a.as_ptr() as u64, b: b.as_ptr() as u64, rank: RANK as u32, scaling: 1.0 })
                .collect();
            // SAFETY: entries and pairs outlive the table, have the site's sizes and are not written.
            let table = unsafe { SlotTable::from_raw(entries.as_ptr(), num_slots, 1, SlotDtype::Bf16) };
            let capacity = RowsCapacity { max_rows: NUM_ROWS, max_entries: NUM_ROWS, num_slots };
            let mut rows = StepRows::with_capacity(capacity);
            let slot = |row: usize| SlotId::new((row % num_slots) as u32);
            let adapters: Vec<_> = (0..NUM_ROWS).map(|row| [RowAdapter { slot: slot(row), scale: 1.0 }]).collect();
            rows.stamp(&adapters, NUM_ROWS).expect("a step that fits");
            let sites = [SiteRef { index: 0, features }];
            let x = vec![0.5; NUM_ROWS * in_features];
            let mut y = vec![0.0; NUM_ROWS * out_features];
            let mut h =
                ShrinkBuffer::new(ShrinkCapacity { max_entries: NUM_ROWS, max_sites: 1, max_rank: RANK }).unwrap();
            let id = BenchmarkId::new(format!("{in_features}-{out_features}"), format!("{num_slots} adapters"));
            group.bench_function(id, |bencher| {
                bencher.iter(|| {
                    let x = Rows::new(&x, in_features).expect("whole rows");
                    cpu.shrink(&table, &rows, &sites, x, &mut h)?;
                    let y = RowsMut::new(&mut y, out_features).expect("whole rows");
                    cpu.expand(&table, &rows, &sites, &h, &mut [y])
                });
            });
        }
    }
}

criterion_group!(benches, base_products, adapters);
criterion_main!(benches);
