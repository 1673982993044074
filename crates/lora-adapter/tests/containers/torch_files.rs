//! Files written by torch: the same tensors as in safetensors, whatever form the pickle has; and damaged archives.

use lora_adapter::{Adapter, ArchiveError, Note, Reason};
use lora_math::{Module, Site};
use safetensors::SafeTensors;

use crate::support::{CONFIG, Entry, Pickle, archive, directory, golden, good_pickle, name, open_bin, reason, zip};

#[test]
fn every_form_that_torch_writes_gives_the_tensors() {
    let cases =
        ["plain", "mixed", "float64", "ordered", "protocol_4", "parameters", "state_dict", "transposed", "views"];
    for case in cases {
        let path = golden("adapter_files/torch").join(case);
        let adapter = Adapter::open(&path).unwrap_or_else(|error| panic!("{case}: {error}"));
        let bytes = std::fs::read(path.join("expected.safetensors")).unwrap();
        let expected = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(expected.len(), 2 * adapter.pairs().len(), "{case}");
        assert_eq!(adapter.notes(), [], "{case}");
        for (site, pair) in adapter.pairs() {
            assert_eq!(pair.scaling(), 2.0);
            for matrix in [pair.a(), pair.b()] {
                let tensor = expected.tensor(matrix.tensor()).unwrap();
                assert_eq!(tensor.shape(), [matrix.rows(), matrix.cols()], "{case} {site}");
                assert_eq!(tensor.data(), matrix.bytes(), "{case} {site}");
            }
        }
    }
}

/// The content of an adapter does not depend on its container.
#[test]
fn pickle_and_safetensors_have_one_digest() {
    let path = golden("adapter_files/torch/ordered");
    let [config, weights] =
        ["adapter_config.json", "expected.safetensors"].map(|name| std::fs::read(path.join(name)).unwrap());
    let other = directory(&[("adapter_config.json", &config), ("adapter_model.safetensors", &weights)]);
    let (pickled, plain) = (Adapter::open(&path).unwrap(), Adapter::open(other.path()).unwrap());
    assert_eq!(pickled.content(), plain.content());
}

#[test]
fn safetensors_are_preferred_and_the_pickle_is_not_even_looked_at() {
    let path = golden("adapter_files/torch/plain");
    let weights = std::fs::read(path.join("expected.safetensors")).unwrap();
    let both = directory(&[
        ("adapter_config.json", CONFIG.as_bytes()),
        ("adapter_model.safetensors", &weights),
        ("adapter_model.bin", b"cos\nsystem\n(S'false'\ntR."),
    ]);
    let notes = Adapter::open(both.path()).unwrap().notes().to_vec();
    assert!(notes.contains(&Note::PickleIgnored), "{notes:?}");
}

#[test]
fn the_format_before_1_6_is_refused_by_name() {
    let found = reason(Adapter::open(&golden("adapter_files/torch/old_torch")));
    assert_eq!(found, Reason::Archive(ArchiveError::OldTorch));
}

#[test]
fn views_with_gaps_are_refused_by_name() {
    let error = Adapter::open(&golden("adapter_files/torch/strided")).unwrap_err();
    assert_eq!(error.reasons().count(), 4);
    assert!(
        error.reasons().all(|reason| matches!(reason, Reason::Archive(ArchiveError::Strided { strides, .. })
            if strides[1] == 2)),
        "{error}"
    );
}

#[test]
fn what_is_made_here_is_a_good_file() {
    let adapter = open_bin(&good_pickle(|pickle| pickle)).unwrap();
    let pair = adapter.pair(Site::layer(0, Module::QProj)).unwrap();
    assert_eq!((pair.rank(), pair.in_features(), pair.out_features()), (4, 8, 8));
    assert_eq!(pair.a().to_f32()[..3], [0.0, 1.0, 2.0]);
}

fn bin(pickle: Pickle) -> Reason {
    reason(open_bin(&archive(&pickle.0)))
}

/// A dictionary of one tensor.
fn one(key: &str, storage: i32, offset: i32, shape: &[i32], strides: &[i32]) -> Pickle {
    Pickle::default().op(b"\x80\x02}").text(&name("A")).tensor(key, storage, offset, shape, strides).op(b"s.")
}

#[test]
fn tensors_stay_in_their_storage() {
    let outside = |found: Reason| matches!(found, Reason::Archive(ArchiveError::OutsideStorage { .. }));
    assert!(outside(bin(one("0", 32, 1, &[4, 8], &[8, 1]))));
    assert!(outside(bin(one("0", 32, 0, &[5, 8], &[8, 1]))));
    assert!(outside(bin(one("0", 32, i32::MAX, &[1, 1], &[1, 1]))));
    let dims = [i32::MAX, i32::MAX, i32::MAX];
    assert!(outside(bin(one("0", 32, 0, &dims, &[1, 1, 1]))));
    let gaps = bin(one("0", 32, 0, &[2, 2], &[8, 2]));
    assert!(matches!(gaps, Reason::Archive(ArchiveError::Strided { .. })), "{gaps}");
    let repeated = bin(one("0", 32, 0, &[4, 8], &[0, 0]));
    assert!(matches!(repeated, Reason::Archive(ArchiveError::Strided { .. })), "{repeated}");
    for length in [31, 33, 0, i32::MAX] {
        let found = bin(one("0", length, 0, &[4, 8], &[8, 1]));
        assert!(matches!(found, Reason::Archive(ArchiveError::StorageBytes { found_bytes: 128, .. })), "{found}");
    }
}

#[test]
fn storages_are_entries_of_the_archive() {
    for key in ["2", "../data.pkl", "", "/etc/passwd", &"9".repeat(5000)] {
        let found = bin(one(key, 32, 0, &[4, 8], &[8, 1]));
        assert!(matches!(found, Reason::Archive(ArchiveError::MissingStorage { .. })), "{found}");
    }
}

/// A file of a few kilobytes cannot make a reader of gigabytes out of one storage.
#[test]
fn tensors_together_are_not_larger_than_their_file() {
    let many = |pickle: Pickle| {
        (1..100).fold(pickle, |pickle, layer| {
            let name = name("A").replace("layers.0", &format!("layers.{layer}"));
            pickle.text(&name).tensor("0", 8000, 0, &[4, 2000], &[2000, 1])
        })
    };
    let pickle = many(Pickle::default().op(b"\x80\x02}(")).op(b"u.");
    let file = zip(&[Entry::new("a/data.pkl", pickle.0), Entry::new("a/data/0", vec![0; 32_000])]);
    assert_eq!(reason(open_bin(&file)), Reason::Archive(ArchiveError::Shared { file_bytes: file.len() as u64 }));
}

#[test]
fn names_that_stand_twice_are_refused() {
    let twice = |pickle: Pickle| pickle.text(&name("A")).tensor("1", 32, 0, &[4, 8], &[8, 1]);
    assert_eq!(reason(open_bin(&good_pickle(twice))), Reason::DuplicateTensor { tensor: name("A") });
}

#[test]
fn a_dtype_of_another_size_is_refused() {
    let good = good_pickle(|pickle| pickle);
    let at = |what: &[u8]| good.windows(what.len()).position(|window| window == what).unwrap();
    let mut changed = good.clone();
    let place = at(b"FloatStorage");
    changed.splice(place..place + 12, *b"ShortStorage");
    let found = reason(open_bin(&changed));
    assert!(matches!(found, Reason::Archive(ArchiveError::StorageBytes { expected_bytes: Some(64), .. })), "{found}");
}

fn not_an_archive(bytes: &[u8]) -> bool {
    matches!(reason(open_bin(bytes)), Reason::Archive(ArchiveError::NotAnArchive { .. }))
}

#[test]
fn archives_that_torch_does_not_write_are_refused() {
    let pickle = one("0", 32, 0, &[4, 8], &[8, 1]).0;
    let good = [Entry::new("a/data.pkl", pickle.clone()), Entry::new("a/data/0", vec![0; 128])];
    let changed = |change: fn(&mut [Entry])| {
        let mut entries = good.clone();
        change(&mut entries);
        reason(open_bin(&zip(&entries)))
    };
    let bad = |found: Reason| matches!(found, Reason::Archive(ArchiveError::BadEntry { .. }));
    assert!(bad(changed(|entries| entries[0].method = 8)), "compressed pickle");
    assert!(bad(changed(|entries| entries[1].method = 8)), "compressed storage");
    assert!(bad(changed(|entries| entries[1].flags = 1)), "encrypted storage");
    assert!(bad(changed(|entries| entries[1].name = "a/data.pkl".into())), "a name that stands twice");
    let big = [&good[..], &[Entry::new("a/byteorder", "big")]].concat();
    assert!(bad(reason(open_bin(&zip(&big)))), "another byte order");
    let second = [&good[..], &[Entry::new("b/data.pkl", pickle.clone())]].concat();
    assert!(not_an_archive(&zip(&second)));
    assert!(not_an_archive(&zip(&[Entry::new("a/b/data.pkl", pickle.clone())])));
    assert!(not_an_archive(&zip(&[Entry::new("data.pkl", pickle)])));
    assert!(not_an_archive(&zip(&[])));
    for bytes in [&b""[..], b"PK", b"PK\x03\x04", b"PK\x05\x06", &[0; 100], b"{}"] {
        assert!(not_an_archive(bytes), "{bytes:?}");
    }
}

/// Every cut, and every byte of the archive's own records changed: refused or read, never a panic.
#[test]
fn damaged_archives_never_panic() {
    let good = std::fs::read(golden("adapter_files/torch/plain/adapter_model.bin")).unwrap();
    for cut in (0..good.len()).step_by(41) {
        assert!(open_bin(&good[..cut]).is_err(), "cut at {cut}");
    }
    for at in (0..good.len()).step_by(17).chain(good.len() - 120..good.len()) {
        let mut bytes = good.clone();
        bytes[at] ^= 0xff;
        drop(open_bin(&bytes));
    }
}
