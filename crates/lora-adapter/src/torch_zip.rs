//! `adapter_model.bin` of torch 1.6 and later: an archive of uncompressed entries, one of which is a pickle that says
//! which tensor lies in which of the others.
//!
//! Entries are found by the directory at the end of the archive, and nothing is unpacked: a tensor is a range of the
//! file, like in every other container. Checksums are not compared; other containers have none.

use std::collections::BTreeMap;
use std::io::{Read, Seek, SeekFrom};

use crate::archive_error::ArchiveError;
use crate::error::{Reasons, shown};
use crate::pickle::{self, PickledTensor};
use crate::reason::Reason;
use crate::tensor_file::{FilePlan, TensorPlan};

/// The longest directory of an archive that is read.
const MAX_DIRECTORY_BYTES: u64 = 100_000_000;

/// The longest pickle that is read. A tensor takes about 200 bytes of it.
const MAX_PICKLE_BYTES: u64 = 64 << 20;

/// The longest name of a storage that is looked for; torch counts them.
const MAX_KEY_BYTES: usize = 64;

const END_BYTES: u64 = 22;
const MAX_COMMENT_BYTES: u64 = 65_535;
const ZIP64_LOCATOR_BYTES: u64 = 20;
const LOCAL_BYTES: u64 = 30;
const ENTRY_BYTES: usize = 46;

/// Where an entry lies, by the directory.
#[derive(Clone, Copy)]
struct Entry {
    local_offset: u64,
    bytes: u64,
    stored: bool,
}

/// Reads the directory and the pickle of `file`, a file of `file_bytes` bytes.
pub(crate) fn read_plan(
    file: &mut (impl Read + Seek),
    file_bytes: u64,
    name: &'static str,
    reasons: &mut Reasons,
) -> Option<FilePlan> {
    match plan(file, file_bytes, reasons, name) {
        Ok(tensors) => Some(FilePlan { file: name, tensors: tensors?, data_offset: 0 }),
        Err(reason) => {
            reasons.push(name, reason);
            None
        }
    }
}

/// The tensors by name; none where a single one was refused.
fn plan(
    file: &mut (impl Read + Seek),
    file_bytes: u64,
    reasons: &mut Reasons,
    name: &'static str,
) -> Result<Option<Vec<TensorPlan>>, Reason> {
    let mut archive = Archive::open(file, file_bytes)?;
    let bytes = archive.pickle()?;
    let mut pickled = pickle::read(&bytes)?;
    pickled.sort_by_key(|tensor| tensor.name);
    // Names are copied below, so a long one may not stand there a million times.
    if let Some(pair) = pickled.windows(2).find(|pair| pair[0].name == pair[1].name) {
        return Err(Reason::DuplicateTensor { tensor: shown(pair[0].name) });
    }
    let mut whole = true;
    let mut tensors = Vec::with_capacity(pickled.len());
    for tensor in &pickled {
        match archive.tensor(tensor) {
            Ok(tensor) => tensors.push(tensor),
            Err(reason) => {
                reasons.push(name, reason);
                whole = false;
            }
        }
    }
    let total_bytes = tensors.iter().fold(0u64, |total, tensor| total.saturating_add(tensor.end - tensor.begin));
    if total_bytes > file_bytes {
        return Err(ArchiveError::Shared { file_bytes }.into());
    }
    Ok(whole.then_some(tensors))
}

struct Archive<'a, F> {
    file: &'a mut F,
    /// Entries by name.
    entries: BTreeMap<Vec<u8>, Entry>,
    /// Where the directory begins: every entry lies before it.
    directory_offset: u64,
    /// The folder that holds everything, with its slash.
    folder: Vec<u8>,
    /// Places of storages already found, by key.
    storages: BTreeMap<String, [u64; 2]>,
}

impl<'a, F: Read + Seek> Archive<'a, F> {
    fn open(file: &'a mut F, file_bytes: u64) -> Result<Self, Reason> {
        let magic = read_at(file, 0, file_bytes.min(4))?;
        if magic.first() == Some(&0x80) {
            return Err(ArchiveError::OldTorch.into());
        }
        if magic != b"PK\x03\x04" {
            return Err(ArchiveError::NotAnArchive { what: "it does not begin with an entry" }.into());
        }
        let (directory_offset, directory_bytes) = find_directory(file, file_bytes)?;
        if directory_bytes > MAX_DIRECTORY_BYTES {
            let (what, limit_bytes) = ("the archive's directory", MAX_DIRECTORY_BYTES);
            return Err(ArchiveError::TooLong { what, found_bytes: directory_bytes, limit_bytes }.into());
        }
        let directory = read_at(file, directory_offset, directory_bytes)?;
        let entries = read_directory(&directory)?;
        let mut pickles = entries.keys().filter_map(|name| folder_of_pickle(name));
        let (folder, second) = (pickles.next(), pickles.next());
        let Some(folder) = folder.filter(|_| second.is_none()).map(<[u8]>::to_vec) else {
            return Err(ArchiveError::NotAnArchive { what: "it does not hold one data.pkl" }.into());
        };
        Ok(Archive { file, entries, directory_offset, folder, storages: BTreeMap::new() })
    }

    /// The bytes of the pickle, once the archive's byte order is known to be that of the tensors here.
    fn pickle(&mut self) -> Result<Vec<u8>, Reason> {
        if let Some([begin, end]) = self.place("byteorder")? {
            let order = read_at(self.file, begin, (end - begin).min(16))?;
            if order != b"little" {
                return Err(bad_entry(b"byteorder", "expected little").into());
            }
        }
        let place = self.place("data.pkl")?;
        let [begin, end] = place.ok_or(ArchiveError::NotAnArchive { what: "it does not hold one data.pkl" })?;
        if end - begin > MAX_PICKLE_BYTES {
            let (what, limit_bytes) = ("the pickle", MAX_PICKLE_BYTES);
            return Err(ArchiveError::TooLong { what, found_bytes: end - begin, limit_bytes }.into());
        }
        read_at(self.file, begin, end - begin)
    }

    /// Where the bytes of an entry lie in the file; none where the archive has no such entry.
    fn place(&mut self, name: &str) -> Result<Option<[u64; 2]>, Reason> {
        let path = [&self.folder[..], name.as_bytes()].concat();
        let Some(&Entry { local_offset, bytes, stored }) = self.entries.get(&path) else { return Ok(None) };
        let bad = |what| Reason::from(bad_entry(&path, what));
        if !stored {
            return Err(bad("it is compressed or encrypted"));
        }
        let header_end = local_offset.checked_add(LOCAL_BYTES + path.len() as u64);
        if header_end.is_none_or(|end| end > self.directory_offset) {
            return Err(bad("it lies outside the archive"));
        }
        let local = read_at(self.file, local_offset, LOCAL_BYTES + path.len() as u64)?;
        let (header, found) = local.split_at(LOCAL_BYTES as usize);
        if !header.starts_with(b"PK\x03\x04") || u16_at(header, 26) != path.len() as u64 || found != path {
            return Err(bad("it is not where the directory says"));
        }
        let begin = local_offset + LOCAL_BYTES + path.len() as u64 + u16_at(header, 28);
        let end = begin.checked_add(bytes).filter(|end| *end <= self.directory_offset);
        Ok(Some([begin, end.ok_or_else(|| bad("it lies outside the archive"))?]))
    }

    fn storage(&mut self, key: &str) -> Result<Option<[u64; 2]>, Reason> {
        if let Some(place) = self.storages.get(key) {
            return Ok(Some(*place));
        }
        let place = self.place(&format!("data/{key}"))?;
        if let Some(place) = place {
            self.storages.insert(key.to_owned(), place);
        }
        Ok(place)
    }

    fn tensor(&mut self, pickled: &PickledTensor<'_>) -> Result<TensorPlan, Reason> {
        let PickledTensor { name, tensor: pickle::Tensor { storage, dtype, offset, shape, strides } } = pickled;
        let tensor = || shown(name);
        let place = if storage.key.len() > MAX_KEY_BYTES { None } else { self.storage(storage.key)? };
        let Some([begin, end]) = place else {
            let entry = format!("data/{}", shown(storage.key));
            return Err(ArchiveError::MissingStorage { tensor: tensor(), entry }.into());
        };
        let storage_bytes = end - begin;
        if storage.bytes() != Some(storage_bytes) {
            let expected_bytes = storage.bytes();
            return Err(
                ArchiveError::StorageBytes { tensor: tensor(), expected_bytes, found_bytes: storage_bytes }.into()
            );
        }
        let elements = shape.iter().try_fold(1u64, |product, dim| product.checked_mul(*dim));
        let bytes = elements.and_then(|elements| elements.checked_mul(dtype.bytes));
        let first = offset.checked_mul(dtype.bytes);
        let range = first.zip(bytes).and_then(|(first, bytes)| Some([first, first.checked_add(bytes)?]));
        let Some([first, last]) = range.filter(|[_, last]| *last <= storage_bytes) else {
            let (shape, offset) = (shape.clone(), *offset);
            return Err(ArchiveError::OutsideStorage { tensor: tensor(), shape, offset, storage_bytes }.into());
        };
        let transposed = match layout(shape, strides) {
            Some(Layout::RowMajor) => false,
            Some(Layout::ColumnMajor) => true,
            None => {
                let (shape, strides) = (shape.clone(), strides.clone());
                return Err(ArchiveError::Strided { tensor: tensor(), shape, strides }.into());
            }
        };
        Ok(TensorPlan {
            name: (*name).to_owned(),
            peft_name: None,
            dtype: dtype.name,
            shape: shape.clone(),
            transposed,
            begin: begin + first,
            end: begin + last,
        })
    }
}

enum Layout {
    RowMajor,
    /// Of two dimensions.
    ColumnMajor,
}

/// How the elements follow each other; none for views with gaps or repetitions. Strides of dimensions of one element
/// mean nothing.
fn layout(shape: &[u64], strides: &[u64]) -> Option<Layout> {
    let dims = || shape.iter().zip(strides);
    if shape.contains(&0) || dense(dims().rev()) {
        Some(Layout::RowMajor)
    } else if shape.len() == 2 && dense(dims()) {
        Some(Layout::ColumnMajor)
    } else {
        None
    }
}

/// Whether dimensions with their strides, the innermost first, follow each other without gaps.
fn dense<'a>(mut dims: impl Iterator<Item = (&'a u64, &'a u64)>) -> bool {
    let mut expected = 1u64;
    dims.all(|(dim, stride)| {
        let fits = *dim <= 1 || *stride == expected;
        expected = expected.saturating_mul(*dim);
        fits
    })
}

/// The folder of a name `FOLDER/data.pkl`, with its slash.
fn folder_of_pickle(name: &[u8]) -> Option<&[u8]> {
    let folder = name.strip_suffix(b"data.pkl")?;
    let inner = folder.strip_suffix(b"/")?;
    (!inner.is_empty() && !inner.contains(&b'/')).then_some(folder)
}

fn bad_entry(name: &[u8], what: &'static str) -> ArchiveError {
    ArchiveError::BadEntry { entry: shown(&String::from_utf8_lossy(name)), what }
}

/// Reads bytes that are known to lie in the file.
fn read_at(file: &mut (impl Read + Seek), offset: u64, bytes: u64) -> Result<Vec<u8>, Reason> {
    let mut buffer = Vec::new();
    let read = file.seek(SeekFrom::Start(offset)).and_then(|_| file.take(bytes).read_to_end(&mut buffer));
    match read {
        Ok(_) if buffer.len() as u64 == bytes => Ok(buffer),
        Ok(_) => Err(Reason::Truncated { expected_bytes: offset + bytes, found_bytes: offset + buffer.len() as u64 }),
        Err(error) => Err(Reason::Unreadable { message: error.to_string() }),
    }
}

/// Little-endian numbers of 2, 4 and 8 bytes; 0 where the bytes are not there, which callers rule out.
fn u16_at(bytes: &[u8], at: usize) -> u64 {
    number_at(bytes, at, 2)
}

fn u32_at(bytes: &[u8], at: usize) -> u64 {
    number_at(bytes, at, 4)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    number_at(bytes, at, 8)
}

fn number_at(bytes: &[u8], at: usize, length: usize) -> u64 {
    let bytes = bytes.get(at..at + length).unwrap_or_default();
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// Offset and length of the directory, by the record at the end of the file.
fn find_directory(file: &mut (impl Read + Seek), file_bytes: u64) -> Result<(u64, u64), Reason> {
    let refuse = |what| Err(Reason::from(ArchiveError::NotAnArchive { what }));
    let tail_bytes = file_bytes.min(END_BYTES + MAX_COMMENT_BYTES);
    let tail_offset = file_bytes - tail_bytes;
    let tail = read_at(file, tail_offset, tail_bytes)?;
    let is_end = |at: &usize| {
        let record = &tail[*at..];
        record.starts_with(b"PK\x05\x06") && u16_at(record, 20) == record.len() as u64 - END_BYTES
    };
    let Some(at) = (0..tail.len().saturating_sub(END_BYTES as usize - 1)).rev().find(is_end) else {
        return refuse("its end is missing");
    };
    let end = &tail[at..];
    if u16_at(end, 4) != 0 && u16_at(end, 4) != 0xffff {
        return refuse("it is one of several parts");
    }
    let (mut bytes, mut offset) = (u32_at(end, 12), u32_at(end, 16));
    let mut limit = tail_offset + at as u64;
    if bytes == u64::from(u32::MAX) || offset == u64::from(u32::MAX) || u16_at(end, 10) == 0xffff {
        let Some(locator_offset) = limit.checked_sub(ZIP64_LOCATOR_BYTES) else {
            return refuse("its end is missing");
        };
        let locator = read_at(file, locator_offset, ZIP64_LOCATOR_BYTES)?;
        let record_offset = u64_at(&locator, 8);
        let whole = record_offset.checked_add(56).is_some_and(|end| end <= locator_offset);
        if !locator.starts_with(b"PK\x06\x07") || !whole {
            return refuse("its end is missing");
        }
        let record = read_at(file, record_offset, 56)?;
        if !record.starts_with(b"PK\x06\x06") {
            return refuse("its end is missing");
        }
        (bytes, offset, limit) = (u64_at(&record, 40), u64_at(&record, 48), record_offset);
    }
    match offset.checked_add(bytes) {
        Some(end) if end <= limit => Ok((offset, bytes)),
        _ => refuse("its directory lies outside it"),
    }
}

fn read_directory(mut rest: &[u8]) -> Result<BTreeMap<Vec<u8>, Entry>, Reason> {
    let mut entries = BTreeMap::new();
    while !rest.is_empty() {
        let broken = ArchiveError::NotAnArchive { what: "its directory is broken" };
        if rest.len() < ENTRY_BYTES || !rest.starts_with(b"PK\x01\x02") {
            return Err(broken.into());
        }
        let (header, after) = rest.split_at(ENTRY_BYTES);
        let lengths = [u16_at(header, 28), u16_at(header, 30), u16_at(header, 32)].map(|length| length as usize);
        let [name_bytes, extra_bytes, comment_bytes] = lengths;
        if after.len() < name_bytes + extra_bytes + comment_bytes {
            return Err(broken.into());
        }
        let (name, after) = after.split_at(name_bytes);
        let (extra, after) = after.split_at(extra_bytes);
        rest = &after[comment_bytes..];
        let [bytes, packed_bytes, local_offset] =
            wide_numbers([u32_at(header, 24), u32_at(header, 20), u32_at(header, 42)], extra)
                .ok_or_else(|| bad_entry(name, "its length is missing"))?;
        let plain = u16_at(header, 8) & 1 == 0 && u16_at(header, 10) == 0;
        let entry = Entry { local_offset, bytes, stored: plain && packed_bytes == bytes };
        if entries.insert(name.to_vec(), entry).is_some() {
            return Err(bad_entry(name, "it stands twice").into());
        }
    }
    Ok(entries)
}

/// Those of the numbers that are too large for the header stand in a field of the extra bytes, in this order.
fn wide_numbers(mut numbers: [u64; 3], mut extra: &[u8]) -> Option<[u64; 3]> {
    if !numbers.contains(&u64::from(u32::MAX)) {
        return Some(numbers);
    }
    while extra.len() >= 4 {
        let (id, length) = (u16_at(extra, 0), u16_at(extra, 2) as usize);
        let mut field = extra.get(4..4 + length)?;
        if id == 1 {
            for number in numbers.iter_mut().filter(|number| **number == u64::from(u32::MAX)) {
                *number = u64_at(field.get(..8)?, 0);
                field = &field[8..];
            }
            return Some(numbers);
        }
        extra = &extra[4 + length..];
    }
    None
}
