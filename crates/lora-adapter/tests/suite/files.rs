//! The directory: missing files, other formats, links out of it, special files, and files that do not matter.

use std::fs;

use lora_adapter::{Adapter, AdapterSource, Feature, Located, Note, Reason};
use tempfile::TempDir;

use crate::support::{config, directory, file, qv, reasons, reasons_of};

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";

fn good() -> TempDir {
    directory(config().to_string().as_bytes(), &file(&qv()))
}

#[test]
fn missing_files_are_named() {
    let empty = TempDir::new().unwrap();
    let error = Adapter::open(empty.path()).unwrap_err();
    let missing = |name| Located { file: Some(name), reason: Reason::MissingFile };
    assert_eq!(error.located(), [missing(CONFIG), missing(WEIGHTS)]);
    let found = reasons_of(&empty.path().join("nowhere"));
    assert!(matches!(&found[..], [Reason::Directory { .. }]), "{found:?}");
    let found = reasons_of(&good().path().join(CONFIG));
    assert!(matches!(&found[..], [Reason::Directory { .. } | Reason::NotADirectory { .. }]), "{found:?}");
}

#[test]
fn other_formats_are_refused_by_name() {
    for (name, feature) in [("adapters.safetensors", Feature::Mlx), ("adapter.gguf", Feature::Gguf)] {
        let directory = good();
        fs::rename(directory.path().join(WEIGHTS), directory.path().join(name)).unwrap();
        assert_eq!(reasons_of(directory.path()), [Reason::UnsupportedFormat { feature }], "{name}");
    }
}

#[test]
fn safetensors_win_over_a_pickle() {
    let directory = good();
    fs::write(directory.path().join("adapter_model.bin"), b"cos\nsystem\n(S'false'\ntR.").unwrap();
    assert_eq!(Adapter::open(directory.path()).unwrap().notes(), [Note::PickleIgnored]);
}

#[test]
fn other_files_do_not_matter() {
    let directory = good();
    let plain = Adapter::open(directory.path()).unwrap();
    for name in ["added_tokens.json", "tokenizer_config.json", "README.md", "optimizer.pt", "rng_state.pth"] {
        fs::write(directory.path().join(name), b"{\"auto_map\": \x00").unwrap();
    }
    assert_eq!(Adapter::open(directory.path()).unwrap(), plain);
}

#[test]
fn directories_in_place_of_files_are_refused() {
    for name in [CONFIG, WEIGHTS] {
        let directory = good();
        fs::remove_file(directory.path().join(name)).unwrap();
        fs::create_dir(directory.path().join(name)).unwrap();
        assert_eq!(reasons_of(directory.path()), [Reason::NotRegularFile { found: "a directory" }]);
    }
}

#[test]
fn a_config_longer_than_any_is_refused() {
    let directory = good();
    let config = fs::File::options().write(true).open(directory.path().join(CONFIG)).unwrap();
    config.set_len(1 << 40).unwrap();
    let expected = Reason::FileTooLong { found_bytes: 1 << 40, limit_bytes: 16 << 20 };
    assert_eq!(reasons_of(directory.path()), [expected]);
}

/// A sparse file can claim any length; nothing is allocated before the plan holds.
#[test]
fn weights_longer_than_memory_are_refused_by_their_plan() {
    let directory = good();
    let weights = fs::File::options().write(true).open(directory.path().join(WEIGHTS)).unwrap();
    weights.set_len(1 << 42).unwrap();
    assert!(
        matches!(reasons_of(directory.path())[..], [Reason::TrailingBytes { found_bytes, .. }] if found_bytes == 1 << 42)
    );
}

#[cfg(unix)]
mod unix {
    use std::os::unix::fs::symlink;
    use std::process::Command;

    use super::*;

    #[test]
    fn links_may_not_leave_the_directory() {
        let store = good();
        let plain = Adapter::open(store.path()).unwrap();
        for name in [CONFIG, WEIGHTS] {
            let directory = good();
            fs::remove_file(directory.path().join(name)).unwrap();
            symlink(store.path().join(name), directory.path().join(name)).unwrap();
            assert_eq!(reasons_of(directory.path()), [Reason::OutsideDirectory], "{name}");
        }
        let inside = good();
        fs::rename(inside.path().join(WEIGHTS), inside.path().join("weights")).unwrap();
        symlink("weights", inside.path().join(WEIGHTS)).unwrap();
        assert_eq!(Adapter::open(inside.path()).unwrap(), plain);
        let parent = TempDir::new().unwrap();
        symlink(store.path(), parent.path().join("linked")).unwrap();
        assert_eq!(Adapter::open(&parent.path().join("linked")).unwrap(), plain, "the caller's own link");
    }

    /// The cache of the Hugging Face hub: snapshots are links to blobs beside them.
    #[test]
    fn a_store_of_links_is_read_within_its_root() {
        let store = TempDir::new().unwrap();
        let (blobs, snapshot) = (store.path().join("blobs"), store.path().join("snapshots/main"));
        fs::create_dir_all(&blobs).unwrap();
        fs::create_dir_all(&snapshot).unwrap();
        let good = good();
        for name in [CONFIG, WEIGHTS] {
            fs::rename(good.path().join(name), blobs.join(name)).unwrap();
            symlink(format!("../../blobs/{name}"), snapshot.join(name)).unwrap();
        }
        assert_eq!(reasons_of(&snapshot), [Reason::OutsideDirectory, Reason::OutsideDirectory]);
        let source = AdapterSource::within(store.path(), &snapshot).unwrap();
        assert_eq!(Adapter::read(&source).unwrap().pairs().len(), 4);
        let outside = AdapterSource::within(&snapshot, store.path());
        assert_eq!(reasons(outside), [Reason::OutsideDirectory]);
    }

    #[test]
    fn links_that_lead_nowhere_or_in_circles_are_refused() {
        let directory = good();
        fs::remove_file(directory.path().join(WEIGHTS)).unwrap();
        symlink(WEIGHTS, directory.path().join(WEIGHTS)).unwrap();
        assert!(matches!(&reasons_of(directory.path())[..], [Reason::Unreadable { .. }]));
        fs::remove_file(directory.path().join(WEIGHTS)).unwrap();
        symlink("gone", directory.path().join(WEIGHTS)).unwrap();
        assert_eq!(reasons_of(directory.path()), [Reason::MissingFile]);
    }

    #[test]
    fn pipes_and_devices_do_not_block() {
        for name in [CONFIG, WEIGHTS] {
            let directory = good();
            let path = directory.path().join(name);
            fs::remove_file(&path).unwrap();
            assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
            assert_eq!(reasons_of(directory.path()), [Reason::NotRegularFile { found: "a special file" }]);
        }
    }
}
