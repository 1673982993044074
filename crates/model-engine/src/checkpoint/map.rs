//! Read-only memory maps of checkpoint files.

use std::fs::File;
use std::path::Path;

use memmap2::Mmap;

use super::error::CheckpointError;

/// Maps the whole of `path`.
pub(crate) fn map(path: &Path) -> Result<Mmap, CheckpointError> {
    let file = File::open(path).map_err(CheckpointError::io(path))?;
    let is_file = file.metadata().map_err(CheckpointError::io(path))?.is_file();
    if !is_file {
        let reason = "a regular file was expected".to_owned();
        return Err(CheckpointError::NotACheckpoint { path: path.to_owned(), reason });
    }
    // SAFETY: the map is read-only and lives only while one checkpoint is opened. That nothing writes to or truncates
    // the file in that time is the promise of whoever names the path, as for every reader of mapped weights; the
    // bytes themselves are treated as untrusted.
    unsafe { Mmap::map(&file) }.map_err(CheckpointError::io(path))
}
