//! The tensor file: names, halves, shapes, values, and headers of every bad kind.

use half::{bf16, f16};
use lora_adapter::{Adapter, Feature, FileDtype, MatrixError, Reason};
use lora_math::{Module, Site};
use serde_json::json;

use crate::support::{Tensor, config, config_with, file, load, load_bytes, name, pair, qv, raw_file, reasons, tensor};

fn renamed(rename: impl Fn(&str) -> String) -> Vec<Tensor> {
    qv().into_iter().map(|tensor| Tensor { name: rename(&tensor.name), ..tensor }).collect()
}

#[test]
fn tensors_that_belong_nowhere_are_refused() {
    for (extra, part) in [
        (name(0, "self_attn.zz_proj", "A"), "module"),
        (name(0, "self_attn.q_proj", "C"), "suffix"),
        (name(0, "self_attn.q_proj", "a"), "suffix"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_typo".into(), "suffix"),
        ("base_model.model.model.layers.x.self_attn.q_proj.lora_A.weight".into(), "layer index"),
        ("base_model.model.model.layers.00.self_attn.q_proj.lora_A.weight".into(), "layer index"),
        ("base_model.model.model.layers.99999999999999999999.mlp.up_proj.lora_A.weight".into(), "layer index"),
        ("base_model.model.transformer.h.0.attn.c_attn.lora_A.weight".into(), "module"),
        ("weird".into(), "prefix"),
        ("".into(), "prefix"),
    ] {
        let mut tensors = qv();
        tensors.push(tensor(extra.as_str(), &[4, 8]));
        let found = reasons(load(&config(), &tensors));
        assert_eq!(found, [Reason::UnknownTensor { tensor: extra, part }]);
    }
}

#[test]
fn known_tensors_of_other_kinds_are_refused_by_name() {
    for (module, feature) in [
        ("mlp.experts.lora_magnitude_vector", Feature::Dora),
        ("mlp.experts.lora_B.bias", Feature::LoraBias),
        ("mlp.experts.bias", Feature::TrainedBias),
        ("mlp.experts.base_layer.weight", Feature::BaseWeightCopy),
        ("mlp.experts.weight", Feature::ReplacedModule),
        ("self_attn.qkv_proj.lora_A.weight", Feature::FusedProjection),
        ("mlp.gate_up_proj.lora_A.weight", Feature::FusedProjection),
    ] {
        let name = format!("base_model.model.model.layers.0.{module}");
        let mut tensors = qv();
        tensors.push(tensor(name.as_str(), &[4]));
        let found = reasons(load(&config(), &tensors));
        assert_eq!(found, [Reason::UnsupportedTensors { feature, num_tensors: 1, tensor: name }]);
    }
}

#[test]
fn half_pairs_are_refused() {
    for (gone, kept, missing) in [(0, "B", "A"), (1, "A", "B")] {
        let mut tensors = qv();
        tensors.remove(gone);
        let (tensor, missing) = (name(0, "self_attn.q_proj", kept), name(0, "self_attn.q_proj", missing));
        assert_eq!(reasons(load(&config(), &tensors)), [Reason::HalfPair { tensor, missing }]);
    }
    let adapter = load(&config(), &qv()[2..]).expect("both halves of a target may be absent");
    assert_eq!(adapter.pairs().len(), 3);
    assert!(adapter.pair(Site::layer(0, Module::QProj)).is_none());
}

#[test]
fn empty_files_and_tensors_are_refused() {
    let empty = raw_file(r#"{"__metadata__":{"format":"pt"}}"#, b"");
    assert_eq!(empty.len(), 40);
    let found = reasons(load_bytes(config().to_string().as_bytes(), &empty));
    assert_eq!(found, [Reason::NoPairs { num_tensors: 0 }]);

    let hollow = |wanted: fn(&str) -> bool| {
        let hollow = |tensor: Tensor| match wanted(&tensor.name) {
            true => Tensor { shape: vec![0], bytes: Vec::new(), ..tensor },
            false => tensor,
        };
        reasons(load(&config(), &qv().into_iter().map(hollow).collect::<Vec<_>>()))
    };
    let one = hollow(|name| name.contains("layers.1.self_attn.q_proj.lora_A"));
    assert_eq!(one, [Reason::EmptyTensor { tensor: name(1, "self_attn.q_proj", "A"), shape: vec![0] }]);
    let all = hollow(|name| name.contains("lora_B"));
    assert!(all.len() == 4 && all.iter().all(|reason| matches!(reason, Reason::EmptyTensor { .. })), "{all:?}");

    let mut with_placeholder = qv();
    let placeholder = "base_model.model.model.layers.0.mlp.experts.0.w3.lora_A.weight";
    with_placeholder.push(tensor(placeholder, &[0]));
    let found = reasons(load(&config(), &with_placeholder));
    assert!(matches!(&found[..], [Reason::HalfPair { .. }, Reason::EmptyTensor { .. }]), "{found:?}");
}

#[test]
fn pairs_of_shapes_that_do_not_meet_are_refused() {
    let transposed = pair(0, "self_attn.q_proj", [4, 8, 8]);
    let mut tensors = qv();
    tensors[1] = transposed[1].clone();
    let found = reasons(load(&config(), &tensors));
    let expected = Reason::PairMismatch {
        a: name(0, "self_attn.q_proj", "A"),
        a_shape: [4, 8],
        b: name(0, "self_attn.q_proj", "B"),
        b_shape: [4, 8],
    };
    assert_eq!(found, [expected]);
    for shape in [&[4][..], &[], &[1, 4, 8]] {
        let mut tensors = qv();
        tensors[0] = tensor(tensors[0].name.as_str(), shape);
        let shape = shape.iter().map(|&dim| dim as u64).collect();
        let found = reasons(load(&config(), &tensors));
        assert_eq!(found, [Reason::NotAMatrix { tensor: name(0, "self_attn.q_proj", "A"), shape }]);
    }
}

#[test]
fn every_rank_up_to_512_loads_and_no_other() {
    for rank in [1, 2, 3, 7, 64, 511, 512] {
        let adapter = load(&config_with(json!({"r": rank})), &pair(0, "mlp.up_proj", [6, rank, 5])).unwrap();
        assert_eq!(adapter.max_rank(), rank);
    }
    let found = reasons(load(&config_with(json!({"r": 512})), &pair(0, "mlp.up_proj", [6, 513, 5])));
    let expected = Reason::RankTooLarge { tensor: name(0, "mlp.up_proj", "A"), found: 513, max: 512 };
    assert_eq!(found, [expected]);
}

fn converted(tensor: &Tensor, dtype: &'static str) -> Tensor {
    let (values, _) = tensor.bytes.as_chunks::<4>();
    let bytes = values.iter().flat_map(|raw| {
        let value = f32::from_le_bytes(*raw);
        match dtype {
            "F64" => f64::from(value).to_le_bytes().to_vec(),
            "F16" => f16::from_f32(value).to_le_bytes().to_vec(),
            "BF16" => bf16::from_f32(value).to_le_bytes().to_vec(),
            "I8" => vec![value as i8 as u8],
            "F8_E8M0" => vec![0x38],
            _ => raw.to_vec(),
        }
    });
    Tensor { dtype, bytes: bytes.collect(), ..tensor.clone() }
}

/// The values of `qv` are multiples of 1/8 below 2, exact in every dtype.
#[test]
fn every_float_dtype_loads_with_the_same_values() {
    let values =
        |adapter: &Adapter| adapter.pairs().map(|(_, pair)| (pair.a().to_f32(), pair.b().to_f32())).collect::<Vec<_>>();
    let plain = load(&config(), &qv()).unwrap();
    let each = [("F64", FileDtype::F64), ("F32", FileDtype::F32), ("F16", FileDtype::F16), ("BF16", FileDtype::Bf16)];
    for (name, dtype) in each {
        let tensors: Vec<Tensor> = qv().iter().map(|tensor| converted(tensor, name)).collect();
        let adapter = load(&config(), &tensors).unwrap();
        assert_eq!(values(&adapter), values(&plain), "{name}");
        assert!(adapter.pairs().all(|(_, pair)| pair.a().dtype() == dtype && pair.b().dtype() == dtype));
    }
    let mixed =
        |tensor: &Tensor| if tensor.name.contains("lora_B") { converted(tensor, "BF16") } else { tensor.clone() };
    let adapter = load(&config(), &qv().iter().map(mixed).collect::<Vec<_>>()).unwrap();
    assert_eq!(values(&adapter), values(&plain));
    let dtypes = adapter.pairs().map(|(_, pair)| (pair.a().dtype(), pair.b().dtype())).next();
    assert_eq!(dtypes, Some((FileDtype::F32, FileDtype::Bf16)));
}

#[test]
fn other_dtypes_are_refused() {
    for dtype in ["I8", "F8_E8M0"] {
        let mut tensors = qv();
        tensors[0] = converted(&tensors[0], dtype);
        let found = reasons(load(&config(), &tensors));
        let tensor = name(0, "self_attn.q_proj", "A");
        assert_eq!(found, [Reason::UnsupportedDtype { tensor, dtype: dtype.into() }]);
    }
}

#[test]
fn values_that_are_not_finite_are_refused_where_they_stand() {
    for (dtype, bad) in [
        ("F32", f32::NAN.to_le_bytes().to_vec()),
        ("F32", f32::NEG_INFINITY.to_le_bytes().to_vec()),
        ("F64", f64::INFINITY.to_le_bytes().to_vec()),
        ("F16", f16::NAN.to_le_bytes().to_vec()),
        ("BF16", bf16::INFINITY.to_le_bytes().to_vec()),
    ] {
        let mut tensors = qv();
        tensors[3] = converted(&tensors[3], dtype);
        let at = 9 * bad.len();
        tensors[3].bytes[at..at + bad.len()].copy_from_slice(&bad);
        let found = reasons(load(&config(), &tensors));
        let expected = name(0, "self_attn.v_proj", "B");
        assert!(
            matches!(&found[..], [Reason::Matrix(MatrixError::NonFinite { tensor, row: 2, col: 1, .. })]
                if **tensor == *expected),
            "{found:?}"
        );
    }
}

fn refuse_header(header: &str, data: &[u8]) -> Vec<Reason> {
    reasons(load_bytes(config().to_string().as_bytes(), &raw_file(header, data)))
}

#[test]
fn headers_that_lie_are_refused() {
    let entry = |name: &str, shape: &str, begin: u64, end: u64| {
        format!(r#""{name}":{{"dtype":"F32","shape":{shape},"data_offsets":[{begin},{end}]}}"#)
    };
    let a = name(0, "self_attn.q_proj", "A");
    let b = name(0, "self_attn.q_proj", "B");
    let twice = format!("{{{},{}}}", entry(&a, "[1,2]", 0, 8), entry(&a, "[1,2]", 0, 8));
    assert!(refuse_header(&twice, &[0; 8]).contains(&Reason::DuplicateTensor { tensor: a.clone() }));
    let overlap = format!("{{{},{}}}", entry(&a, "[1,2]", 0, 8), entry(&b, "[2,1]", 4, 12));
    assert_eq!(refuse_header(&overlap, &[0; 12]), [Reason::BadStart { tensor: b.clone(), expected: 8, found: 4 }]);
    let gap = format!("{{{},{}}}", entry(&a, "[1,2]", 0, 8), entry(&b, "[2,1]", 12, 20));
    assert_eq!(refuse_header(&gap, &[0; 20]), [Reason::BadStart { tensor: b.clone(), expected: 8, found: 12 }]);
    let backwards = format!("{{{}}}", entry(&a, "[1,2]", 8, 0));
    assert_eq!(refuse_header(&backwards, &[0; 8]), [Reason::BadOffsets { tensor: a.clone(), begin: 8, end: 0 }]);
    let far = format!("{{{}}}", entry(&a, "[1,2]", u64::MAX - 8, u64::MAX));
    let found = refuse_header(&far, &[0; 8]);
    assert!(matches!(found[..], [Reason::BadStart { .. }, Reason::Truncated { .. }]), "{found:?}");
    let small = format!("{{{}}}", entry(&a, "[3,2]", 0, 8));
    assert!(matches!(&refuse_header(&small, &[0; 8])[..], [Reason::WrongByteCount { found_bytes: 8, .. }]));
    let huge = format!("{{{}}}", entry(&a, "[4294967296,4294967296,4294967296]", 0, 8));
    assert!(matches!(&refuse_header(&huge, &[0; 8])[..], [Reason::WrongByteCount { .. }]));
    let longer = format!("{{{}}}", entry(&a, "[1,2]", 0, 8));
    assert!(matches!(&refuse_header(&longer, &[0; 9])[..], [Reason::TrailingBytes { .. }]));
    let unknown = longer.replace("F32", "F37");
    assert!(
        matches!(&refuse_header(&unknown, &[0; 8])[..], [Reason::UnsupportedDtype { dtype, .. }] if dtype == "F37")
    );
    for header in ["[]", "{", "", "{\"a\":1}", "\u{1}", r#"{"__metadata__":{"a":1}}"#] {
        assert!(matches!(&refuse_header(header, b"")[..], [Reason::BadHeader { .. }]), "{header}");
    }
    let more = longer.replace("\"shape\"", "\"strides\":[1],\"shape\"");
    assert!(matches!(&refuse_header(&more, &[0; 8])[..], [Reason::BadHeader { .. }]));
    let negative = longer.replace("[1,2]", "[-1,2]");
    assert!(matches!(&refuse_header(&negative, &[0; 8])[..], [Reason::BadHeader { .. }]));
}

#[test]
fn lengths_that_lie_are_refused() {
    let config = config().to_string();
    for length in [1 << 63, u64::MAX, 100_000_001] {
        let found = reasons(load_bytes(config.as_bytes(), &[&u64::to_le_bytes(length)[..], b"{}"].concat()));
        assert_eq!(found, [Reason::HeaderTooLong { found_bytes: length, limit_bytes: 100_000_000 }]);
    }
    let found = reasons(load_bytes(config.as_bytes(), &[&u64::to_le_bytes(3)[..], b"{}"].concat()));
    assert_eq!(found, [Reason::Truncated { expected_bytes: 11, found_bytes: 10 }]);
    let whole = file(&qv());
    for cut in [0, 7, 8, 100, whole.len() - 1] {
        let found = reasons(load_bytes(config.as_bytes(), &whole[..cut]));
        assert!(
            matches!(found[..], [Reason::Truncated { expected_bytes, found_bytes }]
                if found_bytes == cut as u64 && expected_bytes > found_bytes),
            "{cut}: {found:?}"
        );
    }
}

#[test]
fn a_hundred_thousand_bad_tensors_give_bounded_reasons() {
    let entry = |index: usize| format!(r#""t{index}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#);
    let header = format!("{{{}}}", (0..100_000).map(entry).collect::<Vec<_>>().join(","));
    let error = load_bytes(config().to_string().as_bytes(), &raw_file(&header, b"")).unwrap_err();
    assert_eq!((error.reasons().count(), error.num_omitted()), (1000, 99_000));
}

#[test]
fn the_order_of_keys_does_not_change_the_digest() {
    let plain = load(&config(), &qv()).unwrap();
    let mut reversed = qv();
    reversed.reverse();
    assert_eq!(load(&config(), &reversed).unwrap(), plain);
    let same_scaling = load(&config_with(json!({"lora_alpha": 4, "use_rslora": true})), &qv()).unwrap();
    assert_eq!(same_scaling.content(), plain.content());
    let other_scaling = load(&config_with(json!({"lora_alpha": 9})), &qv()).unwrap();
    assert_ne!(other_scaling.content(), plain.content());
    let mut other_value = qv();
    other_value[0].bytes[0] ^= 1;
    assert_ne!(load(&config(), &other_value).unwrap().content(), plain.content());
    let other_place = renamed(|name| name.replace("v_proj", "k_proj"));
    assert_ne!(load(&config(), &other_place).unwrap().content(), plain.content());
    let other_dtype: Vec<Tensor> = qv().iter().map(|tensor| converted(tensor, "BF16")).collect();
    assert_ne!(load(&config(), &other_dtype).unwrap().content(), plain.content());
}

/// More than one segment and more than one thread: every matrix still gets its own bytes.
#[test]
fn large_files_are_read_like_small_ones() {
    let tensors: Vec<Tensor> = (0..12).flat_map(|layer| pair(layer, "mlp.down_proj", [512, 64, 2048])).collect();
    let adapter = load(&config_with(json!({"r": 64})), &tensors).unwrap();
    assert_eq!(adapter.pairs().len(), 12);
    for tensor in &tensors {
        let matrix = adapter.pairs().flat_map(|(_, pair)| [pair.a(), pair.b()]).find(|m| m.tensor() == tensor.name);
        assert!(matrix.unwrap().bytes() == tensor.bytes, "{}", tensor.name);
    }
    let one = load(&config_with(json!({"r": 64})), &tensors[10..12]).unwrap();
    let site = Site::layer(5, Module::DownProj);
    assert_eq!(one.pair(site), adapter.pair(site));
}
