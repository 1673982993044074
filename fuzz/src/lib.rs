//! The bodies of the fuzz targets, and the folder in memory that each process works in.
//!
//! What a body does with an input stands in `entry.rs`, which the corpus replay of `lora-adapter` compiles too.

pub mod entry;

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// A folder of this process: in memory where the system has such a place.
pub fn scratch() -> &'static Path {
    static SCRATCH: LazyLock<PathBuf> = LazyLock::new(|| {
        let memory = Path::new("/dev/shm");
        let parent = if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() };
        let path = parent.join(format!("multilora-fuzz-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder for the adapter's files");
        path
    });
    &SCRATCH
}
