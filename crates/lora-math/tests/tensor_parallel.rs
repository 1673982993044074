//! Tensor-parallel cuts: the ranks' deltas, put side by side or summed, are the whole delta; and sizes that cannot be
//! cut are told apart.

use lora_math::tensor_parallel::{AttentionHeads, CutUnits, PairCut, TensorParallel, TensorParallelError};
use lora_math::{Features, Module};
use proptest::prelude::*;

/// 4 query heads and 2 KV heads of 3 features, model width 10, MLP width 24.
const HEADS: AttentionHeads = AttentionHeads { num_heads: 4, num_kv_heads: 2 };
const HEAD_FEATURES: usize = 3;
const HIDDEN_SIZE: usize = 10;
const INTERMEDIATE_SIZE: usize = 24;

const COLUMN_PARALLEL: [Module; 5] = [Module::QProj, Module::KProj, Module::VProj, Module::GateProj, Module::UpProj];
const ROW_PARALLEL: [Module; 2] = [Module::OProj, Module::DownProj];

fn features(module: Module) -> Features {
    let (in_features, out_features) = match module {
        Module::QProj => (HIDDEN_SIZE, 4 * HEAD_FEATURES),
        Module::KProj | Module::VProj => (HIDDEN_SIZE, 2 * HEAD_FEATURES),
        Module::OProj => (4 * HEAD_FEATURES, HIDDEN_SIZE),
        Module::GateProj | Module::UpProj => (HIDDEN_SIZE, INTERMEDIATE_SIZE),
        _ => (INTERMEDIATE_SIZE, HIDDEN_SIZE),
    };
    Features { in_features, out_features }
}

fn cut(module: Module, rank: usize, size: usize) -> PairCut {
    let tp = TensorParallel::new(rank, size).unwrap();
    tp.cut(module, features(module), CutUnits::with_attention(HEADS)).unwrap()
}

/// A pair, row-major, with an input.
#[derive(Clone, Debug)]
struct Pair {
    lora_rank: usize,
    a: Vec<f64>,
    b: Vec<f64>,
    x: Vec<f64>,
}

fn pair(module: Module) -> impl Strategy<Value = Pair> {
    let Features { in_features, out_features } = features(module);
    let values = |count| prop::collection::vec(-1.0..1.0f64, count);
    prop_oneof![Just(4), Just(6)].prop_flat_map(move |lora_rank| {
        (values(lora_rank * in_features), values(out_features * lora_rank), values(in_features))
            .prop_map(move |(a, b, x)| Pair { lora_rank, a, b, x })
    })
}

impl Pair {
    /// B·A·x over the columns of A and the rows of B that `cut` names.
    fn delta(&self, cut: &PairCut) -> Vec<f64> {
        let in_features = self.x.len();
        let columns = || cut.a_columns.iter().cloned().flatten();
        let h: Vec<f64> = (0..self.lora_rank)
            .map(|k| columns().map(|column| self.a[k * in_features + column] * self.x[column]).sum())
            .collect();
        let rows = cut.b_rows.iter().cloned().flatten();
        rows.map(|row| (0..self.lora_rank).map(|k| self.b[row * self.lora_rank + k] * h[k]).sum()).collect()
    }

    /// B·A·x of the whole pair, without the code under test.
    fn whole_delta(&self, module: Module) -> Vec<f64> {
        let Features { in_features, out_features } = features(module);
        (0..out_features)
            .map(|row| {
                (0..self.lora_rank)
                    .map(|k| {
                        let a = &self.a[k * in_features..(k + 1) * in_features];
                        self.b[row * self.lora_rank + k] * a.iter().zip(&self.x).map(|(a, x)| a * x).sum::<f64>()
                    })
                    .sum()
            })
            .collect()
    }
}

fn assert_close(actual: &[f64], expected: &[f64], what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    for (index, (a, e)) in actual.iter().zip(expected).enumerate() {
        assert!((a - e).abs() < 1e-12, "{what}: {a} instead of {e} at {index}");
    }
}

fn any_pair(modules: &'static [Module]) -> impl Strategy<Value = (Module, Pair)> {
    prop::sample::select(modules).prop_flat_map(|module| pair(module).prop_map(move |pair| (module, pair)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn column_parallel_deltas_stand_side_by_side((module, pair) in any_pair(&COLUMN_PARALLEL)) {
        let whole = pair.whole_delta(module);
        for size in [1, 2, 4] {
            // With 2 KV heads on 4 ranks every second rank repeats its neighbour.
            let replicas = if matches!(module, Module::KProj | Module::VProj) { (size / 2).max(1) } else { 1 };
            let mut side_by_side = Vec::new();
            for rank in 0..size {
                let delta = pair.delta(&cut(module, rank, size));
                if rank % replicas == 0 {
                    side_by_side.extend(delta);
                } else {
                    prop_assert_eq!(&delta, &pair.delta(&cut(module, rank - rank % replicas, size)));
                }
            }
            assert_close(&side_by_side, &whole, &format!("{module} on {size} ranks"));
        }
    }

    #[test]
    fn row_parallel_deltas_sum((module, pair) in any_pair(&ROW_PARALLEL)) {
        let whole = pair.whole_delta(module);
        for size in [1, 2, 4] {
            let mut sum = vec![0.0; whole.len()];
            for rank in 0..size {
                for (total, value) in sum.iter_mut().zip(pair.delta(&cut(module, rank, size))) {
                    *total += value;
                }
            }
            assert_close(&sum, &whole, &format!("{module} on {size} ranks"));
        }
    }
}

#[test]
fn every_rank_holds_an_equal_part() {
    for module in COLUMN_PARALLEL.into_iter().chain(ROW_PARALLEL) {
        for size in [1, 2, 4] {
            let first = cut(module, 0, size).features();
            for rank in 1..size {
                assert_eq!(cut(module, rank, size).features(), first, "{module}, rank {rank} of {size}");
            }
        }
        assert_eq!(cut(module, 0, 1).features(), features(module));
    }
}

/// Every rank holds the KV head that its query heads attend to: query head q attends to KV head q / (heads / KV heads).
#[test]
fn kv_heads_follow_query_heads() {
    for (num_heads, num_kv_heads) in [(4, 2), (8, 1), (8, 2), (8, 4), (8, 8), (12, 4)] {
        let units = CutUnits::with_attention(AttentionHeads { num_heads, num_kv_heads });
        let head = 5;
        for size in [1, 2, 4] {
            for rank in 0..size {
                let tp = TensorParallel::new(rank, size).unwrap();
                let rows = |module, heads: usize| {
                    let features = Features { in_features: 7, out_features: heads * head };
                    tp.cut(module, features, units).unwrap().b_rows[0].clone()
                };
                let (q, kv) = (rows(Module::QProj, num_heads), rows(Module::KProj, num_kv_heads));
                for query_head in q.start / head..q.end / head {
                    let wanted = query_head / (num_heads / num_kv_heads);
                    let held = kv.start / head..kv.end / head;
                    assert!(held.contains(&wanted), "{num_heads}/{num_kv_heads} heads, rank {rank} of {size}");
                }
            }
        }
    }
}

#[test]
fn doubled_queries_are_cut_in_whole_heads() {
    let features = Features { in_features: HIDDEN_SIZE, out_features: 4 * 2 * HEAD_FEATURES };
    let tp = TensorParallel::new(1, 4).unwrap();
    let cut = tp.cut(Module::QProj, features, CutUnits::with_attention(HEADS)).unwrap();
    assert_eq!((cut.b_rows.len(), &cut.b_rows[0]), (1, &(6..12)));
    assert_eq!((cut.a_columns.len(), &cut.a_columns[0]), (1, &(0..HIDDEN_SIZE)));
}

#[test]
fn sizes_that_cannot_be_cut() {
    use TensorParallelError::{Indivisible, MissingHeads, NoRule, RankOutOfRange, UnevenReplicas, UnevenUnits};

    assert_eq!(TensorParallel::new(2, 2), Err(RankOutOfRange { rank: 2, size: 2 }));
    assert_eq!(TensorParallel::new(0, 0), Err(RankOutOfRange { rank: 0, size: 0 }));
    assert_eq!(TensorParallel::new(0, 1), Ok(TensorParallel::SINGLE));

    let cut = |size, module, (in_features, out_features), units| {
        TensorParallel::new(0, size).unwrap().cut(module, Features { in_features, out_features }, units).unwrap_err()
    };
    let heads = |num_heads, num_kv_heads| CutUnits::with_attention(AttentionHeads { num_heads, num_kv_heads });
    let (q, k, o) = (Module::QProj, Module::KProj, Module::OProj);
    assert_eq!(cut(3, q, (10, 12), heads(4, 2)), Indivisible { module: q, units: 4, size: 3 });
    assert_eq!(cut(3, o, (12, 10), heads(4, 2)), Indivisible { module: o, units: 4, size: 3 });
    assert_eq!(cut(3, k, (10, 6), heads(6, 2)), UnevenReplicas { module: k, num_kv_heads: 2, size: 3 });
    assert_eq!(cut(2, k, (10, 7), heads(4, 2)), UnevenUnits { module: k, features: 7, units: 2 });
    assert_eq!(cut(2, k, (10, 6), heads(4, 0)), UnevenUnits { module: k, features: 6, units: 0 });
    assert_eq!(cut(2, q, (10, 12), CutUnits::default()), MissingHeads { module: q });
    let (gate, down) = (Module::GateProj, Module::DownProj);
    let none = CutUnits::default();
    assert_eq!(cut(5, gate, (10, 24), none), Indivisible { module: gate, units: 24, size: 5 });
    assert_eq!(cut(5, down, (24, 10), none), Indivisible { module: down, units: 24, size: 5 });
    assert_eq!(cut(2, Module::Router, (10, 4), none), NoRule { module: Module::Router });
}
