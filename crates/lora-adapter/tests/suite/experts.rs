//! Experts in every layout that trainers write: each is the adapter that per-expert names give, or refused.

use lora_adapter::{Adapter, GateUpOrder, Note, Reason};
use lora_math::{ContentDigest, Module, Site};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::support::{Tensor, config_with, load, name, pair, reasons, tensor};

/// Sizes of a small mixture.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    experts: usize,
    rank: usize,
    hidden: usize,
    inside: usize,
}

const SIZES: Sizes = Sizes { experts: 3, rank: 2, hidden: 8, inside: 5 };

/// How a file lays its experts out.
#[derive(Clone, Copy, Debug)]
struct Layout {
    swapped: bool,
    grouped: bool,
    interleaved: bool,
}

const PEFT: Layout = Layout { swapped: false, grouped: false, interleaved: false };

fn value(seed: usize) -> f32 {
    ((seed * 37 + 11) % 101) as f32 / 16.0 - 3.0
}

/// A of an expert, one element: gate and up share it.
fn a(parameter: usize, expert: usize, row: usize, col: usize) -> f32 {
    value(parameter * 7919 + expert * 613 + row * 89 + col)
}

/// B of an expert, one element; rows of gate, then rows of up.
fn b(parameter: usize, expert: usize, row: usize, col: usize) -> f32 {
    value(parameter * 104_729 + expert * 331 + row * 53 + col * 7 + 5)
}

fn matrix(name: String, shape: [usize; 2], element: impl Fn(usize, usize) -> f32) -> Tensor {
    let [rows, cols] = shape;
    let elements = (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col)));
    let bytes = elements.flat_map(|(row, col)| element(row, col).to_le_bytes()).collect();
    Tensor { bytes, ..tensor(name, &shape) }
}

/// The experts of layer 0 by names of their own.
fn linears(sizes: Sizes, block: &str, modules: [&str; 3]) -> Vec<Tensor> {
    let Sizes { experts, rank, hidden, inside } = sizes;
    let module = |expert: usize, module: usize| {
        let path = format!("{block}.experts.{expert}.{}", modules[module]);
        let (parameter, first) = [(0, 0), (0, inside), (1, 0)][module];
        let [input, output] = [[hidden, inside], [hidden, inside], [inside, hidden]][module];
        [
            matrix(name(0, &path, "A"), [rank, input], |row, col| a(parameter, expert, row, col)),
            matrix(name(0, &path, "B"), [output, rank], |row, col| b(parameter, expert, first + row, col)),
        ]
    };
    (0..experts).flat_map(|expert| (0..3).flat_map(move |index| module(expert, index))).collect()
}

/// One parameter of all experts: 0 gate_up, 1 down.
fn stacked(sizes: Sizes, layout: Layout, parameter: usize, path: &str) -> [Tensor; 2] {
    let Sizes { experts, rank, hidden, inside } = sizes;
    let [input, output] = [[hidden, 2 * inside], [inside, hidden]][parameter];
    let row_of = |row: usize| match (parameter, layout.interleaved) {
        (0, true) => row % 2 * inside + row / 2,
        _ => row,
    };
    let place = |column: usize| match layout.grouped {
        true => (column / rank, column % rank),
        false => (column % experts, column / experts),
    };
    // On the side of A an expert's rows stand together, on that of B its columns lie as the layout says.
    let a_side = |stored_row: usize, col: usize| {
        let (expert, k) = (stored_row / rank, stored_row % rank);
        if layout.swapped { b(parameter, expert, row_of(col), k) } else { a(parameter, expert, k, col) }
    };
    let b_side = |row: usize, column: usize| {
        let (expert, k) = place(column);
        if layout.swapped { a(parameter, expert, k, row) } else { b(parameter, expert, row_of(row), k) }
    };
    let (a_cols, b_rows) = if layout.swapped { (output, input) } else { (input, output) };
    [
        matrix(name(0, path, "A"), [experts * rank, a_cols], a_side),
        matrix(name(0, path, "B"), [b_rows, experts * rank], b_side),
    ]
}

fn both(sizes: Sizes, layout: Layout) -> Vec<Tensor> {
    let gate_up = stacked(sizes, layout, 0, "mlp.experts.base_layer");
    [gate_up, stacked(sizes, layout, 1, "mlp.experts")].concat()
}

fn moe_config(fields: Value) -> Value {
    let mut config = config_with(json!({
        "r": SIZES.rank, "target_modules": [], "target_parameters": ["gate_up_proj", "down_proj"],
        "base_model_name_or_path": "Qwen/Qwen3-30B-A3B", "peft_version": "0.21.2",
    }));
    for (name, value) in fields.as_object().unwrap() {
        config[name] = value.clone();
    }
    config
}

fn by_linears(sizes: Sizes) -> Adapter {
    let config = config_with(json!({"r": sizes.rank}));
    load(&config, &linears(sizes, "mlp", ["gate_proj", "up_proj", "down_proj"])).unwrap()
}

/// The pairs of one parameter of [`by_linears`].
fn only(sizes: Sizes, modules: &[Module]) -> ContentDigest {
    let adapter = by_linears(sizes);
    let pairs = adapter.pairs().filter(|(site, _)| modules.contains(&site.module()));
    Adapter::from_pairs(pairs.map(|(site, pair)| (site, pair.clone()))).unwrap().content()
}

const GATE_UP: [Module; 2] = [Module::ExpertGateProj, Module::ExpertUpProj];

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_layout_reads_back_as_the_experts_themselves(
        (experts, rank, hidden, inside) in (1usize..5, 1usize..4, 2usize..12, 1usize..7),
        (swapped, grouped, interleaved) in any::<(bool, bool, bool)>(),
    ) {
        let sizes = Sizes { experts, rank, hidden, inside };
        let columns = if grouped { "grouped_by_expert" } else { "rank_major" };
        let base = if interleaved { "openai/gpt-oss-20b" } else { "Qwen/Qwen3-30B-A3B" };
        let config = moe_config(json!({"r": rank, "lora_B_layout": columns, "base_model_name_or_path": base}));
        let adapter = load(&config, &both(sizes, Layout { swapped, grouped, interleaved })).unwrap();
        prop_assert_eq!(adapter.content(), by_linears(sizes).content());
        prop_assert_eq!(adapter.notes(), []);
    }
}

#[test]
fn names_of_every_family_give_the_same_experts() {
    let plain = by_linears(SIZES);
    for (block, modules) in [
        ("block_sparse_moe", ["w1", "w3", "w2"]),
        ("mlp", ["w1", "w3", "w2"]),
        ("feed_forward", ["gate_proj", "up_proj", "down_proj"]),
    ] {
        let adapter = load(&config_with(json!({"r": 2})), &linears(SIZES, block, modules)).unwrap();
        assert_eq!(adapter.content(), plain.content(), "{block}");
    }
    // Only some experts: the others are left as they are.
    let some: Vec<Tensor> = linears(SIZES, "mlp", ["gate_proj", "up_proj", "down_proj"]).split_off(12);
    let adapter = load(&config_with(json!({"r": 2})), &some).unwrap();
    assert_eq!(adapter.pairs().len(), 3);
    assert!(adapter.pairs().all(|(site, _)| matches!(site, Site::Expert { expert: 2, .. })));
    let stacked = load(&moe_config(json!({})), &both(SIZES, PEFT)).unwrap();
    assert_eq!(stacked.content(), plain.content());
}

/// gpt-oss in 4 bits: linear layers of each expert, gate and up interleaved in one of them.
#[test]
fn gate_up_linears_of_gpt_oss_are_interleaved() {
    let Sizes { experts, rank, hidden, inside } = SIZES;
    let expert = |expert: usize| {
        let gate_up = format!("mlp.experts.gate_up_projs.{expert}");
        let down = format!("mlp.experts.down_projs.{expert}");
        [
            matrix(name(0, &gate_up, "A"), [rank, hidden], |row, col| a(0, expert, row, col)),
            matrix(name(0, &gate_up, "B"), [2 * inside, rank], |row, col| {
                b(0, expert, row % 2 * inside + row / 2, col)
            }),
            matrix(name(0, &down, "A"), [rank, inside], |row, col| a(1, expert, row, col)),
            matrix(name(0, &down, "B"), [hidden, rank], |row, col| b(1, expert, row, col)),
        ]
    };
    let tensors: Vec<Tensor> = (0..experts).flat_map(expert).collect();
    let adapter = load(&config_with(json!({"r": rank})), &tensors).unwrap();
    assert_eq!(adapter.content(), by_linears(SIZES).content());
    let odd = pair(0, "mlp.experts.gate_up_projs.0", [7, 2, 8]);
    let found = reasons(load(&config_with(json!({"r": 2})), &odd));
    assert_eq!(found, [Reason::OddGateUp { tensor: odd[1].name.clone(), rows: 7 }]);
}

/// With one parameter alone its tensors have one name, whichever it is.
#[test]
fn target_parameters_tell_a_lone_parameter() {
    let q = pair(0, "self_attn.q_proj", [8, 2, SIZES.hidden]);
    for (entry, parameter, modules) in [
        ("gate_up_proj", 0, &GATE_UP[..]),
        ("experts.gate_up_proj", 0, &GATE_UP),
        ("mlp.experts.down_proj", 1, &[Module::ExpertDownProj]),
        ("model.layers.0.mlp.experts.down_proj", 1, &[Module::ExpertDownProj]),
    ] {
        for swapped in [false, true] {
            let tensors = stacked(SIZES, Layout { swapped, ..PEFT }, parameter, "mlp.experts").to_vec();
            let config = moe_config(json!({"target_parameters": [entry]}));
            let adapter = load(&config, &[tensors, q.clone()].concat()).unwrap();
            let experts = adapter.pairs().filter(|(site, _)| matches!(site, Site::Expert { .. }));
            let experts = Adapter::from_pairs(experts.map(|(site, pair)| (site, pair.clone()))).unwrap();
            assert_eq!(experts.content(), only(SIZES, modules), "{entry}, swapped: {swapped}");
        }
    }
    for entries in [json!([]), json!(["gate.weight"]), json!(["_proj"]), json!(["experts.gate_up_proj_bias"])] {
        let tensors = stacked(SIZES, PEFT, 1, "mlp.experts").to_vec();
        let found = reasons(load(&moe_config(json!({"target_parameters": entries})), &tensors));
        assert!(matches!(&found[..], [Reason::UnknownParameter { .. }]), "{entries}: {found:?}");
    }
}

/// As many features inside as make both sides equal: only the versions tell the sides apart.
#[test]
fn versions_tell_the_sides_of_a_square_parameter() {
    let sizes = Sizes { hidden: 8, inside: 4, ..SIZES };
    let expected = only(sizes, &GATE_UP);
    let (qwen, llama4, oss) = ("Qwen/Qwen3-30B-A3B", "meta-llama/Llama-4-Scout", "openai/gpt-oss-20b");
    let cases = [
        (qwen, json!("0.18.1"), true, false),
        (qwen, json!(null), true, false),
        (qwen, json!("0.19.1"), false, false),
        (qwen, json!("0.21.2"), false, false),
        (llama4, json!("0.18.1"), false, false),
        (llama4, json!("0.21.2"), true, false),
        (oss, json!("0.18.1"), false, false),
        (oss, json!("0.21.2"), false, true),
        ("a model", json!("0.18.0"), true, true),
        ("a model", json!("0.21.2"), false, true),
        ("a model", json!(null), false, true),
    ];
    for (base, version, swapped, is_assumed) in cases {
        let interleaved = base == oss;
        let tensors = stacked(sizes, Layout { swapped, interleaved, ..PEFT }, 0, "mlp.experts");
        let fields = json!({
            "target_parameters": ["gate_up_proj"], "base_model_name_or_path": base, "peft_version": version,
        });
        let adapter = load(&moe_config(fields), &tensors).unwrap();
        assert_eq!(adapter.content(), expected, "{base} {version}");
        let assumed = adapter.notes().contains(&Note::OrientationAssumed { swapped });
        assert_eq!(assumed, is_assumed, "{base} {version}");
    }
}

/// gpt-oss: the down projection is square, and its companion is not.
#[test]
fn a_companion_tells_the_sides_of_a_square_parameter() {
    let sizes = Sizes { hidden: 6, inside: 6, ..SIZES };
    for swapped in [false, true] {
        let adapter = load(&moe_config(json!({})), &both(sizes, Layout { swapped, ..PEFT })).unwrap();
        assert_eq!(adapter.content(), by_linears(sizes).content());
        assert_eq!(adapter.notes(), []);
    }
}

#[test]
fn the_order_of_gate_and_up_is_the_bases() {
    let interleaved = Layout { interleaved: true, ..PEFT };
    let unnamed = moe_config(json!({"base_model_name_or_path": "a model"}));
    let adapter = load(&unnamed, &both(SIZES, interleaved)).unwrap();
    assert_eq!(adapter.notes(), [Note::GateUpOrderAssumed]);
    let told = adapter.with_gate_up_order(GateUpOrder::Interleaved);
    assert_eq!(told.content(), by_linears(SIZES).content());
    assert_eq!(told.notes(), []);
    // A router of its name tells gpt-oss too, and that of the others tells them.
    let with = |router: &str| [both(SIZES, interleaved), pair(0, router, [3, 2, 8])].concat();
    let content = |tensors: &[Tensor]| load(&unnamed, tensors).unwrap();
    let oss = content(&with("mlp.router"));
    let gate_b = |adapter: &Adapter| {
        let site = Site::Expert { layer: 0, expert: 1, module: Module::ExpertGateProj };
        adapter.pair(site).unwrap().b().clone()
    };
    assert_eq!(gate_b(&oss), gate_b(&by_linears(SIZES)));
    assert_eq!(oss.notes().len(), 1, "target_modules lacks the router: {:?}", oss.notes());
    assert_ne!(gate_b(&content(&with("mlp.gate"))), gate_b(&by_linears(SIZES)));
    // Experts of their own names have no order to be told.
    let linears = by_linears(SIZES);
    assert_eq!(linears.clone().with_gate_up_order(GateUpOrder::Interleaved), linears);
}

#[test]
fn unsloth_groups_columns_with_and_without_a_mark() {
    let grouped = both(SIZES, Layout { grouped: true, ..PEFT });
    let layout = json!({"lora_B_layout": "grouped_by_expert"});
    let marks = [
        json!({"lora_B_layout": "grouped_by_expert"}),
        json!({"unsloth_fused_expert_lora": {"lora_A_layout": "grouped_by_expert", "lora_B_layout": "grouped_by_expert"}}),
        json!({"unsloth_fused_expert_lora": {"parameters": {"gate_up_proj": layout, "mlp.experts.down_proj": layout}}}),
        json!({"auto_mapping": {"lora_B_layout": "grouped_by_expert"}}),
        json!({"auto_mapping": {"unsloth_fused_expert_lora": {"parameters": {"gate_up_proj": layout, "down_proj": layout}}}}),
        json!({"auto_mapping": {"unsloth_fixed": true}}),
    ];
    for mark in marks {
        let adapter = load(&moe_config(mark.clone()), &grouped).unwrap();
        assert_eq!(adapter.content(), by_linears(SIZES).content(), "{mark}");
        let assumed = adapter.notes().contains(&Note::GroupedColumnsAssumed { num_pairs: 2 });
        assert_eq!(assumed, mark.to_string().contains("unsloth_fixed"), "{mark}");
    }
    // A mark stands above the heuristic.
    let marked = json!({"auto_mapping": {"unsloth_fixed": true}, "lora_B_layout": "rank_major"});
    assert_eq!(load(&moe_config(marked), &both(SIZES, PEFT)).unwrap().content(), by_linears(SIZES).content());
    for mark in [
        json!({"lora_B_layout": "diagonal"}),
        json!({"lora_B_layout": 3}),
        json!({"unsloth_fused_expert_lora": {"lora_A_layout": "rank_major"}}),
        json!({"target_parameters": "down_proj"}),
        json!({"target_parameters": [3]}),
    ] {
        let found = reasons(load(&moe_config(mark.clone()), &grouped));
        assert!(found.iter().any(|reason| matches!(reason, Reason::BadField { .. })), "{mark}: {found:?}");
    }
}

/// Patterns are matched against the path of the parameter, without the wrappers of the names.
#[test]
fn patterns_name_parameters() {
    let scaling = |fields: Value, module| {
        let adapter = load(&moe_config(fields), &both(SIZES, PEFT)).unwrap();
        adapter.pair(Site::Expert { layer: 0, expert: 2, module }).unwrap().scaling()
    };
    let down = Module::ExpertDownProj;
    let by_gate_up = |key: &str| scaling(json!({"alpha_pattern": {key: 100}}), GATE_UP[1]);
    assert_eq!(by_gate_up(".*\\.gate_up_proj"), 50.0);
    assert_eq!(by_gate_up("mlp.experts.gate_up_proj"), 50.0);
    assert_eq!(by_gate_up("^model.layers.0.mlp.experts.gate_up_proj"), 50.0);
    assert_eq!(by_gate_up("mlp.experts"), 4.0);
    assert_eq!(by_gate_up("base_layer.gate_up_proj"), 4.0);
    assert_eq!(scaling(json!({"alpha_pattern": {"gate_up_proj": 100}}), down), 4.0);
    assert_eq!(scaling(json!({"alpha_pattern": {"down_proj": 100}, "use_rslora": true}), down), 70.710_68);
    // The doubled rank that PEFT makes of a list of gate and up.
    let doubled = Sizes { rank: 4, ..SIZES };
    let mut tensors = stacked(doubled, PEFT, 0, "mlp.experts.base_layer").to_vec();
    tensors.extend(stacked(SIZES, PEFT, 1, "mlp.experts"));
    let patterns = json!({"rank_pattern": {".*\\.gate_up_proj": 4}, "alpha_pattern": {".*\\.gate_up_proj": 16}});
    let adapter = load(&moe_config(patterns), &tensors).unwrap();
    let ranks: Vec<usize> = adapter.pairs().map(|(_, pair)| pair.rank()).collect();
    assert_eq!((adapter.pairs().len(), ranks[..3].to_vec()), (9, vec![4, 4, 2]));
    assert!(adapter.pairs().all(|(_, pair)| pair.scaling() == 4.0));
    // Without the patterns the two parameters would have different numbers of experts.
    let found = reasons(load(&moe_config(json!({})), &tensors));
    assert!(matches!(&found[..], [Reason::ExpertCount { found: 6, expected: 3, .. }]), "{found:?}");
}

#[test]
fn the_router_is_a_parameter_where_target_parameters_name_it() {
    let router = Site::layer(0, Module::Router);
    let scaling = |key: &str, targets: Value| {
        let fields = json!({"target_parameters": targets, "alpha_pattern": {key: 100}});
        let adapter = load(&moe_config(fields), &pair(0, "mlp.gate", [4, 2, 8])).unwrap();
        adapter.pair(router).unwrap().scaling()
    };
    assert_eq!(scaling("mlp.gate.weight", json!(["gate.weight"])), 50.0);
    assert_eq!(scaling("mlp.gate", json!(["gate.weight"])), 4.0);
    assert_eq!(scaling("mlp.gate", json!([])), 50.0);
}

#[test]
fn stacked_tensors_that_do_not_fit_are_refused() {
    let refuse = |tensors: &[Tensor]| reasons(load(&moe_config(json!({})), tensors));
    let gate_up = |shape_a: [usize; 2], shape_b: [usize; 2]| {
        let path = "mlp.experts.base_layer";
        vec![tensor(name(0, path, "A"), &shape_a), tensor(name(0, path, "B"), &shape_b)]
    };
    let down = stacked(SIZES, PEFT, 1, "mlp.experts").to_vec();
    let with_down = |tensors: Vec<Tensor>| [tensors, down.clone()].concat();

    let rows = refuse(&with_down(gate_up([7, 8], [10, 7])));
    assert!(matches!(&rows[..], [Reason::ExpertRows { rows: 7, rank: 2, .. }]), "{rows:?}");
    let count = refuse(&with_down(gate_up([8, 8], [10, 8])));
    assert!(matches!(&count[..], [Reason::ExpertCount { .. }]), "{count:?}");
    let shapes = refuse(&with_down(gate_up([6, 9], [10, 6])));
    assert!(matches!(&shapes[..], [Reason::ExpertShapes { hidden_size: None, .. }]), "{shapes:?}");
    let odd = refuse(&with_down(gate_up([6, 8], [11, 6])));
    assert!(matches!(&odd[..], [Reason::ExpertShapes { .. }]), "{odd:?}");
    let mismatch = refuse(&with_down(gate_up([6, 8], [10, 4])));
    assert!(mismatch.iter().any(|reason| matches!(reason, Reason::PairMismatch { .. })), "{mismatch:?}");
    let other_hidden = [both(SIZES, PEFT), pair(0, "self_attn.q_proj", [4, 2, 12])].concat();
    let other_hidden = refuse(&other_hidden);
    assert!(matches!(&other_hidden[..], [Reason::ExpertShapes { hidden_size: Some(12), .. }]), "{other_hidden:?}");
    let half = refuse(&both(SIZES, PEFT)[..3]);
    let missing =
        |reason: &Reason| matches!(reason, Reason::HalfPair { missing, .. } if missing == &name(0, "mlp.experts", "B"));
    assert!(half.iter().any(missing), "{half:?}");
    let deep = [both(SIZES, PEFT), stacked(SIZES, PEFT, 0, "mlp.experts.base_layer.base_layer").to_vec()].concat();
    assert!(matches!(&refuse(&deep)[..], [Reason::UnknownParameter { .. }]));

    let both_forms = [both(SIZES, PEFT), linears(SIZES, "mlp", ["gate_proj", "up_proj", "down_proj"])].concat();
    let twice = refuse(&both_forms);
    assert!(
        twice.len() == 9 && twice.iter().all(|reason| matches!(reason, Reason::AmbiguousTensor { .. })),
        "{twice:?}"
    );
    let spellings = [both(SIZES, PEFT), stacked(SIZES, PEFT, 1, "block_sparse_moe.experts").to_vec()].concat();
    assert!(refuse(&spellings).iter().all(|reason| matches!(reason, Reason::AmbiguousTensor { .. })));
}

/// A small file cannot make more pairs than any model has.
#[test]
fn the_number_of_expert_pairs_is_bounded() {
    let tensors =
        vec![tensor(name(0, "mlp.experts", "A"), &[300_000, 1]), tensor(name(0, "mlp.experts", "B"), &[2, 300_000])];
    let found = reasons(load(&moe_config(json!({"r": 1, "target_parameters": ["down_proj"]})), &tensors));
    assert!(matches!(&found[..], [Reason::TooManyExperts { found: 300_000, max: 262_144 }]), "{found:?}");
}

/// One adapter for each module alone: none is passed over.
#[test]
fn every_module_loads_alone() {
    for (path, module) in [
        ("mlp.gate", Module::Router),
        ("mlp.router", Module::Router),
        ("mlp.router.linear", Module::Router),
        ("block_sparse_moe.gate", Module::Router),
        ("feed_forward.router", Module::Router),
        ("feed_forward.gate_proj", Module::GateProj),
        ("feed_forward.up_proj", Module::UpProj),
        ("feed_forward.down_proj", Module::DownProj),
        ("mlp.shared_expert.gate_proj", Module::SharedGateProj),
        ("mlp.shared_expert.up_proj", Module::SharedUpProj),
        ("mlp.shared_expert.down_proj", Module::SharedDownProj),
        ("feed_forward.shared_expert.down_proj", Module::SharedDownProj),
        ("mlp.shared_expert_gate", Module::SharedExpertGate),
        ("linear_attn.in_proj_qkvz", Module::InProjQkvz),
        ("linear_attn.in_proj_ba", Module::InProjBa),
        ("linear_attn.in_proj_qkv", Module::InProjQkv),
        ("linear_attn.in_proj_z", Module::InProjZ),
        ("linear_attn.in_proj_b", Module::InProjB),
        ("linear_attn.in_proj_a", Module::InProjA),
        ("linear_attn.out_proj", Module::LinearOutProj),
    ] {
        let adapter = load(&config_with(json!({"r": 2})), &pair(3, path, [5, 2, 6])).unwrap();
        let sites: Vec<Site> = adapter.pairs().map(|(site, _)| site).collect();
        assert_eq!(sites, [Site::layer(3, module)], "{path}");
    }
    for path in ["mlp.experts.x.gate_proj", "mlp.experts.01.gate_proj", "mlp.experts.gate_up_projs.-1"] {
        let found = reasons(load(&config_with(json!({"r": 2})), &pair(3, path, [6, 2, 6])));
        let index = |reason: &Reason| matches!(reason, Reason::UnknownTensor { part: "expert index", .. });
        assert!(found.len() == 2 && found.iter().all(index), "{path}: {found:?}");
    }
    for path in ["mlp.experts.0.gate_proj.base_layer", "linear_attn.conv1d", "mlp.gate.base_layer", "mlp.router.x"] {
        let found = reasons(load(&config_with(json!({"r": 2})), &pair(3, path, [6, 2, 6])));
        let module = |reason: &Reason| matches!(reason, Reason::UnknownTensor { part: "module", .. });
        assert!(found.len() == 2 && found.iter().all(module), "{path}: {found:?}");
    }
}

#[test]
fn equal_experts_are_one_row_of_the_report() {
    let report = by_linears(SIZES).report();
    assert_eq!(report.sites.len(), 9);
    let text = report.to_string();
    for module in ["experts.gate_proj × 3", "experts.up_proj × 3", "experts.down_proj × 3"] {
        assert_eq!(text.matches(module).count(), 1, "{text}");
    }
    let patterns = json!({"r": 2, "alpha_pattern": {"experts.1.up_proj": 3}});
    let tensors = linears(SIZES, "mlp", ["gate_proj", "up_proj", "down_proj"]);
    let text = load(&config_with(patterns), &tensors).unwrap().report().to_string();
    assert!(text.contains("experts.up_proj × 2") && text.contains("experts.up_proj 1 "), "{text}");
}
