//! The only place that touches the file system: an adapter's directory, from which files of fixed names are read.
//!
//! Files are read into memory of their own and never mapped: a map changes under its reader when someone writes to the
//! file, and ends the process when someone shortens it. What was checked must be what is used. The copy costs about as
//! much as the page faults of a map whose every byte is hashed anyway.

use std::fs::{DirEntry, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};

use crate::error::{LoadError, Reasons, shown};
use crate::gguf;
use crate::reason::Reason;

/// Folders that a reason names.
const MAX_SHOWN_FOLDERS: usize = 20;

/// The directory of an adapter or its GGUF file, and the directory that its files may not leave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterSource {
    directory: PathBuf,
    root: PathBuf,
    file: Option<PlainName>,
}

impl AdapterSource {
    /// A directory whose files must lie inside it, or a GGUF file, which must lie in its directory. The directory may be
    /// given through a link.
    ///
    /// # Errors
    /// There is no such directory or file, or it cannot be entered.
    pub fn new(path: &Path) -> Result<Self, LoadError> {
        let found = resolve(path)?;
        Ok(AdapterSource { root: found.directory.clone(), ..found })
    }

    /// A directory whose files may be links to anywhere inside `root`, or a GGUF file that may be one: a store that keeps
    /// contents in one place and links to them from another, like the cache of the Hugging Face hub (root: the
    /// repository's folder in the cache; see [`AdapterSource::in_hub_cache`]).
    ///
    /// # Errors
    /// There is no such directory or file, it cannot be entered, or it does not lie in `root`.
    pub fn within(root: &Path, path: &Path) -> Result<Self, LoadError> {
        let found = resolve(path)?;
        let root = resolve(root)?;
        if root.file.is_some() {
            return Err(refuse(&root.directory, Reason::NotADirectory { found: "a regular file" }));
        }
        let source = AdapterSource { root: root.directory, ..found };
        if source.directory.starts_with(&source.root) {
            Ok(source)
        } else {
            Err(refuse(path, Reason::OutsideDirectory))
        }
    }

    /// The source of an adapter in the cache of the Hugging Face hub, where files are links: a directory
    /// `models--OWNER--NAME/snapshots/REVISION`, one below it, or a GGUF file in one. Its files may lead anywhere inside
    /// `models--OWNER--NAME` and nowhere else. None where the path has no such folders.
    ///
    /// # Errors
    /// As [`AdapterSource::within`].
    pub fn in_hub_cache(path: &Path) -> Result<Option<Self>, LoadError> {
        let Ok(path) = std::path::absolute(path) else { return Ok(None) };
        let is_repository = |folder: &Path| {
            let name = folder.file_name().and_then(|name| name.to_str());
            name.is_some_and(|name| name.starts_with("models--"))
                && path.strip_prefix(folder.join("snapshots")).is_ok_and(|rest| rest.iter().next().is_some())
        };
        let Some(root) = path.ancestors().find(|folder| is_repository(folder)) else { return Ok(None) };
        AdapterSource::within(root, &path).map(Some)
    }

    /// The directory with all links resolved.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The directory, or the file in it.
    pub(crate) fn path(&self) -> PathBuf {
        match &self.file {
            Some(file) => self.directory.join(&file.0),
            None => self.directory.clone(),
        }
    }

    /// The file, where the source is one.
    pub(crate) fn file(&self) -> Option<&PlainName> {
        self.file.as_ref()
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
            let source = AdapterSource { directory, root: self.root.clone(), file: None };
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

    /// The only entry whose name ends in `ending`, among the first thousand; none where there is none.
    ///
    /// # Errors
    /// Several do.
    pub(crate) fn only_file_ending(&self, ending: &str) -> Result<Option<PlainName>, Reason> {
        let Ok(entries) = self.directory.read_dir() else { return Ok(None) };
        let name = |entry: DirEntry| PlainName::new(entry.file_name().to_str()?).filter(|name| name.ends_with(ending));
        let mut found: Vec<PlainName> = entries.take(1000).flatten().filter_map(name).collect();
        if found.len() > 1 {
            let mut files: Vec<String> = found.iter().map(|name| shown(&name.0)).collect();
            files.sort();
            files.truncate(MAX_SHOWN_FOLDERS);
            return Err(Reason::SeveralFiles { files });
        }
        Ok(found.pop())
    }

    /// Whether the directory has an entry that `wanted` accepts by name, among the first thousand.
    pub(crate) fn holds_any(&self, wanted: impl Fn(&Path) -> bool) -> bool {
        let Ok(entries) = self.directory.read_dir() else { return false };
        entries.take(1000).flatten().any(|entry| wanted(&entry.path()))
    }
}

fn refuse(path: &Path, reason: Reason) -> LoadError {
    let mut reasons = Reasons::default();
    reasons.push(None, reason);
    reasons.into_error(Some(path))
}

/// A directory, or a GGUF file by its name: what it links to may have another name. The root is that of a file system.
fn resolve(path: &Path) -> Result<AdapterSource, LoadError> {
    let unreachable = |error: io::Error| refuse(path, Reason::Directory { message: error.to_string() });
    let found = path.canonicalize().map_err(unreachable)?;
    let metadata = found.metadata().map_err(unreachable)?;
    if metadata.is_dir() {
        return Ok(AdapterSource { directory: found.clone(), root: found, file: None });
    }
    let name = path.file_name().and_then(|name| name.to_str()).and_then(PlainName::new);
    let file = name.filter(|name| metadata.is_file() && name.ends_with(gguf::ENDING));
    let Some(file) = file else {
        return Err(refuse(path, Reason::NotADirectory { found: kind(&metadata) }));
    };
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let directory = parent.canonicalize().map_err(unreachable)?;
    Ok(AdapterSource { directory: directory.clone(), root: directory, file: Some(file) })
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
