//! Which file of a directory holds the weights, and the plan of its tensors, whatever the container.

use crate::config::{CONFIG_FILE, Config, Tool};
use crate::error::Reasons;
use crate::feature::Feature;
use crate::gguf;
use crate::mlx;
use crate::notes::Note;
use crate::reason::Reason;
use crate::shards::{self, INDEX_FILES, Joined};
use crate::source::{AdapterSource, PlainName};
use crate::tensor_file::{self, FilePlan};
use crate::torch_zip;

/// Name of the tensor file.
pub(crate) const WEIGHTS_FILE: &str = "adapter_model.safetensors";

/// The same weights as a pickle, which older versions wrote.
const PICKLE_FILE: &str = "adapter_model.bin";

/// Opens the tensor file, or the files that an index names, and checks the plan; where there is none, says what stands
/// there instead. One file is read even where an index stands beside it, as PEFT does.
///
/// Without a usable config, the files say whose they are.
pub(crate) fn open(
    source: &AdapterSource,
    config: Option<&Config>,
    reasons: &mut Reasons,
    notes: &mut Vec<Note>,
) -> Option<(Joined, FilePlan)> {
    let is_mlx = match config {
        Some(config) => matches!(config.tool, Tool::Mlx { .. }),
        None => source.holds(mlx::WEIGHTS_FILE) && !source.holds(WEIGHTS_FILE),
    };
    if is_mlx {
        return open_mlx(source, reasons);
    }
    match source.open(WEIGHTS_FILE) {
        Ok((mut file, file_bytes)) => {
            if source.holds(PICKLE_FILE) {
                notes.push(Note::PickleIgnored);
            }
            let plan = tensor_file::read_plan(&mut file, file_bytes, WEIGHTS_FILE, reasons)?;
            Some((Joined::new([(file, file_bytes)]), plan))
        }
        Err(Reason::MissingFile) => {
            if let Some(index) = INDEX_FILES.into_iter().find(|index| source.holds(index)) {
                return shards::open(source, index, reasons);
            }
            if source.holds(PICKLE_FILE) {
                return open_pickle(source, reasons);
            }
            match other_format(source) {
                Some((name, feature)) => reasons.push(name, Reason::UnsupportedFormat { feature }),
                None => reasons.push(WEIGHTS_FILE, Reason::MissingFile),
            }
            None
        }
        Err(reason) => {
            reasons.push(WEIGHTS_FILE, reason);
            None
        }
    }
}

fn open_mlx(source: &AdapterSource, reasons: &mut Reasons) -> Option<(Joined, FilePlan)> {
    match source.open(mlx::WEIGHTS_FILE) {
        Ok((mut file, file_bytes)) => {
            let plan = tensor_file::read_plan(&mut file, file_bytes, mlx::WEIGHTS_FILE, reasons)?;
            Some((Joined::new([(file, file_bytes)]), mlx::translate(plan)))
        }
        Err(reason) => {
            reasons.push(mlx::WEIGHTS_FILE, reason);
            None
        }
    }
}

fn open_pickle(source: &AdapterSource, reasons: &mut Reasons) -> Option<(Joined, FilePlan)> {
    match source.open(PICKLE_FILE) {
        Ok((mut file, file_bytes)) => {
            let plan = torch_zip::read_plan(&mut file, file_bytes, PICKLE_FILE, reasons)?;
            Some((Joined::new([(file, file_bytes)]), plan))
        }
        Err(reason) => {
            reasons.push(PICKLE_FILE, reason);
            None
        }
    }
}

fn other_format(source: &AdapterSource) -> Option<(Option<&'static str>, Feature)> {
    const FORMATS: [(&str, Feature); 1] = [(mlx::WEIGHTS_FILE, Feature::Mlx)];
    if let Some((name, feature)) = FORMATS.into_iter().find(|(name, _)| source.holds(name)) {
        return Some((Some(name), feature));
    }
    holds_gguf(source).then_some((None, Feature::Gguf))
}

/// The GGUF file to be read: the one that the source names, or the only one in a directory without anything else.
///
/// # Errors
/// Several stand there.
pub(crate) fn gguf_file(source: &AdapterSource) -> Result<Option<PlainName>, Reason> {
    if let Some(file) = source.file() {
        return Ok(Some(file.clone()));
    }
    let others = [CONFIG_FILE, WEIGHTS_FILE, PICKLE_FILE, mlx::WEIGHTS_FILE];
    if others.into_iter().chain(INDEX_FILES).any(|name| source.holds(name)) {
        return Ok(None);
    }
    source.only_file_ending(gguf::ENDING)
}

fn holds_gguf(source: &AdapterSource) -> bool {
    source.file().is_some() || source.holds_any(|path| path.extension().is_some_and(|extension| extension == "gguf"))
}

/// Whether weights of any format stand in the directory.
pub(crate) fn are_in(source: &AdapterSource) -> bool {
    [WEIGHTS_FILE, PICKLE_FILE].into_iter().any(|name| source.holds(name))
        || INDEX_FILES.into_iter().any(|index| source.holds(index))
        || other_format(source).is_some()
}
