//! How close the CPU back end comes to what the machine allows, measured against probes in the same run.
//!
//! Not a criterion bench: on a machine that others load, a mean says how busy the others are. Here each round times two
//! probes (reading memory, multiply-adds in registers) and one call of the kernel, all short, and the table compares the
//! best of each over the rounds: share = floor / time, where the floor is the larger of bytes / bandwidth and
//! multiply-adds / peak. `RAYON_NUM_THREADS` sets the threads. Arguments that do not start with `--` pick lines by name.

use std::hint::black_box;
use std::time::Instant;

use half::bf16;
use lora_kernels::{
    Cpu, DeltaRun, LoraKernels, Rows, RowsMut, ShrinkBuffer, ShrinkCapacity, SiteRef, SlotTable, WeightView,
};
use lora_math::rows::RowsCapacity;
use lora_math::{Features, RowAdapter, RowRun, SiteEntry, SlotDtype, SlotId, StepRows};

const ROUNDS: usize = 100;
/// Read in turn with several copies of a weight, so that neither stays in a cache.
const PROBE_VALUES: usize = 64 << 20;
/// Bytes of copies of one weight.
const COPIES_BYTES: usize = 512 << 20;

fn main() {
    let picks: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    let picked = |name: &str| picks.is_empty() || picks.iter().any(|pick| name.contains(pick.as_str()));
    let cpu = Cpu::new();
    let probes = Probes::new();
    println!("{}, {} threads, best of {ROUNDS} rounds", cpu.isa().name(), rayon::current_num_threads());
    println!("{:<34} {:>10} {:>8} {:>8} {:>7}", "", "time", "GB/s", "GFLOP/s", "share");
    for (model, in_features, out_features) in [
        ("smollm2 576-1536", 576, 1536),
        ("smollm2 1536-576", 1536, 576),
        ("smollm2 head", 576, 49152),
        ("qwen3 1024-3072", 1024, 3072),
        ("qwen3 3072-1024", 3072, 1024),
    ] {
        let features = Features { in_features, out_features };
        for num_rows in [1, 2, 8, 16, 32, 512] {
            for dtype in [SlotDtype::F32, SlotDtype::Bf16] {
                let name = format!("{model} {} M {num_rows}", dtype.name());
                if picked(&name) && !(num_rows == 512 && out_features > 10_000) {
                    matmul(&name, cpu, &probes, features, num_rows, dtype);
                }
            }
        }
    }
    for (in_features, out_features) in [(1024, 3072), (3072, 1024)] {
        for (num_rows, num_slots) in [(1, 1), (8, 1), (8, 8), (16, 16), (512, 1)] {
            for rank in [8, 16, 64] {
                let name = format!("lora {in_features}-{out_features} rank {rank} M {num_rows}/{num_slots}");
                if picked(&name) {
                    lora(&name, cpu, &probes, Features { in_features, out_features }, num_rows, num_slots, rank);
                }
            }
        }
    }
}

/// What a kernel reads and computes.
struct Work {
    bytes: usize,
    mul_adds: usize,
}

struct Probes {
    memory: Vec<f32>,
}

impl Probes {
    fn new() -> Self {
        Probes { memory: vec![1.0; PROBE_VALUES] }
    }

    /// Bytes a second of all threads, over part `round` of the memory.
    fn bandwidth(&self, round: usize) -> f64 {
        let part = PROBE_VALUES / 32;
        let values = &self.memory[round % 32 * part..][..part];
        let threads = rayon::current_num_threads();
        let start = Instant::now();
        rayon::broadcast(|context| {
            let share = part / threads;
            black_box(sum(&values[context.index() * share..][..share]));
        });
        (part * 4) as f64 / start.elapsed().as_secs_f64()
    }

    /// Multiply-adds a second of all threads, from a product whose operands stay in the first-level cache.
    fn peak(&self) -> f64 {
        const STEPS: usize = 20_000;
        let start = Instant::now();
        let lanes: usize = rayon::broadcast(|_| spin(STEPS)).into_iter().sum();
        (STEPS * lanes) as f64 / start.elapsed().as_secs_f64()
    }
}

fn sum(values: &[f32]) -> f32 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the machine has the instruction set.
        return unsafe { sum_avx512(values) };
    }
    values.chunks_exact(64).map(|chunk| chunk[0] + chunk[16] + chunk[32] + chunk[48]).sum()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn sum_avx512(values: &[f32]) -> f32 {
    use std::arch::x86_64::*;
    let mut sums = [_mm512_setzero_ps(); 8];
    for chunk in values.as_chunks::<128>().0 {
        for (lane, sum) in sums.iter_mut().enumerate() {
            // SAFETY: the chunk has 8 vectors.
            *sum = _mm512_add_ps(*sum, unsafe { _mm512_loadu_ps(chunk.as_ptr().add(16 * lane)) });
        }
    }
    sums.into_iter().map(|sum| _mm512_reduce_add_ps(sum)).sum()
}

/// Runs `steps` of independent multiply-adds; gives the number of multiply-adds of a step.
fn spin(steps: usize) -> usize {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the machine has the instruction set.
        unsafe { spin_avx512(steps) };
        return 16 * 16;
    }
    let mut sums = [1.0f32; 64];
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = *sum * 0.999 + 0.001;
        }
        black_box(&mut sums);
    }
    64
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn spin_avx512(steps: usize) {
    use std::arch::x86_64::*;
    let (a, b) = (_mm512_set1_ps(black_box(0.999)), _mm512_set1_ps(black_box(0.001)));
    let mut sums = [_mm512_set1_ps(1.0); 16];
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = _mm512_fmadd_ps(*sum, a, b);
        }
    }
    black_box(sums.map(|sum| _mm512_reduce_add_ps(sum)));
}

/// Times `kernel` beside the probes, round by round, and prints its line.
fn line(name: &str, probes: &Probes, work: Work, mut kernel: impl FnMut(usize)) {
    let (mut time, mut bandwidth, mut peak) = (f64::INFINITY, 0f64, 0f64);
    for round in 0..ROUNDS {
        bandwidth = bandwidth.max(probes.bandwidth(round));
        peak = peak.max(probes.peak());
        let start = Instant::now();
        kernel(round);
        time = time.min(start.elapsed().as_secs_f64());
    }
    let floor = (work.bytes as f64 / bandwidth).max(work.mul_adds as f64 / peak);
    println!(
        "{name:<34} {:>8.1}us {:>8.1} {:>8.1} {:>6.0}%   of {:.1} GB/s, {:.0} GFLOP/s",
        time * 1e6,
        work.bytes as f64 / time / 1e9,
        2.0 * work.mul_adds as f64 / time / 1e9,
        floor / time * 100.0,
        bandwidth / 1e9,
        2.0 * peak / 1e9
    );
}

fn matmul(name: &str, cpu: Cpu, probes: &Probes, features: Features, num_rows: usize, dtype: SlotDtype) {
    let Features { in_features, out_features } = features;
    let values = in_features * out_features;
    let bytes = values * dtype.bytes();
    let copies = (COPIES_BYTES / bytes).max(1);
    let x = vec![0.5f32; num_rows * in_features];
    let mut y = vec![0.0f32; num_rows * out_features];
    let work = Work { bytes: bytes + 4 * (x.len() + y.len()), mul_adds: num_rows * values };
    let mut run = |weight: WeightView<'_>| {
        let x = Rows::new(&x, in_features).expect("whole rows");
        cpu.matmul(x, &weight, None, RowsMut::new(&mut y, out_features).expect("whole rows")).expect("matmul");
    };
    match dtype {
        SlotDtype::F32 => {
            let weights = vec![0.25f32; values * copies];
            let copy = |round: usize| &weights[round % copies * values..][..values];
            line(name, probes, work, |round| run(WeightView::f32(copy(round), features).expect("sizes agree")));
        }
        _ => {
            let weights = vec![bf16::from_f32(0.25); values * copies];
            let copy = |round: usize| &weights[round % copies * values..][..values];
            line(name, probes, work, |round| run(WeightView::bf16(copy(round), features).expect("sizes agree")));
        }
    }
}

/// Shrink and expand of one site (a delta where one slot has more than 8 rows), bf16; A and B in memory, not in cache.
fn lora(name: &str, cpu: Cpu, probes: &Probes, features: Features, num_rows: usize, num_slots: usize, rank: usize) {
    let Features { in_features, out_features } = features;
    let (a_values, b_values) = (rank * in_features, rank * out_features);
    let set = num_slots * (a_values + b_values);
    let copies = (COPIES_BYTES / 4 / (2 * set)).max(1);
    let memory = vec![bf16::from_f32(0.125); copies * set];
    let address = |index: usize| memory.as_ptr().wrapping_add(index) as u64;
    let entries: Vec<_> = (0..copies * num_slots)
        .map(|slot| slot * (a_values + b_values))
        .map(|start| SiteEntry { a: address(start), b: address(start + a_values), rank: rank as u32, scaling: 1.0 })
        .collect();
    let sites = [SiteRef { index: 0, features }];
    let mut rows = StepRows::with_capacity(RowsCapacity { max_rows: num_rows, max_entries: num_rows, num_slots });
    let adapters: Vec<_> =
        (0..num_rows).map(|row| [RowAdapter { slot: SlotId::new((row % num_slots) as u32), scale: 1.0 }]).collect();
    rows.stamp(&adapters, num_rows).expect("a step that fits");
    let x = vec![0.5f32; num_rows * in_features];
    let mut y = vec![0.0f32; num_rows * out_features];
    let mut h = ShrinkBuffer::new(ShrinkCapacity { max_entries: num_rows, max_sites: 1, max_rank: rank }).unwrap();
    let work = Work {
        bytes: 2 * set + 4 * num_rows * (in_features + 2 * out_features),
        mul_adds: num_rows * (a_values + b_values),
    };
    let run = RowRun { slot: SlotId::new(0), rows: 0..num_rows };
    line(name, probes, work, |round| {
        let first = &entries[round % copies * num_slots];
        // SAFETY: the entries and the memory that they point to outlive the call and are not written.
        let table = unsafe { SlotTable::from_raw(first, num_slots, 1, SlotDtype::Bf16) };
        let x = Rows::new(&x, in_features).expect("whole rows");
        let mut y = [RowsMut::new(&mut y, out_features).expect("whole rows")];
        if num_rows > 8 * num_slots {
            let run = DeltaRun { table: &table, run: &run, scale: 1.0, sites: &sites };
            cpu.delta(run, x, &mut y, &mut h).expect("delta");
        } else {
            cpu.shrink(&table, &rows, &sites, x, &mut h).expect("shrink");
            cpu.expand(&table, &rows, &sites, &h, &mut y).expect("expand");
        }
    });
}
