//! Why an adapter is not loaded: every reason at once, each with its file, what was expected and what was found.
//!
//! None of these is worth a retry with the same files. Text of a file is held only in a form that is safe to print:
//! control characters escaped, length bounded.

use std::fmt;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::reason::Reason;

/// Reasons kept of one adapter: a hostile file can hold a million bad tensors.
const MAX_REASONS: usize = 1000;

/// Longest piece of a file's text that a reason holds, in characters.
const MAX_SHOWN: usize = 160;

/// Why an adapter is not loaded. Its text has one line for each reason.
#[derive(Clone, Debug, PartialEq, Error)]
#[error("{}", self.text())]
pub struct LoadError {
    directory: Option<PathBuf>,
    reasons: Vec<Located>,
    num_omitted: usize,
}

/// A reason, and the file that gives it (none for an adapter made in memory).
#[derive(Clone, Debug, PartialEq)]
pub struct Located {
    /// Name of the file inside the adapter's directory.
    pub file: Option<&'static str>,
    /// What is wrong with it.
    pub reason: Reason,
}

impl fmt::Display for Located {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.file {
            Some(file) => write!(f, "{file}: {}", self.reason),
            None => self.reason.fmt(f),
        }
    }
}

impl LoadError {
    /// Every reason, those of the config first. At least one.
    pub fn reasons(&self) -> impl Iterator<Item = &Reason> {
        self.reasons.iter().map(|located| &located.reason)
    }

    /// Every reason with its file.
    pub fn located(&self) -> &[Located] {
        &self.reasons
    }

    /// Reasons beyond the first thousand, counted only.
    pub fn num_omitted(&self) -> usize {
        self.num_omitted
    }

    /// The directory of the adapter; none for an adapter made in memory.
    pub fn directory(&self) -> Option<&Path> {
        self.directory.as_deref()
    }

    fn text(&self) -> String {
        let name = self.directory.as_ref().map(|path| format!(" {}", shown(&path.to_string_lossy())));
        let num_reasons = self.reasons.len() + self.num_omitted;
        let plural = if num_reasons == 1 { "" } else { "s" };
        let mut text = format!("adapter{} refused for {num_reasons} reason{plural}:", name.unwrap_or_default());
        for located in &self.reasons {
            text.push_str(&format!("\n  {located}"));
        }
        if self.num_omitted > 0 {
            text.push_str(&format!("\n  and {} more", self.num_omitted));
        }
        text
    }
}

/// Collects reasons, so that a reader can go on after the first.
#[derive(Debug, Default)]
pub(crate) struct Reasons {
    kept: Vec<Located>,
    num_omitted: usize,
}

impl Reasons {
    pub(crate) fn push(&mut self, file: impl Into<Option<&'static str>>, reason: Reason) {
        if self.kept.len() < MAX_REASONS {
            self.kept.push(Located { file: file.into(), reason });
        } else {
            self.num_omitted += 1;
        }
    }

    /// The reasons kept, without their files.
    pub(crate) fn into_reasons(self) -> impl Iterator<Item = Reason> {
        self.kept.into_iter().map(|located| located.reason)
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.kept.len() + self.num_omitted
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    /// Ok while nothing was pushed.
    pub(crate) fn into_result(self, directory: Option<&Path>) -> Result<(), LoadError> {
        if self.is_empty() { Ok(()) } else { Err(self.into_error(directory)) }
    }

    pub(crate) fn into_error(self, directory: Option<&Path>) -> LoadError {
        LoadError { directory: directory.map(Path::to_path_buf), reasons: self.kept, num_omitted: self.num_omitted }
    }
}

/// `text` safe to print: control characters escaped, and cut after [`MAX_SHOWN`] characters.
pub(crate) fn shown(text: &str) -> String {
    let mut out: String = text.chars().take(MAX_SHOWN).flat_map(escaped).collect();
    if text.chars().nth(MAX_SHOWN).is_some() {
        out.push_str(&format!("… ({} bytes)", text.len()));
    }
    out
}

/// Printable characters as they are, letters of any script included; the others, invisible ones included, escaped.
fn escaped(c: char) -> impl Iterator<Item = char> {
    let plain = c == '"' || c == '\'' || c == '\\';
    let mut escape = (!plain).then(|| c.escape_debug());
    std::iter::from_fn(move || escape.as_mut()?.next()).chain(plain.then_some(c))
}
