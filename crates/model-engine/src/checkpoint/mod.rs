//! Base checkpoints: Hugging Face directories and GGUF files to a checked configuration and owned weights.
//!
//! [`Checkpoint::open`] loads everything; [`CheckpointInfo::open`] reads configuration and tensor list only, for tools
//! that plan or inspect. Both accept a directory with `config.json` and safetensors, a `.gguf` file, or a directory
//! that holds exactly one `.gguf` file.
//!
//! Files are untrusted: every length is checked before it is used, every tensor that the model needs must be
//! there with the right shape, and whatever would change the arithmetic and is not supported is refused by name. A
//! tokenizer that cannot be used does not hinder loading: token ids still work.

pub mod config;
mod error;
mod fields;
pub mod gguf;
mod hf_config;
mod load;
mod map;
mod safetensors_files;
mod source;
pub mod weights;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

pub use config::ModelConfig;
pub use error::CheckpointError;
pub use load::LoadProgress;
pub use source::TensorInfo;
pub use weights::{ModelWeights, WeightDtype};

use crate::tokenizer::{Tokenizer, TokenizerError};
use gguf::GgufFile;
use gguf::source::GgufSource;
use load::Plan;
use safetensors_files::SafetensorsFiles;
use source::TensorSource;

/// How to load.
#[derive(Default)]
pub struct LoadOptions<'a> {
    /// Precision of the matrices in memory; `None` keeps the checkpoint's, widening f16 and quantised blocks to f32.
    pub weight_dtype: Option<WeightDtype>,
    /// Called after every tensor.
    pub progress: Option<&'a mut dyn FnMut(LoadProgress)>,
}

impl fmt::Debug for LoadOptions<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadOptions").field("weight_dtype", &self.weight_dtype).finish_non_exhaustive()
    }
}

/// A loaded base model.
#[derive(Debug)]
#[non_exhaustive]
pub struct Checkpoint {
    /// What it is.
    pub config: ModelConfig,
    /// Its weights.
    pub weights: ModelWeights,
    /// Its tokenizer, or why there is none.
    pub tokenizer: Result<Tokenizer, TokenizerError>,
    /// How the file stored its tensors.
    pub stored: Vec<StoredDtype>,
}

/// The tensors of a checkpoint without their data.
#[derive(Debug)]
#[non_exhaustive]
pub struct CheckpointInfo {
    /// What it is.
    pub config: ModelConfig,
    /// Its tensors, sorted by name.
    pub tensors: Vec<TensorInfo>,
    /// How they are stored.
    pub stored: Vec<StoredDtype>,
}

/// How many tensors of a checkpoint are stored in one form.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoredDtype {
    /// The form, as the format names it: `BF16`, `Q4_1`, …
    pub dtype: String,
    /// Tensors stored so.
    pub num_tensors: usize,
    /// Bytes in the file.
    pub size_bytes: u64,
}

impl Checkpoint {
    /// Loads the checkpoint at `path`.
    ///
    /// # Errors
    /// [`CheckpointError`] when a file cannot be read or is malformed, the model is not supported, or its tensors do
    /// not fit its configuration; nothing is returned half loaded.
    pub fn open(path: &Path, options: LoadOptions<'_>) -> Result<Self, CheckpointError> {
        with_source(path, |mut config, source, location| {
            let plan = Plan::new(&config, source)?;
            config.tie_word_embeddings = plan.is_tied();
            let stored = stored(&source.tensors());
            let weights = plan.load(&config, source, options)?;
            let tokenizer = match location {
                Location::Directory(directory) => Tokenizer::from_hf_dir(directory),
                Location::Gguf(file) => Tokenizer::from_gguf(file),
            };
            Ok(Self { config, weights, tokenizer, stored })
        })
    }
}

impl CheckpointInfo {
    /// Reads configuration and tensor list of the checkpoint at `path`, with the checks of [`Checkpoint::open`].
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        with_source(path, |mut config, source, _| {
            config.tie_word_embeddings = Plan::new(&config, source)?.is_tied();
            let tensors = source.tensors();
            let stored = stored(&tensors);
            Ok(Self { config, tensors, stored })
        })
    }
}

/// Where a checkpoint was found, for what lies beside its weights.
enum Location<'a> {
    Directory(&'a Path),
    Gguf(&'a GgufFile<'a>),
}

/// Opens what is at `path` and hands it over.
fn with_source<T>(
    path: &Path,
    use_source: impl FnOnce(ModelConfig, &dyn TensorSource, Location<'_>) -> Result<T, CheckpointError>,
) -> Result<T, CheckpointError> {
    let metadata = std::fs::metadata(path).map_err(CheckpointError::io(path))?;
    if metadata.is_dir() && path.join("config.json").is_file() {
        let config = hf_config_of(path)?;
        let source = SafetensorsFiles::open(path)?;
        return use_source(config, &source, Location::Directory(path));
    }
    let path = if metadata.is_dir() { only_gguf_in(path)? } else { path.to_owned() };
    let map = map::map(&path)?;
    let file = GgufFile::parse(&map).map_err(CheckpointError::gguf(&path))?;
    let config = gguf::config::parse(&path, &file)?;
    let source = GgufSource { path: &path, file: &file, config: &config };
    use_source(config.clone(), &source, Location::Gguf(&file))
}

fn hf_config_of(directory: &Path) -> Result<ModelConfig, CheckpointError> {
    let read = |path: &Path| std::fs::read_to_string(path).map_err(CheckpointError::io(path));
    let path = directory.join("config.json");
    let generation = directory.join("generation_config.json");
    let generation = if generation.is_file() { Some(read(&generation)?) } else { None };
    hf_config::parse(&path, &read(&path)?, generation.as_deref())
}

fn only_gguf_in(directory: &Path) -> Result<PathBuf, CheckpointError> {
    let entries = std::fs::read_dir(directory).map_err(CheckpointError::io(directory))?;
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(CheckpointError::io(directory))?.path();
        if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf")) {
            found.push(path);
        }
    }
    found.sort();
    match (found.len(), found.pop()) {
        (1, Some(path)) => Ok(path),
        (count, _) => {
            let reason = format!("no config.json, and {count} .gguf files where one was expected");
            Err(CheckpointError::NotACheckpoint { path: directory.to_owned(), reason })
        }
    }
}

fn stored(tensors: &[TensorInfo]) -> Vec<StoredDtype> {
    let mut by_dtype = BTreeMap::<&str, (usize, u64)>::new();
    for tensor in tensors {
        let (num_tensors, size_bytes) = by_dtype.entry(&tensor.dtype).or_default();
        *num_tensors += 1;
        *size_bytes += tensor.size_bytes;
    }
    by_dtype
        .into_iter()
        .map(|(dtype, (num_tensors, size_bytes))| StoredDtype { dtype: dtype.to_owned(), num_tensors, size_bytes })
        .collect()
}
