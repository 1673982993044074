//! Replays the seeds and the regressions of the fuzz targets through the bodies of the targets: nothing panics, and memory
//! stays within bounds. New findings of a fuzzer go into `fuzz/regressions`; see `docs/fuzzing.md`.

use std::fs;
use std::path::{Path, PathBuf};

#[expect(unreachable_pub, reason = "the targets use it from another crate")]
#[path = "../../../fuzz/src/entry.rs"]
mod entry;

/// What reading a file of at most 64 KiB may add to the memory of this process, with all that the process needs besides.
const MAX_MEMORY_BYTES: u64 = 128 << 20;

#[test]
fn seeds_and_regressions_do_no_harm() {
    let scratch = tempfile::tempdir().unwrap();
    let mut num_inputs = 0;
    for (target, run) in entry::ENTRIES {
        for folder in ["seeds", "regressions"] {
            for path in files(&fuzz().join(folder).join(target)) {
                let input = fs::read(&path).unwrap();
                println!("{}", path.display());
                run(scratch.path(), &input);
                num_inputs += 1;
            }
        }
    }
    assert!(num_inputs > 100, "{num_inputs} inputs: the seeds are not where they should be");
    if let Some(peak_bytes) = peak_memory() {
        assert!(peak_bytes < MAX_MEMORY_BYTES, "{peak_bytes} bytes");
    }
}

/// Every target has seeds that load, else it would test refusals only.
#[test]
fn every_target_has_a_seed_that_loads() {
    let scratch = tempfile::tempdir().unwrap();
    for (target, run) in entry::ENTRIES {
        let loads = |path: &PathBuf| run(scratch.path(), &fs::read(path).unwrap()) > 0;
        let num_loaded = files(&fuzz().join("seeds").join(target)).iter().filter(|path| loads(path)).count();
        assert!(num_loaded >= 3, "{target}: {num_loaded} seeds load");
    }
}

fn fuzz() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz")
}

/// In the order of their names; none where the folder is missing.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
}

/// The most memory that this process has had, where the system tells.
fn peak_memory() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes * 1024)
}
