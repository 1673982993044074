//! Which file of a directory holds the weights, and the plan of its tensors, whatever the container.

use std::fs::File;

use crate::config::CONFIG_FILE;
use crate::error::Reasons;
use crate::feature::Feature;
use crate::notes::Note;
use crate::reason::Reason;
use crate::source::AdapterSource;
use crate::tensor_file::{self, FilePlan};

/// Name of the tensor file.
const WEIGHTS_FILE: &str = "adapter_model.safetensors";

/// The same weights as a pickle, which older versions wrote.
const PICKLE_FILE: &str = "adapter_model.bin";

/// Opens the tensor file and checks its plan; where it is missing, says what stands there instead.
pub(crate) fn open(source: &AdapterSource, reasons: &mut Reasons, notes: &mut Vec<Note>) -> Option<(File, FilePlan)> {
    match source.open(WEIGHTS_FILE) {
        Ok((mut file, file_bytes)) => {
            if source.holds(PICKLE_FILE) {
                notes.push(Note::PickleIgnored);
            }
            let plan = tensor_file::read_plan(&mut file, file_bytes, WEIGHTS_FILE, reasons)?;
            Some((file, plan))
        }
        Err(Reason::MissingFile) => {
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

fn other_format(source: &AdapterSource) -> Option<(Option<&'static str>, Feature)> {
    const FORMATS: [(&str, Feature); 4] = [
        ("model.safetensors.index.json", Feature::ShardedWeights),
        ("adapter_model.safetensors.index.json", Feature::ShardedWeights),
        (PICKLE_FILE, Feature::PickleWeights),
        ("adapters.safetensors", Feature::Mlx),
    ];
    if let Some((name, feature)) = FORMATS.into_iter().find(|(name, _)| source.holds(name)) {
        return Some((Some(name), feature));
    }
    if source.holds_any(|path| path.extension().is_some_and(|extension| extension == "gguf")) {
        return Some((None, Feature::Gguf));
    }
    let named = !source.holds(CONFIG_FILE) && source.holds_any(|path| path.join(CONFIG_FILE).is_file());
    named.then_some((None, Feature::NamedSubfolder))
}
