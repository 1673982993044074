//! Rotary tables against transformers' own, for every scaling rule (`golden/rope.py` makes the numbers).

use std::fs;
use std::path::Path;

use model_engine::checkpoint::ModelConfig;
use model_engine::checkpoint::config::{RopeConfig, RopeScaling};
use model_engine::rope::{RopeError, RopeTable};
use serde_json::Value;

/// f32 powers and cosines of two mathematical libraries differ by a few units in the last place.
const RELATIVE: f32 = 1e-6;

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap() as f32).collect()
}

#[test]
fn tables_match_transformers_for_every_scaling() {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/rope.json")).unwrap();
    let cases: Vec<Value> = serde_json::from_str(&text).unwrap();
    assert_eq!(cases.len(), 8);
    for case in &cases {
        let name = case["name"].as_str().unwrap();
        let config = ModelConfig::from_hf_json(&case["config"].to_string(), None).unwrap();
        let length = case["sequence_length"].as_u64().unwrap() as usize;
        let position = case["position"].as_u64().unwrap() as usize;
        let table = RopeTable::new(&config.rope, config.head_dim, length).unwrap();
        let (mut cos, mut sin) = (vec![0.0; config.head_dim / 2], vec![0.0; config.head_dim / 2]);
        table.write_cos_sin(position, length, &mut cos, &mut sin);

        let beyond = table.max_fixed_length().is_some_and(|longest| length > longest);
        if !beyond {
            assert_eq!((&cos[..], &sin[..]), table.cos_sin(position), "{name}");
            for (found, expected) in table.inv_freq().iter().zip(numbers(&case["inv_freq"])) {
                assert!((found - expected).abs() <= RELATIVE * expected, "{name}: {found} {expected}");
            }
        }
        let factor = case["attention_factor"].as_f64().unwrap() as f32;
        assert!((table.attention_factor() - factor).abs() <= RELATIVE, "{name}");
        // The angle carries the relative error of the frequency times its own size.
        for (found, expected) in cos.iter().chain(&sin).zip(numbers(&case["cos"]).iter().chain(&numbers(&case["sin"])))
        {
            let bound = 2e-7 * position as f32 + RELATIVE;
            assert!((found - expected).abs() <= bound, "{name}: {found} {expected}");
        }
    }
}

#[test]
fn a_grown_table_equals_one_made_at_once() {
    let config = RopeConfig { theta: 10_000.0, scaling: RopeScaling::Default };
    let mut grown = RopeTable::new(&config, 8, 3).unwrap();
    grown.reserve(10);
    grown.reserve(5);
    let whole = RopeTable::new(&config, 8, 10).unwrap();
    assert_eq!(grown.num_positions(), 10);
    for position in 0..10 {
        assert_eq!(grown.cos_sin(position), whole.cos_sin(position));
    }
}

#[test]
fn divisors_divide_each_frequency() {
    let scaling = RopeScaling::Divisors(vec![1.0, 2.0, 4.0, 8.0]);
    let divided = RopeTable::new(&RopeConfig { theta: 10_000.0, scaling }, 8, 0).unwrap();
    let plain = RopeTable::new(&RopeConfig { theta: 10_000.0, scaling: RopeScaling::Default }, 8, 0).unwrap();
    for (index, (divided, plain)) in divided.inv_freq().iter().zip(plain.inv_freq()).enumerate() {
        assert_eq!(*divided, plain / (1 << index) as f32);
    }
}

#[test]
fn numbers_outside_a_rule_are_refused_by_name() {
    let table = |theta, scaling, head_dim| RopeTable::new(&RopeConfig { theta, scaling }, head_dim, 1).unwrap_err();
    assert_eq!(table(1e4, RopeScaling::Default, 7), RopeError::HeadDim { head_dim: 7 });
    assert_eq!(table(1e4, RopeScaling::Divisors(vec![1.0]), 8), RopeError::NumDivisors { expected: 4, found: 1 });
    for error in [
        table(f64::NAN, RopeScaling::Default, 8),
        table(-1.0, RopeScaling::Default, 8),
        table(1e4, RopeScaling::Linear { factor: 0.0 }, 8),
        table(1e4, RopeScaling::Dynamic { factor: 2.0, max_position_embeddings: 0 }, 8),
        table(1e4, RopeScaling::Divisors(vec![1.0, 0.0, 1.0, 1.0]), 8),
    ] {
        assert!(matches!(error, RopeError::OutOfRange { .. }), "{error}");
    }
}
