//! Why an adapter is not loaded: every reason at once, each with its file, what was expected and what was found.
//!
//! None of these is worth a retry with the same files. Text of a file is held only in a form that is safe to print:
//! control characters escaped, length bounded.

use std::fmt;
use std::path::{Path, PathBuf};

use lora_math::Site;
use lora_math::scaling::ScalingError;
use thiserror::Error;

use crate::feature::Feature;
use crate::keys::Dialect;
use crate::matrix::MatrixError;

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

/// One thing that is wrong with an adapter.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum Reason {
    // ---- the directory and its files
    /// The adapter's directory cannot be opened.
    #[error("cannot open the directory: {message}")]
    Directory {
        /// What the system says.
        message: String,
    },
    /// Something else stands in place of the directory.
    #[error("expected a directory, found {found}")]
    NotADirectory {
        /// What it is.
        found: &'static str,
    },
    /// A file that every adapter has is not there.
    #[error("the file is missing")]
    MissingFile,
    /// Something else stands in place of the file.
    #[error("expected a regular file, found {found}")]
    NotRegularFile {
        /// What it is.
        found: &'static str,
    },
    /// A link leads out of the directory that the adapter must stay in.
    #[error("a link leads outside the adapter's directory")]
    OutsideDirectory,
    /// The file cannot be read.
    #[error("cannot read the file: {message}")]
    Unreadable {
        /// What the system says.
        message: String,
    },
    /// The file is longer than any adapter's.
    #[error("the file has {found_bytes} bytes, at most {limit_bytes} are read")]
    FileTooLong {
        /// Its length.
        found_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// There is no memory for the weights.
    #[error("no memory for {needed_bytes} bytes of weights")]
    OutOfMemory {
        /// Bytes of the file.
        needed_bytes: usize,
    },
    /// The adapter is of a kind that is not supported.
    #[error("not supported: {feature}")]
    UnsupportedFormat {
        /// The kind.
        feature: Feature,
    },

    // ---- adapter_config.json
    /// The config is not JSON.
    #[error("not JSON: {message}")]
    NotJson {
        /// What the parser says, with line and column.
        message: String,
    },
    /// The config is JSON and not an object.
    #[error("expected a JSON object, found {found}")]
    NotAnObject {
        /// Its type.
        found: &'static str,
    },
    /// A field that nothing can stand in for is missing.
    #[error("field `{field}` is missing; expected {expected}")]
    MissingField {
        /// The field.
        field: &'static str,
        /// What it should hold.
        expected: &'static str,
    },
    /// A field has a value that it cannot have.
    #[error("field `{field}`: expected {expected}, found {found}")]
    BadField {
        /// The field, and the entry in it.
        field: String,
        /// What it should hold.
        expected: String,
        /// Its value as JSON.
        found: String,
    },
    /// A pattern that cannot be compiled.
    #[error("field `{field}`: the pattern cannot be used: {message}")]
    BadPattern {
        /// `rank_pattern` or `alpha_pattern`.
        field: &'static str,
        /// What is wrong with it.
        message: String,
    },
    /// A field asks for something that is not supported.
    #[error("field `{field}` is {found}: {feature}, not supported")]
    UnsupportedField {
        /// The field.
        field: &'static str,
        /// Its value as JSON.
        found: String,
        /// What it asks for.
        feature: Feature,
    },

    // ---- the tensor file as a whole
    /// The file ends before what its header says.
    #[error("truncated: {expected_bytes} bytes expected, {found_bytes} found")]
    Truncated {
        /// Bytes that the header asks for, itself included.
        expected_bytes: u64,
        /// Bytes of the file.
        found_bytes: u64,
    },
    /// The file goes on after its last tensor.
    #[error("{expected_bytes} bytes expected, {found_bytes} found: bytes after the last tensor")]
    TrailingBytes {
        /// Bytes that the header asks for, itself included.
        expected_bytes: u64,
        /// Bytes of the file.
        found_bytes: u64,
    },
    /// The header is longer than the format allows.
    #[error("the header has {found_bytes} bytes, the format allows {limit_bytes}")]
    HeaderTooLong {
        /// Its length.
        found_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// The header is not what the format says.
    #[error("bad header: {message}")]
    BadHeader {
        /// What is wrong, with line and column.
        message: String,
    },
    /// Two tensors have one name.
    #[error("tensor {tensor}: the name stands twice in the header")]
    DuplicateTensor {
        /// The name.
        tensor: String,
    },
    /// The offsets of a tensor run backwards.
    #[error("tensor {tensor}: offsets {begin}..{end} run backwards")]
    BadOffsets {
        /// The tensor.
        tensor: String,
        /// First byte.
        begin: u64,
        /// Byte after the last.
        end: u64,
    },
    /// A tensor does not begin where the one before it ends.
    #[error("tensor {tensor}: begins at byte {found} of the data, expected {expected}")]
    BadStart {
        /// The tensor.
        tensor: String,
        /// End of the tensor before it.
        expected: u64,
        /// Where it begins.
        found: u64,
    },
    /// Shape, dtype and bytes of a tensor disagree.
    #[error("tensor {tensor}: shape {shape:?} of {dtype} does not fit {found_bytes} bytes")]
    WrongByteCount {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
        /// Its dtype.
        dtype: String,
        /// Bytes between its offsets.
        found_bytes: u64,
    },
    /// The file holds no A and B at all.
    #[error("no LoRA pair in the file ({num_tensors} tensors); the adapter would act as the base model")]
    NoPairs {
        /// Tensors in the file.
        num_tensors: usize,
    },

    // ---- single tensors
    /// Tensors of a kind that is not supported.
    #[error("{num_tensors} tensors hold {feature}, not supported (the first is {tensor})")]
    UnsupportedTensors {
        /// The kind.
        feature: Feature,
        /// How many there are.
        num_tensors: usize,
        /// The first, by name.
        tensor: String,
    },
    /// Tensors named in a way that is not supported.
    #[error(
        "{num_tensors} tensors are named with {dialect}, expected base_model.model.model.layers.N.… (the first is {tensor})"
    )]
    UnsupportedDialect {
        /// The way they are named.
        dialect: Dialect,
        /// How many there are.
        num_tensors: usize,
        /// The first, by name.
        tensor: String,
    },
    /// A tensor whose module or suffix is not known.
    #[error("tensor {tensor}: no such {part} is known")]
    UnknownTensor {
        /// The tensor.
        tensor: String,
        /// Which part of the name is not known.
        part: &'static str,
    },
    /// A tensor without elements.
    #[error("tensor {tensor}: shape {shape:?} holds nothing")]
    EmptyTensor {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// A or B that is not a matrix.
    #[error("tensor {tensor}: expected two dimensions, found shape {shape:?}")]
    NotAMatrix {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// A or B in a dtype that cannot be read.
    #[error("tensor {tensor}: expected F64, F32, F16 or BF16, found {dtype}")]
    UnsupportedDtype {
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: String,
    },
    /// A without B, or B without A.
    #[error("tensor {tensor}: its other half {missing} is missing")]
    HalfPair {
        /// The half that is there.
        tensor: String,
        /// The half that is not.
        missing: String,
    },
    /// Two tensors name one place.
    #[error("tensors {first} and {second} name one place, {site}")]
    AmbiguousTensor {
        /// The place.
        site: Site,
        /// One of them.
        first: String,
        /// The other.
        second: String,
    },
    /// A and B that cannot be multiplied.
    #[error(
        "tensors {a} {a_shape:?} and {b} {b_shape:?}: expected [rank, in_features] and [out_features, rank] of one rank"
    )]
    PairMismatch {
        /// Name of A.
        a: String,
        /// Shape of A.
        a_shape: [usize; 2],
        /// Name of B.
        b: String,
        /// Shape of B.
        b_shape: [usize; 2],
    },
    /// A rank beyond what adapters can have.
    #[error("tensor {tensor}: rank {found}, expected 1 to {max}")]
    RankTooLarge {
        /// The tensor.
        tensor: String,
        /// Its rank.
        found: usize,
        /// The largest.
        max: usize,
    },
    /// The rank of a tensor is not the one that the config gives for its module.
    #[error("tensor {tensor}: rank {found}, expected {expected} by the config's {source_field}")]
    RankDisagrees {
        /// The tensor.
        tensor: String,
        /// Its rank.
        found: usize,
        /// The rank by the config.
        expected: usize,
        /// `r`, or the pattern that matches.
        source_field: String,
    },
    /// Alpha and rank that give no scaling.
    #[error("tensor {tensor}: {error}")]
    Scaling {
        /// A of the pair.
        tensor: String,
        /// What is wrong with them.
        error: ScalingError,
    },
    /// The elements of a tensor.
    #[error("tensor {0}")]
    Matrix(#[from] MatrixError),

    // ---- adapters made in memory
    /// One site given twice.
    #[error("{site}: given twice")]
    DuplicateSite {
        /// The site.
        site: Site,
    },
    /// A module at a kind of site where it cannot stand.
    #[error("{site}: this module cannot stand there")]
    MisplacedSite {
        /// The site.
        site: Site,
    },
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
