//! The only place that touches the file system: an adapter's directory, from which files of fixed names are read.
//!
//! Files are read into memory of their own and never mapped: a map changes under its reader when someone writes to the
//! file, and ends the process when someone shortens it. What was checked must be what is used. The copy costs about as
//! much as the page faults of a map whose every byte is hashed anyway.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};

use crate::error::{LoadError, Reasons};
use crate::reason::Reason;

/// The directory of an adapter, and the directory that its files may not leave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterSource {
    directory: PathBuf,
    root: PathBuf,
}

impl AdapterSource {
    /// A directory whose files must lie inside it. The directory itself may be given through a link.
    ///
    /// # Errors
    /// There is no such directory, or it cannot be entered.
    pub fn new(directory: &Path) -> Result<Self, LoadError> {
        Self::within(directory, directory)
    }

    /// A directory whose files may be links to anywhere inside `root`: a store that keeps contents in one place and
    /// links to them from another, like the cache of the Hugging Face hub (root: the repository's folder in the cache).
    ///
    /// # Errors
    /// There is no such directory, it cannot be entered, or it does not lie in `root`.
    pub fn within(root: &Path, directory: &Path) -> Result<Self, LoadError> {
        let refuse = |reason| {
            let mut reasons = Reasons::default();
            reasons.push(None, reason);
            reasons.into_error(Some(directory))
        };
        let resolve = |path: &Path| {
            let unreachable = |error: io::Error| refuse(Reason::Directory { message: error.to_string() });
            let path = path.canonicalize().map_err(unreachable)?;
            let metadata = path.metadata().map_err(unreachable)?;
            let found = kind(&metadata);
            if metadata.is_dir() { Ok(path) } else { Err(refuse(Reason::NotADirectory { found })) }
        };
        let source = AdapterSource { directory: resolve(directory)?, root: resolve(root)? };
        if source.directory.starts_with(&source.root) { Ok(source) } else { Err(refuse(Reason::OutsideDirectory)) }
    }

    /// The directory with all links resolved.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Opens a file and tells its length. `name` is one of this crate's own constants, never text of a file.
    pub(crate) fn open(&self, name: &'static str) -> Result<(File, u64), Reason> {
        let unreadable = |error: io::Error| match error.kind() {
            ErrorKind::NotFound => Reason::MissingFile,
            _ => Reason::Unreadable { message: error.to_string() },
        };
        let path = self.directory.join(name).canonicalize().map_err(unreadable)?;
        if !path.starts_with(&self.root) {
            return Err(Reason::OutsideDirectory);
        }
        let metadata = path.metadata().map_err(unreadable)?;
        if !metadata.is_file() {
            return Err(Reason::NotRegularFile { found: kind(&metadata) });
        }
        // The path holds no link any more; one that someone puts there now is not followed, and a pipe does not block.
        let file = options().open(&path).map_err(unreadable)?;
        let metadata = file.metadata().map_err(unreadable)?;
        if !metadata.is_file() {
            return Err(Reason::NotRegularFile { found: kind(&metadata) });
        }
        Ok((file, metadata.len()))
    }

    /// Reads a whole file of at most `limit_bytes`.
    pub(crate) fn read(&self, name: &'static str, limit_bytes: u64) -> Result<Vec<u8>, Reason> {
        let (file, found_bytes) = self.open(name)?;
        if found_bytes > limit_bytes {
            return Err(Reason::FileTooLong { found_bytes, limit_bytes });
        }
        let mut bytes = Vec::new();
        // One byte more than the length: a file that grows meanwhile is not cut in silence.
        let read = file.take(limit_bytes + 1).read_to_end(&mut bytes);
        read.map_err(|error| Reason::Unreadable { message: error.to_string() })?;
        if bytes.len() as u64 > limit_bytes {
            return Err(Reason::FileTooLong { found_bytes: bytes.len() as u64, limit_bytes });
        }
        Ok(bytes)
    }

    /// Whether anything stands under this name.
    pub(crate) fn holds(&self, name: &str) -> bool {
        self.directory.join(name).symlink_metadata().is_ok()
    }

    /// Whether the directory has an entry that `wanted` accepts by name, among the first thousand.
    pub(crate) fn holds_any(&self, wanted: impl Fn(&Path) -> bool) -> bool {
        let Ok(entries) = self.directory.read_dir() else { return false };
        entries.take(1000).flatten().any(|entry| wanted(&entry.path()))
    }
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NOFOLLOW | libc::O_NONBLOCK);
    options
}

fn kind(metadata: &Metadata) -> &'static str {
    if metadata.is_dir() {
        "a directory"
    } else if metadata.is_file() {
        "a regular file"
    } else {
        "a special file"
    }
}
