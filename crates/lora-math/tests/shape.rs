//! Model shapes: what a hybrid model carries where, and shapes that cannot be a model's.

use lora_math::module::Part;
use lora_math::shape::{AttentionSize, MlpSize, ShapeError};
use lora_math::{Features, LayerShape, ModelShape, Module, ModuleSet, Site};

fn features(in_features: usize, out_features: usize) -> Features {
    Features { in_features, out_features }
}

const MLP: MlpSize = MlpSize { hidden_size: 8, intermediate_size: 20 };

/// Layer 0: linear attention and a dense MLP. Layer 1: attention with a doubled query, and experts.
fn hybrid() -> ModelShape {
    let linear = LayerShape::new().with(Module::InProjQkv, features(8, 24)).with_mlp(MLP);
    let attention = AttentionSize { hidden_size: 8, q_features: 32, kv_features: 4, o_features: 16 };
    let full = LayerShape::new().with_attention(attention).with_experts(3, MLP);
    ModelShape::new(8, 50, vec![linear, full]).unwrap()
}

#[test]
fn a_hybrid_carries_each_module_where_it_has_it() {
    let shape = hybrid();
    let expert = |layer, expert, module| Site::Expert { layer, expert, module };
    for (site, expected) in [
        (Site::layer(0, Module::InProjQkv), Some(features(8, 24))),
        (Site::layer(0, Module::QProj), None),
        (Site::layer(0, Module::DownProj), Some(features(20, 8))),
        (Site::layer(1, Module::QProj), Some(features(8, 32))),
        (Site::layer(1, Module::KProj), Some(features(8, 4))),
        (Site::layer(1, Module::OProj), Some(features(16, 8))),
        (Site::layer(1, Module::InProjQkv), None),
        (Site::layer(1, Module::GateProj), None),
        (Site::layer(2, Module::QProj), None),
        (Site::layer(1, Module::ExpertGateProj), None),
        (expert(1, 2, Module::ExpertGateProj), Some(features(8, 20))),
        (expert(1, 2, Module::ExpertDownProj), Some(features(20, 8))),
        (expert(1, 3, Module::ExpertGateProj), None),
        (expert(0, 0, Module::ExpertGateProj), None),
        (expert(1, 0, Module::QProj), None),
        (Site::Vocabulary { module: Module::EmbedTokens }, Some(features(50, 8))),
        (Site::Vocabulary { module: Module::LmHead }, Some(features(8, 50))),
        (Site::Vocabulary { module: Module::QProj }, None),
    ] {
        assert_eq!(shape.features(site), expected, "{site}");
    }
}

#[test]
fn shapes_that_cannot_be() {
    let model = |layer| ModelShape::new(8, 50, vec![LayerShape::new(), layer]).unwrap_err();
    let (q, one) = (Module::QProj, features(1, 1));
    assert_eq!(
        model(LayerShape::new().with(q, one).with(Module::Router, one).with(q, one)),
        ShapeError::DuplicateModule { layer: 1, module: q }
    );
    assert_eq!(
        model(LayerShape::new().with(q, features(0, 3))),
        ShapeError::EmptyFeatures { layer: 1, module: q, in_features: 0, out_features: 3 }
    );
    for module in [Module::ExpertUpProj, Module::LmHead, Module::EmbedTokens] {
        assert_eq!(
            model(LayerShape::new().with(module, one)),
            ShapeError::Misplaced { layer: 1, module, num_experts: 0 }
        );
    }
    assert_eq!(
        model(LayerShape::new().with_experts(0, MLP)),
        ShapeError::Misplaced { layer: 1, module: Module::ExpertGateProj, num_experts: 0 }
    );
    for (num_layers, hidden_size, vocab_size) in [(0, 8, 50), (1, 0, 50), (1, 8, 0)] {
        assert_eq!(
            ModelShape::uniform(hidden_size, vocab_size, num_layers, LayerShape::new()),
            Err(ShapeError::Empty { num_layers, hidden_size, vocab_size })
        );
    }
}

#[test]
fn module_lists_agree() {
    assert!(Module::ALL.is_sorted(), "ALL is in declaration order");
    let every: ModuleSet = Module::ALL.into_iter().collect();
    assert!(every.iter().eq(Module::ALL));
    let mut names: Vec<_> = Module::ALL.iter().map(|module| module.name()).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), Module::ALL.len(), "names are unique");
    let dense = [
        Module::QProj,
        Module::KProj,
        Module::VProj,
        Module::OProj,
        Module::GateProj,
        Module::UpProj,
        Module::DownProj,
    ];
    assert!(ModuleSet::DENSE.iter().eq(dense));
    assert!(dense.iter().all(|module| module.part() == Part::Layer));
    assert!(!ModuleSet::EMPTY.contains(Module::QProj));
}
