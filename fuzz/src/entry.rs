//! What each fuzz target does with its input: it makes an adapter's files of it and opens them through the public API,
//! as a server would.
//!
//! Nothing of the readers is reached around the file system, so that a finding is a finding about what users call; the
//! files lie in memory. Uses `lora_adapter` and the standard library only: the corpus replay, an ordinary test of
//! `lora-adapter`, compiles this file too.

use std::fs;
use std::path::Path;

use lora_adapter::{Adapter, GateUpOrder, GgufError, LoadError, Reason};

/// A config that goes with any plain pairs of rank 4.
const CONFIG: &[u8] = br#"{"peft_type": "LORA", "r": 4, "lora_alpha": 8}"#;

const CONFIG_FILE: &str = "adapter_config.json";
const WEIGHTS_FILE: &str = "adapter_model.safetensors";
const MLX_WEIGHTS_FILE: &str = "adapters.safetensors";
const PICKLE_FILE: &str = "adapter_model.bin";
const GGUF_FILE: &str = "adapter.gguf";

/// The longest file that is made of an input.
const MAX_FILE_BYTES: u64 = 256 << 10;

/// Parts of one input are separated by this.
const SEPARATOR: &[u8] = b"\n----\n";

/// What a target does with an input, in a folder of its own. Gives how many adapters it loaded.
pub type Entry = fn(&Path, &[u8]) -> usize;

/// Every target by name.
pub const ENTRIES: [(&str, Entry); 4] =
    [("config", config), ("safetensors", safetensors), ("pickle", pickle), ("gguf", gguf)];

/// `adapter_config.json` beside good weights: q and v of one layer, rank 4.
pub fn config(scratch: &Path, input: &[u8]) -> usize {
    let mut header = String::from("{");
    let mut end = 0;
    for (name, [rows, cols]) in
        [("q_proj.lora_A", [4, 8]), ("q_proj.lora_B", [8, 4]), ("v_proj.lora_A", [4, 8]), ("v_proj.lora_B", [2, 4])]
    {
        let begin = end;
        end += rows * cols * 2;
        let comma = if begin == 0 { "" } else { "," };
        header.push_str(&format!(
            r#"{comma}"base_model.model.model.layers.0.self_attn.{name}.weight":{{"dtype":"BF16","shape":[{rows},{cols}],"data_offsets":[{begin},{end}]}}"#
        ));
    }
    header.push('}');
    let mut weights = (header.len() as u64).to_le_bytes().to_vec();
    weights.extend_from_slice(header.as_bytes());
    weights.extend((0..end).map(|index| if index % 2 == 0 { index as u8 } else { 0x3d }));
    usize::from(open(scratch, &[(CONFIG_FILE, input), (WEIGHTS_FILE, &weights), (MLX_WEIGHTS_FILE, &weights)]).is_ok())
}

/// A safetensors file, under PEFT's name and mlx-lm's; where [`SEPARATOR`] stands in the input, what is before it is the
/// config. Its first eight bytes
/// give the length of the header, so they are written here where they claim more than there is: a mutation seldom finds
/// them.
pub fn safetensors(scratch: &Path, input: &[u8]) -> usize {
    let (config, weights) = match input.windows(SEPARATOR.len()).position(|window| window == SEPARATOR) {
        Some(at) => (&input[..at], &input[at + SEPARATOR.len()..]),
        None => (CONFIG, input),
    };
    let open = |weights: &[u8]| {
        let files = [(CONFIG_FILE, config), (WEIGHTS_FILE, weights), (MLX_WEIGHTS_FILE, weights)];
        usize::from(open(scratch, &files).is_ok())
    };
    let mut num_loaded = open(weights);
    // The header mends its own length: it ends at the last brace before the data.
    if let Some((_, rest)) = weights.split_at_checked(8)
        && let Some(at) = rest.windows(2).rposition(|window| window == b"}}")
    {
        let mut mended = (at as u64 + 2).to_le_bytes().to_vec();
        mended.extend_from_slice(rest);
        num_loaded += open(&mended);
    }
    num_loaded
}

/// `adapter_model.bin`: an input that begins as an archive is the file as it is; any other is the pickle in a good
/// archive with four storages of 128 bytes.
pub fn pickle(scratch: &Path, input: &[u8]) -> usize {
    if input.starts_with(b"PK") {
        return usize::from(open(scratch, &[(CONFIG_FILE, CONFIG), (PICKLE_FILE, input)]).is_ok());
    }
    let storage: Vec<u8> = (0..128).map(|index| if index % 4 == 3 { 0x3d } else { index }).collect();
    let entries = [("data.pkl", input), ("byteorder", b"little"), ("data/0", &storage), ("data/1", &storage)];
    let entries = entries.into_iter().chain([("data/2", &storage[..]), ("data/3", &storage[..])]);
    usize::from(open(scratch, &[(CONFIG_FILE, CONFIG), (PICKLE_FILE, &archive(entries))]).is_ok())
}

/// A GGUF file. Where only data of tensors is missing at its end, it is opened again with zeros there: mutations of a
/// header seldom keep it true.
pub fn gguf(scratch: &Path, input: &[u8]) -> usize {
    let mut file = input.to_vec();
    for _ in 0..32 {
        let Err(error) = open(scratch, &[(GGUF_FILE, &file)]) else { return 1 };
        let missing = error.reasons().find_map(|reason| match reason {
            Reason::Gguf(GgufError::Truncated { what, offset, needed_bytes, .. }) if what.starts_with("tensor ") => {
                offset.checked_add(*needed_bytes)
            }
            _ => None,
        });
        match missing.filter(|end| *end <= MAX_FILE_BYTES) {
            Some(end) => file.resize(end as usize, 0),
            None => return 0,
        }
    }
    0
}

/// An archive of uncompressed entries in one folder.
fn archive<'a>(entries: impl IntoIterator<Item = (&'a str, &'a [u8])>) -> Vec<u8> {
    let (mut file, mut directory, mut num_entries) = (Vec::new(), Vec::new(), 0u16);
    for (name, bytes) in entries {
        let name = format!("archive/{name}");
        let offset = file.len() as u32;
        let sizes = [(bytes.len() as u32).to_le_bytes(); 2].concat();
        let lengths = [(name.len() as u16).to_le_bytes(), [0; 2]].concat();
        // Version, flags, method, time, date, checksum: none of them is looked at.
        let common = [&[0; 2][..], &[0; 2], &[0; 2], &[0; 4], &[0; 4], &sizes, &lengths].concat();
        file.extend([&b"PK\x03\x04"[..], &common, name.as_bytes(), bytes].concat());
        let more = [&[0; 2][..], &[0; 2], &[0; 2], &[0; 4], &offset.to_le_bytes()].concat();
        directory.extend([&b"PK\x01\x02"[..], &[0; 2], &common, &more, name.as_bytes()].concat());
        num_entries += 1;
    }
    let [offset, bytes] = [file.len(), directory.len()].map(|number| (number as u32).to_le_bytes());
    let count = num_entries.to_le_bytes();
    file.extend(directory);
    file.extend([&b"PK\x05\x06"[..], &[0; 4], &count, &count, &bytes, &offset, &[0; 2]].concat());
    file
}

/// Writes the files, opens the adapter, and looks at what came of it.
fn open(scratch: &Path, files: &[(&str, &[u8])]) -> Result<(), LoadError> {
    for (name, bytes) in files {
        fs::write(scratch.join(name), bytes).expect("the scratch folder can be written");
    }
    let opened = Adapter::open(scratch);
    for (name, _) in files {
        fs::remove_file(scratch.join(name)).expect("the scratch folder can be written");
    }
    match opened {
        Ok(adapter) => {
            examine(adapter);
            Ok(())
        }
        Err(error) => {
            assert!(error.reasons().next().is_some(), "a refusal without a reason");
            // Text of the file is quoted in pieces of bounded length.
            let longest = error.located().iter().map(|located| located.to_string().len()).max().unwrap_or_default();
            assert!(longest < 64 << 10, "a reason of {longest} bytes");
            assert!(!error.to_string().bytes().any(|byte| byte < b' ' && byte != b'\n'), "{error:?}");
            Err(error)
        }
    }
}

/// Every number that an adapter holds is finite and every matrix of the size that it says.
fn examine(adapter: Adapter) {
    assert!(adapter.pairs().len() + adapter.extras().len() > 0, "an adapter of nothing");
    for (site, pair) in adapter.pairs() {
        assert!(pair.scaling().is_finite() && pair.a().rows() == pair.b().cols(), "{site}");
        for matrix in [pair.a(), pair.b()] {
            assert_eq!(matrix.bytes().len(), matrix.num_elements() * matrix.dtype().bytes(), "{site}");
        }
    }
    for note in adapter.notes() {
        assert!(note.to_string().len() < 64 << 10);
    }
    let content = adapter.content();
    assert!(!adapter.report().to_string().is_empty());
    let order = |order| adapter.clone().with_gate_up_order(order);
    let there_and_back = order(GateUpOrder::Interleaved).with_gate_up_order(GateUpOrder::Concatenated);
    assert_eq!(there_and_back.content(), order(GateUpOrder::Concatenated).content());
    assert_eq!(adapter.content(), content);
    if adapter.awaits_heads()
        && let Ok(resolved) = adapter.with_gguf_heads(4, 2)
    {
        assert!(!resolved.awaits_heads());
    }
}
