//! What stands beside the pairs of layers: embedding and head in the slot, gains, shifts and norms with the generation.

mod common;

use std::sync::Arc;

use common::*;
use lora_adapter::{Adapter, BaseWeights, LoraPair, Matrix, PrepareOptions, PreparedAdapter, prepare_with};
use lora_math::scaling::ScalingRule;
use lora_math::{Features, ModelShape, Module, ModuleSet, NormSite, Site, SlotDtype};
use lora_pool::{LoraPool, PoolOptions};

/// A base of ones.
struct Ones(ModelShape);

impl BaseWeights for Ones {
    fn shape(&self) -> &ModelShape {
        &self.0
    }

    fn is_tied(&self) -> bool {
        false
    }

    fn read_rows(&self, _: Site, _: usize, rows: &mut [f32]) -> bool {
        rows.fill(1.0);
        true
    }

    fn bias(&self, _: Site) -> Option<Vec<f32>> {
        None
    }

    fn norm(&self, _: NormSite) -> Option<Vec<f32>> {
        Some(vec![1.0; 8])
    }
}

fn pairs(sites: &[Site]) -> Adapter {
    let shape = shape();
    let pair = |(&site, seed): (&Site, u64)| {
        let Features { in_features, out_features } = shape.features(site).unwrap();
        let a = Matrix::from_f32(3, in_features, &values(seed, 3 * in_features)).unwrap();
        let b = Matrix::from_f32(out_features, 3, &values(seed + 1, out_features * 3)).unwrap();
        (site, LoraPair::new(a, b, 3.0, ScalingRule::Standard).unwrap())
    };
    Adapter::from_pairs(sites.iter().zip((10..).step_by(2)).map(pair)).unwrap()
}

/// The adapter of a directory that holds one norm besides a pair.
fn with_norm(seed: f32) -> PreparedAdapter {
    let directory = tempfile::tempdir().unwrap();
    let config = r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1}"#;
    std::fs::write(directory.path().join("adapter_config.json"), config).unwrap();
    let prefix = "base_model.model.model";
    let names = ["layers.0.self_attn.q_proj.lora_A.weight", "layers.0.self_attn.q_proj.lora_B.weight", "norm.weight"];
    let (mut header, mut data) = (String::new(), Vec::<u8>::new());
    for (name, shape) in names.iter().zip(["[1,8]", "[12,1]", "[8]"]) {
        let begin = data.len();
        let len = [8, 12, 8][names.iter().position(|other| other == name).unwrap()];
        data.extend(std::iter::repeat_n(seed.to_le_bytes(), len).flatten());
        let comma = if header.is_empty() { "{" } else { "," };
        let end = data.len();
        header +=
            &format!(r#"{comma}"{prefix}.{name}":{{"dtype":"F32","shape":{shape},"data_offsets":[{begin},{end}]}}"#);
    }
    header.push('}');
    let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat();
    std::fs::write(directory.path().join("adapter_model.safetensors"), bytes).unwrap();
    let adapter = Adapter::open(directory.path()).unwrap();
    prepare_with(adapter, &Ones(shape()), &PrepareOptions::default()).unwrap()
}

#[test]
fn the_embedding_is_stored_by_token() {
    let (embed, head) = (Site::Vocabulary { module: Module::EmbedTokens }, Site::Vocabulary { module: Module::LmHead });
    let modules = ModuleSet::DENSE.with(Module::EmbedTokens).with(Module::LmHead);
    for dtype in [SlotDtype::F32, SlotDtype::F16] {
        let pool = LoraPool::open(&shape(), PoolOptions { modules, dtype, ..options(2) }).unwrap();
        let adapter = pairs(&[Site::layer(0, Module::QProj), embed, head]);
        let prepared = prepare_with(adapter, &Ones(shape()), &PrepareOptions::default()).unwrap();
        pool.load("a", &prepared).unwrap();
        let slot = pool.read_slot(&lease(&pool, "a")).unwrap();
        for site in [embed, head] {
            let span = pool.layout().spans()[pool.layout().site_index(site).unwrap()];
            let pair = prepared.pair(site).unwrap();
            let size = dtype.bytes();
            let mut expected = vec![0; 3 * span.features.in_features * size];
            pair.a().write_as(dtype, &mut expected).unwrap();
            let stored = &slot[span.a_offset..span.a_offset + expected.len()];
            for (index, element) in expected.chunks_exact(size).enumerate() {
                let (rank, token) = (index / 32, index % 32);
                let at = if site == embed { token * 3 + rank } else { index } * size;
                assert_eq!(stored[at..at + size], *element, "{site} {index}");
            }
        }
    }
}

#[test]
fn vectors_live_and_leave_with_their_generation() {
    let pool = LoraPool::open(&shape(), options(1)).unwrap();
    let prepared = with_norm(2.0);
    pool.load("a", &prepared).unwrap();
    assert_eq!(pool.snapshot().resident("a").unwrap().vector_bytes, 8 * 4);
    let held = lease(&pool, "a");
    let vectors = held.vectors().unwrap().clone();
    assert!(Arc::ptr_eq(&vectors, prepared.vectors()), "shared, not copied");
    assert_eq!(vectors.norms[&NormSite::Final], [2.0; 8].into());
    drop((held, prepared));

    // Another adapter takes the slot: nothing of the first is left in the pool.
    pool.load("b", &small_adapter(1)).unwrap();
    assert!(lease(&pool, "b").vectors().is_none());
    assert_eq!(pool.snapshot().resident("b").unwrap().vector_bytes, 0);
    assert_eq!(Arc::strong_count(&vectors), 1);

    // Other vectors are other contents.
    assert_ne!(with_norm(2.0).content(), with_norm(3.0).content());
}

/// Whatever a load stops at, no vectors stay behind; the same contents again keep those that are there.
#[test]
fn a_failed_load_keeps_no_vectors_and_a_repeated_one_those_of_the_first() {
    let (pool, control) = test_pool(options(1));
    let prepared = with_norm(2.0);
    let vectors = prepared.vectors().clone();
    for failing in 1..=3 {
        control.fail_in(failing);
        pool.load("a", &prepared).unwrap_err();
        assert_eq!(Arc::strong_count(&vectors), 2, "failure {failing}");
        assert!(pool.snapshot().resident("a").is_none());
    }
    pool.load("a", &prepared).unwrap();
    assert_eq!(Arc::strong_count(&vectors), 3);
    pool.load("a", &with_norm(2.0)).unwrap();
    assert!(Arc::ptr_eq(lease(&pool, "a").vectors().unwrap(), &vectors));
    // A lease keeps its generation, and with it the vectors.
    let held = lease(&pool, "a");
    assert!(pool.evict("a").is_err());
    drop(held);
    pool.evict("a").unwrap();
    assert_eq!(Arc::strong_count(&vectors), 2);
}

#[test]
fn options_cover_what_adapters_hold() {
    let head = Site::Vocabulary { module: Module::LmHead };
    let adapter = prepare_with(pairs(&[head]), &Ones(shape()), &PrepareOptions::default()).unwrap();
    let covering = PoolOptions { max_rank: 1, ..options(1) }.covering([&adapter, &small_adapter(1)]);
    assert_eq!((covering.modules, covering.max_rank), (ModuleSet::DENSE.with(Module::LmHead), 4));
    assert_eq!(options(1).covering([&small_adapter(1)]), options(1), "nothing is taken away");
    LoraPool::open(&shape(), covering).unwrap().load("a", &adapter).unwrap();
    let uncovered = LoraPool::open(&shape(), options(1)).unwrap().load("a", &adapter).unwrap_err();
    assert!(uncovered.to_string().contains("lm_head"), "{uncovered}");
}
