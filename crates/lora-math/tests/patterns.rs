//! Rank and alpha patterns: the outcomes that PEFT 0.18.1 and 0.21.2 gave for the same keys, the older rule's
//! differences, and keys that are refused.

use lora_math::patterns::{
    MAX_KEY_BYTES, MAX_PATH_SHAPES, MAX_REGEX_BYTES, MAX_REGEX_KEYS, OlderPatterns, PatternError, Patterns,
};

fn path(layer: usize, module: &str) -> String {
    format!("model.layers.{layer}.self_attn.{module}")
}

/// The paths of q and v of a 12-layer model that `key` matches, as `q0`, `v0`, ...
fn matched(key: &str) -> Vec<String> {
    let patterns = Patterns::new([(key.to_owned(), 100.0)]).unwrap();
    let mut hits = Vec::new();
    for layer in 0..12 {
        for module in ["q_proj", "v_proj"] {
            if patterns.lookup(&path(layer, module)).is_some() {
                hits.push(format!("{}{layer}", &module[..1]));
            }
        }
    }
    hits
}

#[test]
fn measured_keys() {
    let every_q: Vec<_> = (0..12).map(|layer| format!("q{layer}")).collect();
    let every_q_and_v: Vec<_> = (0..12).flat_map(|layer| [format!("q{layer}"), format!("v{layer}")]).collect();
    let named = |names: &[&str]| names.iter().map(|name| name.to_string()).collect::<Vec<_>>();
    for (key, expected) in [
        ("q_proj", every_q.clone()),
        ("self_attn.q_proj", every_q.clone()),
        ("^q_proj", vec![]),
        ("^model.layers.0.self_attn.q_proj", named(&["q0"])),
        ("model.layers.0.self_attn.q_proj", named(&["q0"])),
        ("base_model.model.model.layers.0.self_attn.q_proj", vec![]),
        ("layers.1.self_attn.q_proj", named(&["q1"])),
        (".*layers.1.*q_proj", named(&["q1", "q10", "q11"])),
        (".*_proj", every_q_and_v.clone()),
        ("layers.0.*", named(&["q0", "v0"])),
        ("q_proj|v_proj", every_q_and_v),
        ("_proj", vec![]),
        ("model.layers.0", vec![]),
        ("", vec![]),
        ("q.proj", every_q),
        (r".*\.layers\.3\..*(q_proj|k_proj|v_proj|o_proj)$", named(&["q3", "v3"])),
    ] {
        assert_eq!(matched(key), expected, "{key}");
    }
}

#[test]
fn real_tables() -> Result<(), PatternError> {
    let stacked = Patterns::new([(r".*\.gate_up_proj".to_owned(), 8)])?;
    assert_eq!(stacked.lookup("model.layers.0.mlp.experts.gate_up_proj"), Some(&8));
    assert_eq!(stacked.lookup("model.layers.0.mlp.experts.down_proj"), None);
    assert_eq!(stacked.lookup("gate_up_proj"), None);
    assert!(Patterns::<f64>::default().is_empty() && !stacked.is_empty());
    Ok(())
}

#[test]
fn the_first_key_of_the_file_wins() -> Result<(), PatternError> {
    let keys = |order: [(&str, i32); 3]| Patterns::new(order.map(|(key, value)| (key.to_owned(), value)));
    let specific_first = keys([("layers.0.self_attn.q_proj", 1), ("v_proj", 2), (".*q_proj", 3)])?;
    assert_eq!(specific_first.lookup(&path(0, "q_proj")), Some(&1));
    assert_eq!(specific_first.lookup(&path(1, "q_proj")), Some(&3));
    assert_eq!(specific_first.lookup(&path(1, "v_proj")), Some(&2));
    assert_eq!(specific_first.lookup(&path(1, "k_proj")), None);
    let general_first = keys([(".*q_proj", 3), ("v_proj", 2), ("layers.0.self_attn.q_proj", 1)])?;
    assert_eq!(general_first.lookup(&path(0, "q_proj")), Some(&3));
    Ok(())
}

fn older(ranks: &[(&str, usize)], alphas: &[(&str, f64)]) -> OlderPatterns<usize, f64> {
    let ranks = ranks.iter().map(|&(key, rank)| (key.to_owned(), rank));
    let alphas = alphas.iter().map(|&(key, alpha)| (key.to_owned(), alpha));
    OlderPatterns::new(ranks, alphas).unwrap()
}

#[test]
fn the_older_rule_takes_one_key_for_both() {
    let q = path(0, "q_proj");
    let both = older(&[("q_proj", 2)], &[("q_proj", 16.0)]);
    assert_eq!(both.lookup(&q), (Some(&2), Some(&16.0)));
    assert_eq!(both.lookup(&path(0, "v_proj")), (None, None));
    let apart = older(&[("q_proj", 2)], &[("self_attn.q_proj", 16.0)]);
    assert_eq!(apart.lookup(&q), (Some(&2), None));
    let alpha_only = older(&[("v_proj", 2)], &[("self_attn.q_proj", 16.0)]);
    assert_eq!(alpha_only.lookup(&q), (None, Some(&16.0)));
}

#[test]
fn the_older_rule_needs_a_dot_and_groups_nothing() {
    let hit = |key: &str, path: &str| older(&[(key, 2)], &[]).lookup(path).0.is_some();
    let q = path(0, "q_proj");
    assert!(hit("q_proj", &q) && hit("layers.0.self_attn.q_proj", &q));
    assert!(!hit("q_proj", "q_proj"), "nothing stands before the key");
    assert!(!hit("model.layers.0.self_attn.q_proj", &q), "a whole path has no dot before it");
    assert!(!hit("^model.layers.0.self_attn.q_proj", &q));
    // `.*\.q_proj|v_proj$`: the first branch need not reach the end, the second must start the path.
    assert!(hit("q_proj|v_proj", &q));
    assert!(hit("q_proj|v_proj", &format!("{q}.base_layer")));
    assert!(!hit("q_proj|v_proj", &path(0, "v_proj")));
    assert!(hit("q_proj|v_proj", "v_proj"));
}

#[test]
fn keys_that_cannot_be_evaluated_are_named() {
    for (key, word) in [
        (r"(?!.*vision).*q_proj", "look-around"),
        (r"(?<=self_attn\.)q_proj", "look-around"),
        (r"(a)\1", "backreferences"),
        (r"q_proj\Z", "escape"),
        ("q_proj)", "unopened"),
        ("[q", "unclosed"),
    ] {
        match Patterns::new([(key.to_owned(), 1)]).unwrap_err() {
            PatternError::Unsupported { key: named, reason } => {
                assert_eq!(named, key);
                assert!(reason.contains(word) && !reason.contains('\n'), "{key}: {reason}");
            }
            other => panic!("{key}: {other}"),
        }
        assert!(OlderPatterns::new([(key.to_owned(), 1)], [("v_proj".to_owned(), 1.0)]).is_err(), "{key}");
        assert!(OlderPatterns::new([("v_proj".to_owned(), 1)], [(key.to_owned(), 1.0)]).is_err(), "{key}");
    }
    let key = "[a-z&&[^q]]_proj".to_owned();
    assert_eq!(Patterns::new([(key.clone(), 1)]).unwrap_err(), PatternError::ReadsDifferently { key });
}

#[test]
fn hostile_tables_are_bounded() -> Result<(), PatternError> {
    let key = "(?:a|b|.){3000}".to_owned();
    let too_large = PatternError::TooLarge { key: key.clone(), max_bytes: MAX_REGEX_BYTES };
    assert_eq!(Patterns::new([(key, 1)]).unwrap_err(), too_large);

    let long = "q".repeat(MAX_KEY_BYTES + 1);
    let too_long = PatternError::KeyTooLong { key_bytes: MAX_KEY_BYTES + 1, max_bytes: MAX_KEY_BYTES };
    assert_eq!(Patterns::new([(long, 1)]).unwrap_err(), too_long);

    let regexes = |count: usize| (0..count).map(|index| (format!("(q{index})"), index));
    let too_many = PatternError::TooManyKeys { max_keys: MAX_REGEX_KEYS };
    assert_eq!(Patterns::new(regexes(MAX_REGEX_KEYS + 1)).unwrap_err(), too_many);
    assert!(Patterns::new(regexes(MAX_REGEX_KEYS)).is_ok());

    let lengths = |count: usize| (1..=count).map(|length| ("q".repeat(length), length));
    let too_many = PatternError::TooManyShapes { max_shapes: MAX_PATH_SHAPES };
    assert_eq!(Patterns::new(lengths(MAX_PATH_SHAPES + 1)).unwrap_err(), too_many);
    let too_many = PatternError::TooManyShapes { max_shapes: 2 * MAX_PATH_SHAPES };
    assert_eq!(OlderPatterns::new(lengths(1), lengths(2 * MAX_PATH_SHAPES + 1)).unwrap_err(), too_many);
    assert_eq!(Patterns::new(lengths(MAX_PATH_SHAPES))?.lookup("model.qqq"), Some(&3));

    // Paths of every module, as some trainers write them, are no matter.
    let paths = Patterns::new((0..20_000).map(|layer| (path(layer, "q_proj"), layer)))?;
    assert_eq!(paths.lookup(&path(19_999, "q_proj")), Some(&19_999));
    Ok(())
}

#[test]
fn a_path_with_a_newline_is_no_module() -> Result<(), PatternError> {
    for key in ["q_proj", "(q_proj)"] {
        let patterns = Patterns::new([(key.to_owned(), 1)])?;
        assert!(patterns.lookup("model.q_proj").is_some());
        assert!(patterns.lookup("model.q_proj\n").is_none() && patterns.lookup("a\nb.q_proj").is_none());
    }
    Ok(())
}
