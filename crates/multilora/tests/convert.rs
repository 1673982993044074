//! `multilora convert`: adapters that need the base weights become plain ones, and those that cannot are refused.
#![cfg(feature = "cli")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use multilora::adapter::{Adapter, prepare};
use multilora::engine::checkpoint::CheckpointInfo;
use multilora::engine::model::config_shape;

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(path)
}

fn multilora(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_multilora")).args(arguments).output().expect("the binary runs")
}

fn convert(case: &str, out: &Path) -> Output {
    let (model, adapter) = (golden("models/llama"), golden("adapters/llama").join(case));
    let path = |path: &Path| path.display().to_string();
    multilora(&["convert", "--model", &path(&model), "--adapter", &path(&adapter), "--out", &path(out)])
}

#[test]
fn adapters_of_a_changed_base_become_plain() {
    let shape = config_shape(&CheckpointInfo::open(&golden("models/llama")).unwrap().config).unwrap();
    let root = tempfile::tempdir().unwrap();
    for case in ["kasa", "init_pissa", "init_olora"] {
        let out = root.path().join(case);
        let output = convert(case, &out);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{case}: {error}");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(said.contains("pairs, largest rank 8, prepared in"), "{said}");
        // It needs no weights any more.
        let plain = prepare(Adapter::open(&out).unwrap(), &shape).unwrap();
        assert_eq!(plain.max_rank(), 8, "{case}");
    }
}

#[test]
fn what_a_plain_adapter_cannot_say_is_refused() {
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir(root.path().join("there")).unwrap();
    for (case, out, part) in [
        ("dora", "dora", "cannot be written as a plain adapter"),
        ("mts_norm", "norm", "cannot be written as a plain adapter"),
        ("tti_list", "tokens", "trainable tokens"),
        ("kasa", "there", "is there already"),
    ] {
        let output = convert(case, &root.path().join(out));
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), error.lines().count()), (Some(2), 1), "{error}");
        assert!(error.contains(part), "{case}: {error}");
    }
    assert_eq!(root.path().read_dir().unwrap().count(), 1, "nothing was left");
}
