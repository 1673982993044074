//! Weights in several files with an index, and adapters in a folder of their own name.

use std::fs;
use std::path::Path;

use lora_adapter::{Adapter, AdapterSource, Note, Reason};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{config, directory, file, load, qv, reasons, reasons_of};

const CONFIG: &str = "adapter_config.json";
const INDEX: &str = "adapter_model.safetensors.index.json";
const FIRST: &str = "adapter_model-00001-of-00002.safetensors";
const SECOND: &str = "adapter_model-00002-of-00002.safetensors";

fn weight_map() -> Value {
    let tensors = qv().into_iter().enumerate();
    tensors.map(|(at, tensor)| (tensor.name, json!(if at % 3 == 0 { FIRST } else { SECOND }))).collect()
}

/// Halves of one pair stand in different files here.
fn sharded(index: &str) -> TempDir {
    let directory = TempDir::new().unwrap();
    let path = |name: &str| directory.path().join(name);
    fs::write(path(CONFIG), config().to_string()).unwrap();
    for shard in [FIRST, SECOND] {
        let tensors: Vec<_> = qv().into_iter().filter(|tensor| weight_map()[&tensor.name] == shard).collect();
        fs::write(path(shard), file(&tensors)).unwrap();
    }
    write_index(directory.path(), index, weight_map());
    directory
}

fn write_index(directory: &Path, index: &str, weight_map: Value) {
    let text = json!({"metadata": {"total_size": 1}, "weight_map": weight_map}).to_string();
    fs::write(directory.join(index), text).unwrap();
}

#[test]
fn several_files_are_read_as_one() {
    let plain = load(&config(), &qv()).unwrap();
    for index in [INDEX, "model.safetensors.index.json"] {
        let adapter = Adapter::open(sharded(index).path()).unwrap();
        assert_eq!(adapter.content(), plain.content(), "{index}");
        assert_eq!(adapter.notes(), []);
    }
}

#[test]
fn one_file_wins_over_an_index() {
    let directory = sharded(INDEX);
    fs::write(directory.path().join("adapter_model.safetensors"), file(&qv()[..4])).unwrap();
    assert_eq!(Adapter::open(directory.path()).unwrap().pairs().len(), 2);
}

#[test]
fn index_and_files_must_agree() {
    let name = |at: usize| qv()[at].name.clone();
    let changed = |change: fn(&mut Value)| {
        let directory = sharded(INDEX);
        let mut map = weight_map();
        change(&mut map);
        write_index(directory.path(), INDEX, map);
        reasons_of(directory.path())
    };
    let moved = changed(|map| map[&qv()[0].name] = json!(SECOND));
    assert_eq!(moved, [Reason::NotInIndex { tensor: name(0), shard: FIRST.into() }]);
    let unnamed = changed(|map| drop(map.as_object_mut().unwrap().remove(&qv()[1].name)));
    assert_eq!(unnamed, [Reason::NotInIndex { tensor: name(1), shard: SECOND.into() }]);
    let absent = changed(|map| map["absent"] = json!(FIRST));
    assert_eq!(absent, [Reason::NotInShard { tensor: "absent".into(), shard: FIRST.into() }]);
    let gone = changed(|map| map["absent"] = json!("adapter_model-00003-of-00003.safetensors"));
    assert_eq!(gone.len(), 1);
    assert!(matches!(&gone[0], Reason::Shard { reason, .. } if **reason == Reason::MissingFile), "{gone:?}");
    let number = changed(|map| map["absent"] = json!(3));
    assert!(matches!(&number[..], [Reason::BadIndex { .. }]), "{number:?}");
    let empty = changed(|map| *map = json!({}));
    assert!(matches!(&empty[..], [Reason::BadIndex { .. }]), "{empty:?}");
    let list = changed(|map| *map = json!([]));
    assert!(matches!(&list[..], [Reason::BadIndex { .. }]), "{list:?}");
}

#[test]
fn a_damaged_file_is_named() {
    let directory = sharded(INDEX);
    let path = directory.path().join(SECOND);
    let whole = fs::read(&path).unwrap();
    fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    let found = reasons_of(directory.path());
    let cut = |reason: &Reason| matches!(reason, Reason::Truncated { .. });
    assert!(matches!(&found[..], [Reason::Shard { shard, reason }] if shard == SECOND && cut(reason)), "{found:?}");
    fs::write(directory.path().join(INDEX), r#"{"weight_map":{"a":"b","a":"c"}}"#).unwrap();
    assert!(matches!(&reasons_of(directory.path())[..], [Reason::BadIndex { .. }]));
    fs::write(directory.path().join(INDEX), "[").unwrap();
    assert!(matches!(&reasons_of(directory.path())[..], [Reason::BadIndex { .. }]));
}

/// The file outside is a good one: only its place is wrong.
#[test]
fn an_index_opens_nothing_outside_the_directory() {
    let parent = TempDir::new().unwrap();
    fs::write(parent.path().join("outside.safetensors"), file(&qv())).unwrap();
    let inside = parent.path().join("adapter");
    fs::create_dir(&inside).unwrap();
    fs::write(inside.join(CONFIG), config().to_string()).unwrap();
    let absolute = parent.path().join("outside.safetensors").to_string_lossy().into_owned();
    let long = format!("{}.safetensors", "x".repeat(5000));
    for name in ["../outside.safetensors", &absolute, "..\\outside.safetensors", "a\0.safetensors", "..", "", &long] {
        write_index(&inside, INDEX, qv().into_iter().map(|tensor| (tensor.name, json!(name))).collect());
        let found = reasons_of(&inside);
        let [Reason::Shard { reason, .. }] = &found[..] else { panic!("{name}: {found:?}") };
        assert_eq!(**reason, Reason::BadShardName, "{name}");
    }
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("../outside.safetensors", inside.join(FIRST)).unwrap();
        write_index(&inside, INDEX, qv().into_iter().map(|tensor| (tensor.name, json!(FIRST))).collect());
        let found = reasons_of(&inside);
        let outside = |reason: &Reason| *reason == Reason::OutsideDirectory;
        assert!(matches!(&found[..], [Reason::Shard { reason, .. }] if outside(reason)), "{found:?}");
        let source = AdapterSource::within(parent.path(), &inside).unwrap();
        assert_eq!(Adapter::read(&source).unwrap().pairs().len(), 4);
    }
    // The config itself is safe to read, and is no safetensors file.
    write_index(&inside, INDEX, json!({"a": CONFIG}));
    let found = reasons_of(&inside);
    assert!(matches!(&found[..], [Reason::Shard { reason, .. }] if **reason == Reason::BadShardName), "{found:?}");
}

fn put_adapter(folder: &Path) {
    fs::create_dir(folder).unwrap();
    fs::write(folder.join(CONFIG), config().to_string()).unwrap();
    fs::write(folder.join("adapter_model.safetensors"), file(&qv())).unwrap();
}

#[test]
fn the_only_named_adapter_is_read() {
    let plain = load(&config(), &qv()).unwrap();
    let parent = TempDir::new().unwrap();
    fs::create_dir(parent.path().join("runs")).unwrap();
    put_adapter(&parent.path().join("german"));
    let adapter = Adapter::open(parent.path()).unwrap();
    assert_eq!(adapter.content(), plain.content());
    assert_eq!(adapter.notes(), [Note::NamedFolder { folder: "german".into() }]);

    put_adapter(&parent.path().join("french"));
    let expected = Reason::SeveralFolders { folders: vec!["french".into(), "german".into()] };
    assert_eq!(reasons_of(parent.path()), [expected]);

    // What stands in the directory itself is the adapter, even a bad one.
    fs::write(parent.path().join("adapter_model.safetensors"), file(&qv())).unwrap();
    assert_eq!(reasons_of(parent.path()), [Reason::MissingFile]);
}

#[test]
fn a_refusal_names_the_folder() {
    let parent = TempDir::new().unwrap();
    put_adapter(&parent.path().join("german"));
    fs::write(parent.path().join("german").join(CONFIG), "[]").unwrap();
    let error = Adapter::open(parent.path()).unwrap_err();
    assert!(error.directory().unwrap().ends_with("german"));
    assert_eq!(reasons(Adapter::open(parent.path())), [Reason::NotAnObject { found: "an array" }]);
}

#[cfg(unix)]
#[test]
fn a_folder_outside_the_root_is_not_entered() {
    let store = directory(config().to_string().as_bytes(), &file(&qv()));
    let parent = TempDir::new().unwrap();
    std::os::unix::fs::symlink(store.path(), parent.path().join("german")).unwrap();
    assert_eq!(reasons_of(parent.path()), [Reason::MissingFile, Reason::MissingFile]);
}
