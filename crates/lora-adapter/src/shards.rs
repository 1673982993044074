//! Weights in several files: the index that names them, checked against what they hold, and the files as one.
//!
//! The names in an index are text of an untrusted file, so only plain names of safetensors files in the same directory
//! are opened. Every tensor must stand in the one file that the index says, and no file may hold another.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};

use serde_json::Value;

use crate::error::{Reasons, shown};
use crate::json;
use crate::reason::Reason;
use crate::source::{AdapterSource, PlainName};
use crate::tensor_file::{self, FilePlan, TensorPlan};

/// Names of the index: PEFT's file with the usual ending, and the one that transformers writes for adapters too.
pub(crate) const INDEX_FILES: [&str; 2] = ["adapter_model.safetensors.index.json", "model.safetensors.index.json"];

/// More than the index of any adapter needs.
const MAX_INDEX_BYTES: u64 = 64 << 20;

/// Files of one adapter that are opened.
const MAX_SHARDS: usize = 1000;

/// Files read as one, each behind the one before it.
#[derive(Debug)]
pub(crate) struct Joined {
    parts: Vec<Part>,
    position: u64,
}

#[derive(Debug)]
struct Part {
    file: File,
    begin: u64,
    end: u64,
}

impl Joined {
    /// Files with their lengths, in order.
    pub(crate) fn new(files: impl IntoIterator<Item = (File, u64)>) -> Joined {
        let mut begin = 0;
        let part = |(file, file_bytes): (File, u64)| {
            let part = Part { file, begin, end: begin + file_bytes };
            begin = part.end;
            part
        };
        Joined { parts: files.into_iter().map(part).collect(), position: 0 }
    }
}

impl Read for Joined {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let position = self.position;
        let Some(part) = self.parts.iter_mut().find(|part| (part.begin..part.end).contains(&position)) else {
            return Ok(0);
        };
        part.file.seek(SeekFrom::Start(position - part.begin))?;
        let wanted = usize::try_from(part.end - position).unwrap_or(usize::MAX).min(buffer.len());
        let num_bytes = part.file.read(&mut buffer[..wanted])?;
        self.position += num_bytes as u64;
        Ok(num_bytes)
    }
}

impl Seek for Joined {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        match to {
            SeekFrom::Start(position) => self.position = position,
            SeekFrom::Current(_) | SeekFrom::End(_) => return Err(ErrorKind::Unsupported.into()),
        }
        Ok(self.position)
    }
}

/// Opens the files that an index names, and gives the plan of all their tensors. `index` is the name of the index.
pub(crate) fn open(source: &AdapterSource, index: &'static str, reasons: &mut Reasons) -> Option<(Joined, FilePlan)> {
    let mut refuse = |reason| reasons.push(index, reason);
    let bytes = source.read(index, MAX_INDEX_BYTES).map_err(&mut refuse).ok()?;
    let places = places(&bytes).map_err(|message| refuse(Reason::BadIndex { message })).ok()?;
    let names: BTreeSet<&str> = places.values().map(String::as_str).collect();
    if names.is_empty() || names.len() > MAX_SHARDS {
        let message = format!("expected 1 to {MAX_SHARDS} files, found {}", names.len());
        refuse(Reason::BadIndex { message });
        return None;
    }
    let (mut files, mut tensors, mut found) = (Vec::new(), Vec::new(), BTreeSet::new());
    let (mut begin, mut is_whole) = (0, true);
    for name in names {
        let Some((file, file_bytes, plan)) = open_shard(source, index, name, reasons) else {
            is_whole = false;
            continue;
        };
        for tensor in plan.tensors {
            if places.get(&tensor.name).is_none_or(|place| place != name) {
                is_whole = false;
                let reason = Reason::NotInIndex { tensor: shown(&tensor.name), shard: shown(name) };
                reasons.push(index, reason);
                continue;
            }
            found.insert(tensor.name.clone());
            let offset = begin + plan.data_offset;
            tensors.push(TensorPlan { begin: offset + tensor.begin, end: offset + tensor.end, ..tensor });
        }
        begin += file_bytes;
        files.push((file, file_bytes));
    }
    if is_whole {
        for (tensor, shard) in places.iter().filter(|(tensor, _)| !found.contains(*tensor)) {
            is_whole = false;
            reasons.push(index, Reason::NotInShard { tensor: shown(tensor), shard: shown(shard) });
        }
    }
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    is_whole.then(|| (Joined::new(files), FilePlan { file: index, tensors, data_offset: 0 }))
}

/// The file of each tensor.
fn places(index: &[u8]) -> Result<BTreeMap<String, String>, String> {
    let index = json::parse(index).map_err(|error| shown(&error.to_string()))?;
    let map = index.get("weight_map").and_then(Value::as_object).ok_or("expected an object `weight_map`")?;
    let place = |(tensor, file): (&String, &Value)| match file.as_str() {
        Some(file) => Ok((tensor.clone(), file.to_owned())),
        None => Err(format!("tensor {}: expected the name of a file, found {}", shown(tensor), json::type_name(file))),
    };
    map.iter().map(place).collect()
}

fn open_shard(
    source: &AdapterSource,
    index: &'static str,
    name: &str,
    reasons: &mut Reasons,
) -> Option<(File, u64, FilePlan)> {
    let in_shard = |reason| Reason::Shard { shard: shown(name), reason: Box::new(reason) };
    let opened = match PlainName::new(name).filter(|name| name.ends_with(".safetensors")) {
        Some(name) => source.open_plain(&name),
        None => Err(Reason::BadShardName),
    };
    let (mut file, file_bytes) = opened.map_err(|reason| reasons.push(index, in_shard(reason))).ok()?;
    let mut found = Reasons::default();
    let plan = tensor_file::read_plan(&mut file, file_bytes, index, &mut found);
    found.into_reasons().for_each(|reason| reasons.push(index, in_shard(reason)));
    Some((file, file_bytes, plan?))
}
