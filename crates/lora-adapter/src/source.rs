//! The only place that touches the file system: an adapter's directory, from which files of fixed names are read.
//!
//! Files are read into memory of their own and never mapped: a map changes under its reader when someone writes to the
//! file, and ends the process when someone shortens it. What was checked must be what is used. The copy costs about as
//! much as the page faults of a map whose every byte is hashed anyway.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};

use crate::error::{LoadError, Reasons, shown};
use crate::reason::Reason;

/// Folders that a reason names.
const MAX_SHOWN_FOLDERS: usize = 20;

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
        self.open_path(Path::new(name))
    }

    /// As [`AdapterSource::open`], a name from a file.
    pub(crate) fn open_plain(&self, name: &PlainName) -> Result<(File, u64), Reason> {
        self.open_path(Path::new(&name.0))
    }

    fn open_path(&self, name: &Path) -> Result<(File, u64), Reason> {
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

    /// The source of the only folder here that holds `file`, with its name; none where no folder does. Looks at the
    /// first thousand entries. A folder that leads out of the root does not count.
    ///
    /// # Errors
    /// Several folders hold one.
    pub(crate) fn only_folder_with(&self, file: &'static str) -> Result<Option<(String, AdapterSource)>, Reason> {
        let Ok(entries) = self.directory.read_dir() else { return Ok(None) };
        let folder = |path: PathBuf| {
            let directory = path.canonicalize().ok().filter(|path| path.starts_with(&self.root) && path.is_dir())?;
            let source = AdapterSource { directory, root: self.root.clone() };
            source.holds(file).then(|| (shown(&path.file_name().unwrap_or_default().to_string_lossy()), source))
        };
        let mut found: Vec<_> = entries.take(1000).flatten().filter_map(|entry| folder(entry.path())).collect();
        if found.len() > 1 {
            let mut folders: Vec<String> = found.into_iter().map(|(name, _)| name).collect();
            folders.sort();
            folders.truncate(MAX_SHOWN_FOLDERS);
            return Err(Reason::SeveralFolders { folders });
        }
        Ok(found.pop())
    }

    /// Whether the directory has an entry that `wanted` accepts by name, among the first thousand.
    pub(crate) fn holds_any(&self, wanted: impl Fn(&Path) -> bool) -> bool {
        let Ok(entries) = self.directory.read_dir() else { return false };
        entries.take(1000).flatten().any(|entry| wanted(&entry.path()))
    }
}

/// The name of a file or folder in a directory, which leads nowhere else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PlainName(String);

impl PlainName {
    /// None where `name` is more or other than one plain name.
    pub(crate) fn new(name: &str) -> Option<Self> {
        let plain = !name.is_empty() && name.len() <= 255 && !name.contains(['/', '\\', ':', '\0']);
        (plain && name != "." && name != "..").then(|| PlainName(name.to_owned()))
    }

    pub(crate) fn ends_with(&self, end: &str) -> bool {
        self.0.ends_with(end)
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
