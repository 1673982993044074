//! Ways of naming tensors: one good adapter with its keys renamed is the same adapter, or refused.

use lora_adapter::{Adapter, Dialect, Note, Reason};
use lora_math::{Module, Site};
use proptest::prelude::*;
use serde_json::json;

use crate::support::{Tensor, config, config_with, load, name, pair, qv, reasons, tensor};

fn renamed(tensors: &[Tensor], rename: impl Fn(&str) -> String) -> Vec<Tensor> {
    tensors.iter().map(|tensor| Tensor { name: rename(&tensor.name), ..tensor.clone() }).collect()
}

type Rename = fn(&str) -> String;

const DIALECTS: [(&[Dialect], Rename); 18] = [
    (&[Dialect::LanguageModel], |n| n.replace("model.layers", "model.language_model.layers")),
    (&[Dialect::LanguageModel], |n| n.replace("model.model.model.", "model.model.language_model.model.")),
    (&[Dialect::LanguageModel], |n| n.replace("model.model.model.", "model.model.language_model.")),
    (&[Dialect::NoPrefix], |n| n.replace("base_model.model.", "")),
    (&[Dialect::NoPrefix, Dialect::BareBackbone], |n| n.replace("base_model.model.model.", "")),
    (&[Dialect::NoPrefix, Dialect::LanguageModel], |n| n.replace("base_model.model.", "language_model.")),
    (&[Dialect::DoubledPrefix], |n| format!("base_model.model.{n}")),
    (&[Dialect::AdapterName], |n| n.replace(".weight", ".default.weight")),
    (&[Dialect::AdapterName], |n| n.replace(".weight", ".module.weight")),
    (&[Dialect::AdapterName], |n| n.replace(".weight", ".lora_A.weight")),
    (&[Dialect::BareBackbone], |n| n.replace("model.model.model.layers", "model.model.layers")),
    (&[Dialect::TorchCompile], |n| format!("_orig_mod.{n}")),
    (&[Dialect::TorchCompile], |n| n.replace("model.model.model.", "model.model._orig_mod.model.")),
    (&[Dialect::DataParallel], |n| format!("module.{n}")),
    (&[Dialect::Fsdp], |n| n.replace("layers.", "_fsdp_wrapped_module.layers.")),
    (&[Dialect::Fsdp], |n| n.replace(".self_attn.", "._fsdp_wrapped_module.self_attn.")),
    (&[Dialect::CheckpointWrapper], |n| n.replace("self_attn", "_checkpoint_wrapped_module.self_attn")),
    (&[Dialect::DoubledPrefix, Dialect::TorchCompile, Dialect::DataParallel], |n| {
        format!("module._orig_mod.base_model.model._orig_mod.{n}")
    }),
];

#[test]
fn other_ways_of_naming_give_the_same_adapter() {
    let plain = load(&config(), &qv()).unwrap();
    for (dialects, rename) in DIALECTS {
        let tensors = renamed(&qv(), rename);
        let adapter = load(&config(), &tensors).unwrap_or_else(|error| panic!("{dialects:?}: {error}"));
        assert_eq!(adapter.content(), plain.content(), "{}", tensors[0].name);
        let notes: Vec<Note> = dialects.iter().map(|&dialect| Note::OtherNaming { dialect, num_tensors: 8 }).collect();
        assert_eq!(adapter.notes(), notes, "{}", tensors[0].name);
    }
}

/// Patterns are matched against the path that the trainer knew, so a pattern of the wrapped path holds.
#[test]
fn patterns_follow_the_trained_path() {
    let patterns = |key: &str| config_with(json!({"alpha_pattern": {key: 100}}));
    let scaling = |key: &str, rename: Rename| {
        let adapter = load(&patterns(key), &renamed(&qv(), rename)).unwrap();
        adapter.pair(Site::layer(0, Module::QProj)).unwrap().scaling()
    };
    let wrapped: Rename = |n| n.replace("model.layers", "model.language_model.layers");
    assert_eq!(scaling("^model.language_model.layers.0.self_attn.q_proj", wrapped), 25.0);
    assert_eq!(scaling("^model.layers.0.self_attn.q_proj", wrapped), 2.0);
    assert_eq!(scaling("layers.0.self_attn.q_proj", wrapped), 25.0);
    assert_eq!(scaling("^layers.0.self_attn.q_proj", |n| n.replace("model.model.model.", "model.model.")), 25.0);
    assert_eq!(scaling("^model.layers.0.self_attn.q_proj", |n| format!("_orig_mod.base_model.model.{n}")), 25.0);
}

#[test]
fn two_spellings_of_one_tensor_are_refused() {
    for (_, rename) in DIALECTS {
        let mut tensors = qv();
        let second = Tensor { name: rename(&tensors[0].name), ..tensors[0].clone() };
        tensors.push(second.clone());
        let found = reasons(load(&config(), &tensors));
        let site = Site::layer(0, Module::QProj);
        let [Reason::AmbiguousTensor { place, first, second: other }] = &found[..] else {
            panic!("{}: {found:?}", second.name)
        };
        assert_eq!(*place, site.to_string());
        let mut names = [first.as_str(), other.as_str()];
        let mut expected = [tensors[0].name.as_str(), second.name.as_str()];
        names.sort_unstable();
        expected.sort_unstable();
        assert_eq!(names, expected);
    }
}

#[test]
fn adapters_of_two_names_in_one_file_are_refused() {
    let rename = |n: &str| {
        let adapter = if n.contains("q_proj") { "german" } else { "french" };
        n.replace(".weight", &format!(".{adapter}.weight"))
    };
    let found = reasons(load(&config(), &renamed(&qv(), rename)));
    assert!(matches!(&found[..], [Reason::SeveralAdapters { .. }]), "{found:?}");
}

/// Names that only look like one of the dialects.
#[test]
fn names_beyond_the_dialects_are_refused() {
    let renames: [(Rename, &str); 10] = [
        (|n| n.replace("model.model.model.", "model.model.model.language_model.model."), "module"),
        (|n| format!("base_model.model.base_model.model.{n}"), "module"),
        (|n| format!("base_model.{n}"), "prefix"),
        (|n| n.replace("model.model.model.", "model.model.model.model."), "module"),
        (|n| n.replace("model.layers", "model.language_model.language_model.layers"), "module"),
        (|n| n.replace("model.layers", "model.visual.layers"), "module"),
        (|n| n.replace("layers.", "layers.language_model."), "layer index"),
        (|n| n.replace(".weight", ".a.b.weight"), "suffix"),
        (|n| n.replace("self_attn.", ""), "module"),
        (|n| format!("x.{n}"), "prefix"),
    ];
    for (rename, part) in renames {
        let tensors = renamed(&qv(), rename);
        let found = reasons(load(&config(), &tensors));
        let expected = |reason: &Reason| matches!(reason, Reason::UnknownTensor { part: found, .. } if *found == part);
        assert!(found.len() == 8 && found.iter().all(expected), "{}: {found:?}", tensors[0].name);
    }
    let long = name(0, &format!("{}q_proj", "a.".repeat(5000)), "A");
    let found = reasons(load(&config(), &[qv(), vec![tensor(long, &[4, 8])]].concat()));
    assert!(matches!(&found[..], [Reason::UnknownTensor { part: "name of that length", .. }]), "{found:?}");
}

/// Renames of one good adapter as the field knows them: each is the adapter, or is refused; never another one.
#[test]
fn no_renaming_makes_another_adapter() {
    let plain = load(&config(), &qv()).unwrap();
    let elsewhere = load(&config(), &renamed(&qv(), |n| n.replace("layers.1", "layers.9"))).unwrap();
    assert_ne!(elsewhere.content(), plain.content(), "a layer that a model of two layers refuses");
    let mut extra = qv();
    extra.extend(pair(0, "self_attn.zz_proj", [8, 4, 8]));
    assert_eq!(reasons(load(&config(), &extra)).len(), 2);
    let mlx = reasons(load(&config(), &renamed(&qv(), |n| n.replace("lora_A.weight", "lora_a"))));
    let mlx_names = |reason: &Reason| matches!(reason, Reason::UnsupportedDialect { dialect: Dialect::Mlx, .. });
    assert!(mlx.iter().any(mlx_names), "{mlx:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any adapter with magnitudes and biases, written in any dialect, tensor by tensor in another one, reads back as itself.
    #[test]
    fn every_dialect_reads_back_as_the_adapter_itself(
        sizes in prop::collection::vec((0usize..40, 0usize..7, 1usize..6, 1usize..9, 1usize..9), 1..8),
        choices in prop::collection::vec(any::<prop::sample::Index>(), 16),
    ) {
        const MODULES: [&str; 7] = [
            "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
            "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        ];
        let mut sites = std::collections::BTreeMap::new();
        let mut ranks = serde_json::Map::new();
        for (layer, module, rank, out, input) in sizes {
            ranks.insert(format!("layers.{layer}.{}", MODULES[module]), rank.into());
            let mut tensors = pair(layer, MODULES[module], [out, rank, input]);
            for suffix in ["lora_magnitude_vector", "lora_B.bias"] {
                let path = format!("base_model.model.model.layers.{layer}.{}", MODULES[module]);
                tensors.push(tensor(format!("{path}.{suffix}"), &[out]));
            }
            sites.insert((layer, module), tensors);
        }
        let config = config_with(json!({"rank_pattern": ranks, "use_dora": true, "lora_bias": true}));
        let tensors: Vec<Tensor> = sites.into_values().flatten().collect();
        let plain = load(&config, &tensors).unwrap();
        prop_assert_eq!(plain.extras().len(), 2 * plain.pairs().len());
        let whole = DIALECTS[choices[0].index(DIALECTS.len())].1;
        let same = |tensors: &[Tensor]| load(&config, tensors).map(|adapter: Adapter| adapter.content());
        prop_assert_eq!(same(&renamed(&tensors, whole)), Ok(plain.content()));
        // One adapter name in a file, so the rows of adapter names are left out of mixtures.
        let unnamed: Vec<Rename> =
            DIALECTS.iter().filter(|(d, _)| *d != [Dialect::AdapterName]).map(|(_, rename)| *rename).collect();
        let mixed: Vec<Tensor> = tensors
            .iter()
            .enumerate()
            .map(|(at, tensor)| {
                let rename = unnamed[choices[at % choices.len()].index(unnamed.len())];
                Tensor { name: rename(&tensor.name), ..tensor.clone() }
            })
            .collect();
        prop_assert_eq!(same(&mixed), Ok(plain.content()));
    }
}
