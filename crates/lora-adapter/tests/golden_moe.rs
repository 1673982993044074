//! Golden adapters of the mixture and hybrid models: every delta against what PEFT merges into the weights.
//!
//! `deltas.json` beside each adapter holds three numbers for every site, made by PEFT in float64 (see
//! `tests/golden/make`). A site that is missing, extra, in another order or of another side changes them all.

use std::collections::BTreeMap;
use std::path::PathBuf;

use lora_adapter::{Adapter, Dialect, GateUpOrder, LoraPair, Note};
use lora_math::Site;

const CASES: [(&str, &[&str]); 8] = [
    (
        "qwen3_moe",
        &[
            "all_linear",
            "tm_gate",
            "tp_both",
            "tp_both_unsloth_grouped",
            "tp_down",
            "tp_gu",
            "tp_patterns",
            "tp_router",
        ],
    ),
    ("mixtral", &["tm_w123", "tp_both"]),
    ("gpt_oss", &["all_linear", "tp_both"]),
    ("llama4", &["tp_both"]),
    ("qwen3_next", &["all_linear", "linear_attn", "tp_all"]),
    ("qwen3_5", &["all_linear"]),
    ("qwen3_5_moe", &["all_linear", "tp_all"]),
    ("Qwen3_5ForConditionalGeneration", &["qkv"]),
];

fn golden() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/adapters_moe")
}

/// The adapter as the engine of this model would ask for it.
fn open(kind: &str, case: &str) -> Adapter {
    let adapter =
        Adapter::open(&golden().join(kind).join(case)).unwrap_or_else(|error| panic!("{kind} {case}: {error}"));
    let order = if kind == "gpt_oss" { GateUpOrder::Interleaved } else { GateUpOrder::Concatenated };
    adapter.with_gate_up_order(order)
}

fn expected(kind: &str, case: &str) -> BTreeMap<String, [f64; 3]> {
    let text = std::fs::read_to_string(golden().join(kind).join(case).join("deltas.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// The fixed vectors of the script that made the numbers.
fn vector(length: usize, step: usize) -> Vec<f64> {
    (0..length).map(|index| (((index * step + index * index) % 17) as f64 - 8.0) / 8.0).collect()
}

fn numbers(pair: &LoraPair) -> [f64; 3] {
    let wide = |values: Vec<f32>| values.into_iter().map(f64::from).collect::<Vec<_>>();
    let (a, b) = (wide(pair.a().to_f32()), wide(pair.b().to_f32()));
    let (rank, inputs, outputs) = (pair.rank(), pair.in_features(), pair.out_features());
    let element = |out: usize, input: usize| {
        let products = (0..rank).map(|k| b[out * rank + k] * a[k * inputs + input]);
        f64::from(pair.scaling()) * products.sum::<f64>()
    };
    let delta: Vec<Vec<f64>> = (0..outputs).map(|out| (0..inputs).map(|input| element(out, input)).collect()).collect();
    let sum = |u: usize, v: usize| {
        let (u, v) = (vector(outputs, u), vector(inputs, v));
        let dot = |row: &Vec<f64>| row.iter().zip(&v).map(|(x, y)| x * y).sum::<f64>();
        delta.iter().zip(&u).map(|(row, u)| u * dot(row)).sum::<f64>()
    };
    let norm = delta.iter().flatten().map(|x| x * x).sum::<f64>().sqrt();
    [sum(3, 5), sum(7, 11), norm]
}

#[test]
fn every_delta_is_what_peft_merges() {
    let mut num_sites = 0;
    for (kind, cases) in CASES {
        for case in cases {
            let adapter = open(kind, case);
            let mut expected = expected(kind, case);
            num_sites += expected.len();
            for (site, pair) in adapter.pairs() {
                let found = numbers(pair);
                let expected = expected.remove(&site.to_string()).unwrap_or_else(|| panic!("{kind} {case}: {site}"));
                // Scalings are single precision here.
                let close = found.iter().zip(expected).all(|(found, expected)| (found - expected).abs() < 1e-5);
                assert!(close, "{kind} {case} {site}: {found:?}, PEFT has {expected:?}");
            }
            assert!(expected.is_empty(), "{kind} {case} lacks {expected:?}");
        }
    }
    assert!(num_sites > 500, "{num_sites} sites");
}

/// The name of the base model tells gpt-oss here; the engine's word stands above it.
#[test]
fn the_order_of_gate_and_up_can_be_told() {
    let open = |case: &str| Adapter::open(&golden().join(case)).unwrap();
    let named = open("gpt_oss/tp_both");
    let wrong = named.clone().with_gate_up_order(GateUpOrder::Concatenated);
    assert_ne!(wrong.content(), named.content());
    assert_eq!(wrong.with_gate_up_order(GateUpOrder::Interleaved), named);
    assert_eq!(named.clone().with_gate_up_order(GateUpOrder::Interleaved), named);
    for (kind, cases) in CASES {
        for case in cases {
            assert_eq!(open(&format!("{kind}/{case}")).notes(), naming(kind), "{kind} {case}");
        }
    }
}

fn naming(kind: &str) -> Vec<Note> {
    let wrapped = Note::OtherNaming { dialect: Dialect::LanguageModel, num_tensors: 14 };
    if kind.contains("Conditional") { vec![wrapped] } else { Vec::new() }
}

#[test]
fn gate_and_up_share_the_bytes_of_a() {
    let adapter = open("qwen3_moe", "tp_both");
    for (site, pair) in adapter.pairs() {
        let Site::Expert { layer, expert, module: lora_math::Module::ExpertGateProj } = site else { continue };
        let up = Site::Expert { layer, expert, module: lora_math::Module::ExpertUpProj };
        let up = adapter.pair(up).unwrap();
        assert_eq!(pair.a().bytes().as_ptr(), up.a().bytes().as_ptr());
        assert_ne!(pair.b(), up.b());
    }
}
