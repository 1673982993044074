//! Adapter against model: unknown layers and modules, wrong widths, all at once; and adapters made in memory.

use lora_adapter::{Adapter, LoraPair, Matrix, MatrixError, Misfit, Reason, prepare};
use lora_math::scaling::ScalingRule;
use lora_math::shape::{AttentionSize, LayerShape, MlpSize};
use lora_math::{Features, ModelShape, Module, Site};
use serde_json::json;

use crate::support::{config, config_with, load, name, pair, qv};

/// Attention on layer 0 only, the MLP on both.
fn hybrid() -> ModelShape {
    let mlp = MlpSize { hidden_size: 8, intermediate_size: 12 };
    let attention = AttentionSize { hidden_size: 8, q_features: 8, kv_features: 4, o_features: 8 };
    let layers = vec![LayerShape::new().with_attention(attention).with_mlp(mlp), LayerShape::new().with_mlp(mlp)];
    ModelShape::new(8, 32, layers).unwrap()
}

#[test]
fn every_misfit_is_told() {
    let mut tensors = pair(0, "self_attn.q_proj", [8, 4, 9]);
    tensors.extend(pair(0, "self_attn.v_proj", [5, 4, 7]));
    tensors.extend(pair(1, "self_attn.q_proj", [8, 4, 8]));
    tensors.extend(pair(1, "mlp.up_proj", [12, 4, 8]));
    tensors.extend(pair(99, "mlp.up_proj", [12, 4, 8]));
    let refusal = prepare(load(&config(), &tensors).unwrap(), &hybrid()).unwrap_err();
    let site = Site::layer;
    let expected = [
        Misfit::InFeatures {
            site: site(0, Module::QProj),
            expected: 8,
            found: 9,
            tensor: name(0, "self_attn.q_proj", "A"),
        },
        Misfit::InFeatures {
            site: site(0, Module::VProj),
            expected: 8,
            found: 7,
            tensor: name(0, "self_attn.v_proj", "A"),
        },
        Misfit::OutFeatures {
            site: site(0, Module::VProj),
            expected: 4,
            found: 5,
            tensor: name(0, "self_attn.v_proj", "B"),
        },
        Misfit::UnknownModule {
            site: site(1, Module::QProj),
            carried: vec![Module::GateProj, Module::UpProj, Module::DownProj],
            tensor: name(1, "self_attn.q_proj", "A"),
        },
        Misfit::UnknownLayer { site: site(99, Module::UpProj), num_layers: 2, tensor: name(99, "mlp.up_proj", "A") },
    ];
    assert_eq!(refusal.reasons, expected);
    assert_eq!(refusal.to_string().lines().count(), 6);
}

/// Every subset of q, k and v, and another one on each layer.
#[test]
fn parts_of_a_group_fit() {
    let modules = [("self_attn.q_proj", 8), ("self_attn.k_proj", 4), ("self_attn.v_proj", 4), ("mlp.gate_proj", 12)];
    for subset in 1..1 << modules.len() {
        let chosen = modules.iter().enumerate().filter(|(index, _)| subset >> index & 1 == 1);
        let mut tensors: Vec<_> = chosen.flat_map(|(_, (module, out))| pair(0, module, [*out, 4, 8])).collect();
        tensors.extend(pair(1, "mlp.up_proj", [12, 4, 8]));
        let prepared = prepare(load(&config(), &tensors).unwrap(), &hybrid()).unwrap();
        assert_eq!(prepared.pairs().len(), tensors.len() / 2);
    }
}

#[test]
fn a_prepared_adapter_tells_what_a_pool_asks() {
    let patterns = config_with(json!({"rank_pattern": {"mlp.up_proj": 7}}));
    let mut tensors = qv()[..4].to_vec();
    tensors.extend(pair(1, "mlp.up_proj", [12, 7, 8]));
    let adapter = load(&patterns, &tensors).unwrap();
    let prepared = prepare(adapter.clone(), &hybrid()).unwrap();
    assert_eq!(prepared.content(), adapter.content());
    assert_eq!(prepared.max_rank(), 7);
    assert_eq!(prepared.shape(), &hybrid());
    let sites: Vec<Site> = prepared.pairs().map(|(site, _)| site).collect();
    assert!(sites.is_sorted() && sites.len() == 3);
    assert!(prepared.pair(Site::layer(0, Module::KProj)).is_none());
}

fn random_pair(out: usize, rank: usize, input: usize) -> LoraPair {
    let matrix = |rows, cols| Matrix::from_f32(rows, cols, &vec![0.5; rows * cols]).unwrap();
    LoraPair::new(matrix(rank, input), matrix(out, rank), 8.0, ScalingRule::Standard).unwrap()
}

#[test]
fn adapters_made_in_memory_are_checked_too() {
    let site = Site::layer(0, Module::QProj);
    let adapter = Adapter::from_pairs([(site, random_pair(8, 4, 8))]).unwrap();
    assert_eq!(adapter.pair(site).unwrap().scaling(), 2.0);
    assert!(prepare(adapter, &hybrid()).is_ok());
    let twice = Adapter::from_pairs([(site, random_pair(8, 4, 8)), (site, random_pair(8, 2, 8))]).unwrap_err();
    assert_eq!(twice.reasons().cloned().collect::<Vec<_>>(), [Reason::DuplicateSite { site }]);
    let misplaced = Site::layer(0, Module::LmHead);
    let error = Adapter::from_pairs([(misplaced, random_pair(8, 4, 8))]).unwrap_err();
    assert_eq!(error.reasons().cloned().collect::<Vec<_>>(), [Reason::MisplacedSite { site: misplaced }]);
    assert!(Adapter::from_pairs([]).is_err());
    assert!(matches!(Matrix::from_f32(2, 2, &[0.0; 3]), Err(MatrixError::WrongLength { found: 3, .. })));
    assert!(matches!(Matrix::from_f32(0, 2, &[]), Err(MatrixError::Empty { .. })));
    let bad = Matrix::from_f32(2, 2, &[0.0, 0.0, 0.0, f32::NAN]);
    assert!(matches!(bad, Err(MatrixError::NonFinite { row: 1, col: 1, .. })));
    let a = Matrix::from_f32(2, 3, &[0.0; 6]).unwrap();
    let b = Matrix::from_f32(3, 3, &[0.0; 9]).unwrap();
    let mismatch = LoraPair::new(a, b, 1.0, ScalingRule::Standard);
    assert!(matches!(mismatch, Err(Reason::PairMismatch { a_shape: [2, 3], b_shape: [3, 3], .. })));
}

/// An adapter made in memory has the digest of the same adapter in a file.
#[test]
fn memory_and_file_agree_on_the_digest() {
    let loaded = load(&config(), &qv()).unwrap();
    let made = loaded.pairs().map(|(site, pair)| {
        let copy = |matrix: &Matrix| Matrix::from_f32(matrix.rows(), matrix.cols(), &matrix.to_f32()).unwrap();
        (site, LoraPair::new(copy(pair.a()), copy(pair.b()), 8.0, ScalingRule::Standard).unwrap())
    });
    assert_eq!(Adapter::from_pairs(made).unwrap().content(), loaded.content());
}

#[test]
fn embedding_and_head_have_their_features() {
    let head = Site::Vocabulary { module: Module::LmHead };
    let adapter = Adapter::from_pairs([(head, random_pair(32, 2, 8))]).unwrap();
    assert!(prepare(adapter, &hybrid()).is_ok());
    assert_eq!(hybrid().features(head), Some(Features { in_features: 8, out_features: 32 }));
}
