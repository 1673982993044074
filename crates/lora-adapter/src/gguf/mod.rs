//! GGUF files that llama.cpp's converter makes of PEFT adapters: one file holds what config and weights say elsewhere.
//!
//! Tensors get the names that PEFT gives their places, so everything behind this file sees one naming; messages keep the
//! names of the file. The scaling is alpha over the rank of each pair, and 1 where alpha is 0: the converter knows nothing
//! of rsLoRA and of patterns, so what a file gives is what llama.cpp runs. Rows of q and k of `llama` are left as they
//! stand: their order depends on head counts that the file does not hold; see
//! [`Adapter::with_gguf_heads`](crate::Adapter::with_gguf_heads).

mod error;
mod header;
mod names;
mod rows;

use std::collections::BTreeSet;

use lora_math::scaling::ScalingRule;

pub use error::GgufError;
use header::{Header, Tensor, Value};
use names::{Architecture, Place};
pub(crate) use rows::half_rotation;

use crate::config::{Config, Tool};
use crate::declared::Declared;
use crate::error::{Reasons, shown};
use crate::load::MAX_EXPERT_PAIRS;
use crate::mlx::MIN_EXPERT_BYTES;
use crate::notes::Note;
use crate::reason::Reason;
use crate::shards::Joined;
use crate::source::{AdapterSource, PlainName};
use crate::tensor_file::{FilePlan, TensorPlan};

/// The file in messages.
pub(crate) const FILE: &str = "*.gguf";

/// What the name of a file ends in.
pub(crate) const ENDING: &str = ".gguf";

/// Types by ggml's numbers: the name, and for those that are read the name and size of safetensors' dtype.
const TYPES: [(u32, &str, Option<u64>); 33] = [
    (0, "F32", Some(4)),
    (1, "F16", Some(2)),
    (30, "BF16", Some(2)),
    (28, "F64", Some(8)),
    (2, "Q4_0", None),
    (3, "Q4_1", None),
    (6, "Q5_0", None),
    (7, "Q5_1", None),
    (8, "Q8_0", None),
    (9, "Q8_1", None),
    (10, "Q2_K", None),
    (11, "Q3_K", None),
    (12, "Q4_K", None),
    (13, "Q5_K", None),
    (14, "Q6_K", None),
    (15, "Q8_K", None),
    (16, "IQ2_XXS", None),
    (17, "IQ2_XS", None),
    (18, "IQ3_XXS", None),
    (19, "IQ1_S", None),
    (20, "IQ4_NL", None),
    (21, "IQ3_S", None),
    (22, "IQ2_S", None),
    (23, "IQ4_XS", None),
    (24, "I8", None),
    (25, "I16", None),
    (26, "I32", None),
    (27, "I64", None),
    (29, "IQ1_M", None),
    (34, "TQ1_0", None),
    (35, "TQ2_0", None),
    (39, "MXFP4", None),
    (40, "NVFP4", None),
];

/// What a file says.
pub(crate) struct Opened {
    pub(crate) config: Config,
    pub(crate) file: Joined,
    pub(crate) plan: FilePlan,
    /// Rows of q and k wait for head counts.
    pub(crate) awaits_heads: bool,
}

/// Reads the header of the file with this name.
pub(crate) fn open(
    source: &AdapterSource,
    name: &PlainName,
    reasons: &mut Reasons,
    notes: &mut Vec<Note>,
) -> Option<Opened> {
    let mut refuse = |reason| reasons.push(FILE, reason);
    let (mut file, file_bytes) = source.open_plain(name).map_err(&mut refuse).ok()?;
    let header = Header::read(&mut file, file_bytes).map_err(&mut refuse).ok()?;
    let architecture = architecture(&header).map_err(|error| refuse(error.into())).ok()?;
    let config = config(&header, reasons, notes);
    let tensors = tensors(&header, architecture, file_bytes, reasons)?;
    let swaps = |tensor: &TensorPlan| {
        [".attn_q.weight.lora_b", ".attn_k.weight.lora_b"].iter().any(|end| tensor.name.ends_with(end))
    };
    let awaits_heads = architecture == Architecture::Llama && tensors.iter().any(swaps);
    let plan = FilePlan { file: FILE, tensors, data_offset: header.data_offset };
    Some(Opened { config: config?, file: Joined::new([(file, file_bytes)]), plan, awaits_heads })
}

/// The architecture, once the file is known to be an adapter.
fn architecture(header: &Header) -> Result<Architecture, GgufError> {
    let text = |key: &'static str, expected: &'static str| match header.values.get(key) {
        Some(Value::Text(text)) => Ok(text.as_str()),
        Some(other) => Err(GgufError::Bad { what: key.to_owned(), expected, found: other.show() }),
        None => Err(GgufError::MissingKey { key, expected }),
    };
    for (key, expected) in [("general.type", "adapter"), ("adapter.type", "lora")] {
        let found = text(key, expected)?;
        if found != expected {
            return Err(GgufError::Bad { what: key.to_owned(), expected, found: shown(found) });
        }
    }
    let name = text("general.architecture", "the name of an architecture")?;
    Architecture::from_name(name).ok_or_else(|| GgufError::Architecture { found: shown(name) })
}

/// What the keys about the adapter say. `general.` and whatever else describes the file changes nothing.
fn config(header: &Header, reasons: &mut Reasons, notes: &mut Vec<Note>) -> Option<Config> {
    let (mut alpha, mut tokens, mut is_whole) = (0.0, Vec::new(), true);
    for (key, value) in &header.values {
        let bad = |expected| GgufError::Bad { what: shown(key), expected, found: value.show() };
        let refused = match (key.as_str(), value) {
            ("adapter.lora.alpha", Value::Float(value)) if value.is_finite() => {
                alpha = *value;
                continue;
            }
            ("adapter.lora.alpha", _) => bad("a finite number"),
            ("adapter.alora.invocation_tokens", Value::Tokens(list)) => {
                tokens.clone_from(list);
                continue;
            }
            ("adapter.alora.invocation_tokens", _) => bad("a list of at most 65536 unsigned 32-bit numbers"),
            ("adapter.lora.task_name" | "adapter.lora.prompt_prefix", Value::Text(text)) => {
                notes.push(Note::Said { field: key.clone(), text: shown(text) });
                continue;
            }
            ("adapter.type", _) => continue,
            ("split.count", Value::Integer(0 | 1)) => continue,
            ("split.count", _) => bad("one file (llama-gguf-split joins them)"),
            (other, _) if other.starts_with("adapter.") => GgufError::UnknownKey { key: shown(other) },
            _ => continue,
        };
        is_whole = false;
        reasons.push(FILE, refused.into());
    }
    // llama.cpp takes alpha 0 for "no alpha": the scaling is 1.
    let (alpha, rule) = if alpha == 0.0 { (1.0, ScalingRule::Given) } else { (alpha, ScalingRule::Standard) };
    let mut config = Config::of_other_tool(Tool::Gguf, alpha, rule, Declared::of_gguf(tokens));
    if let Some(Value::Text(name)) = header.values.get("general.base_model.0.name") {
        config.origin.base_model = Some(shown(name));
    }
    is_whole.then_some(config)
}

/// The tensors by name, in PEFT's naming and orientation. None where a single one was refused.
fn tensors(
    header: &Header,
    architecture: Architecture,
    file_bytes: u64,
    reasons: &mut Reasons,
) -> Option<Vec<TensorPlan>> {
    let num_before = reasons.count();
    let mut refuse = |reason| reasons.push(FILE, reason);
    let mut names = BTreeSet::new();
    let mut sized = Vec::with_capacity(header.tensors.len());
    for tensor in &header.tensors {
        if !names.insert(tensor.name.as_str()) {
            refuse(Reason::DuplicateTensor { tensor: shown(&tensor.name) });
        }
        match size(tensor) {
            Ok((dtype, num_bytes)) => sized.push((tensor, dtype, num_bytes)),
            Err(reason) => refuse(reason),
        }
    }
    if reasons.count() > num_before {
        return None;
    }
    sized.sort_by_key(|(tensor, _, num_bytes)| (tensor.offset, *num_bytes));
    let mut end = 0u64;
    let mut room = (MAX_EXPERT_PAIRS as u64 * 2).min(file_bytes / MIN_EXPERT_BYTES);
    let mut planned = Vec::with_capacity(sized.len());
    for (tensor, dtype, num_bytes) in sized {
        let expected = end.checked_next_multiple_of(header.alignment).unwrap_or(u64::MAX);
        if tensor.offset != expected {
            let tensor_name = shown(&tensor.name);
            reasons.push(FILE, GgufError::Offset { tensor: tensor_name, expected, found: tensor.offset }.into());
            return None;
        }
        end = tensor.offset.saturating_add(num_bytes);
        let needed = header.data_offset.saturating_add(end);
        if needed > file_bytes {
            let (what, offset) = (format!("tensor {}", shown(&tensor.name)), header.data_offset + tensor.offset);
            let truncated = GgufError::Truncated { what, offset, needed_bytes: num_bytes, file_bytes };
            reasons.push(FILE, truncated.into());
            return None;
        }
        let plan = TensorPlan {
            name: tensor.name.clone(),
            peft_name: None,
            dtype,
            shape: tensor.shape.clone(),
            transposed: false,
            begin: tensor.offset,
            end,
        };
        match translate(architecture, plan, &mut room, &mut planned) {
            Ok(()) => {}
            Err(reason) => reasons.push(FILE, reason),
        }
    }
    // Writers pad the last tensor, or do not.
    let longest = header.data_offset.saturating_add(end.next_multiple_of(header.alignment));
    if file_bytes > longest {
        let expected_bytes = header.data_offset + end;
        reasons.push(FILE, Reason::TrailingBytes { expected_bytes, found_bytes: file_bytes });
    }
    planned.sort_by(|a, b| a.name.cmp(&b.name));
    (reasons.count() == num_before).then_some(planned)
}

/// Name of the dtype, and the length of the data.
fn size(tensor: &Tensor) -> Result<(&'static str, u64), Reason> {
    let known = TYPES.iter().find(|(code, ..)| *code == tensor.code);
    let Some(&(_, dtype, Some(element_bytes))) = known else {
        let dtype = known.map_or_else(|| format!("ggml type {}", tensor.code), |(_, name, _)| (*name).to_owned());
        return Err(Reason::UnsupportedDtype { tensor: shown(&tensor.name), dtype });
    };
    let elements = tensor.shape.iter().try_fold(1u64, |product, dim| product.checked_mul(*dim));
    let num_bytes = elements.and_then(|elements| elements.checked_mul(element_bytes));
    let what = || format!("shape of {}", shown(&tensor.name));
    let bad = || GgufError::Bad { what: what(), expected: "fewer elements", found: format!("{:?}", tensor.shape) };
    num_bytes.map(|num_bytes| (dtype, num_bytes)).ok_or_else(|| bad().into())
}

/// Puts a tensor in PEFT's naming and orientation into `planned`; stacked experts become one for each expert.
fn translate(
    architecture: Architecture,
    mut tensor: TensorPlan,
    room: &mut u64,
    planned: &mut Vec<TensorPlan>,
) -> Result<(), Reason> {
    let refused = |tensor: &TensorPlan, what| {
        let (tensor, architecture) = (shown(&tensor.name), architecture.name());
        Err(GgufError::Tensor { tensor, what, architecture }.into())
    };
    let (name, half) = match tensor.name.rsplit_once('.') {
        Some((name, "lora_a")) => (name, Some("A")),
        Some((name, "lora_b")) => (name, Some("B")),
        _ => (tensor.name.as_str(), None),
    };
    let Some(name) = name.strip_suffix(".weight") else {
        return refused(&tensor, "expected a name in .weight.lora_a or .weight.lora_b");
    };
    let place = match names::place(architecture, name) {
        Ok(place) => place,
        Err(what) => return refused(&tensor, what),
    };
    let Some(half) = half else {
        return match place {
            Place::Norm(path) => {
                tensor.peft_name = Some(format!("base_model.model.{path}.weight"));
                planned.push(tensor);
                Ok(())
            }
            _ => refused(&tensor, "a whole weight, where lora_a and lora_b are expected"),
        };
    };
    // ggml drops dimensions of 1 at the slow end.
    if tensor.shape.len() == 1 {
        tensor.shape.insert(0, 1);
    }
    let suffix = format!("lora_{half}.weight");
    let (experts, modules): (String, &[&str]) = match place {
        Place::Linear(path) => {
            tensor.peft_name = Some(format!("base_model.model.{path}.{suffix}"));
            planned.push(tensor);
            return Ok(());
        }
        Place::Embedding => {
            tensor.peft_name = Some(format!("base_model.model.model.embed_tokens.lora_embedding_{half}"));
            if half == "A" && tensor.shape.len() == 2 {
                tensor.shape.reverse();
                tensor.transposed = true;
            }
            planned.push(tensor);
            return Ok(());
        }
        Place::Norm(_) => return refused(&tensor, "lora_a or lora_b of a norm"),
        Place::Experts(path, module) => (path, &[module]),
        Place::GateUpExperts(path) => (path, &["gate_proj", "up_proj"]),
    };
    let [num_experts, rows, cols] = tensor.shape[..] else {
        return refused(&tensor, "expected three dimensions, the slowest for the experts");
    };
    // B of gate and up in one matrix: the rows of gate, then those of up. Both have A.
    let num_parts = if half == "B" { modules.len() as u64 } else { 1 };
    if tensor.shape.contains(&0) || !rows.is_multiple_of(num_parts) {
        return refused(&tensor, "expected matrices of elements, B of gate and up with an even number of rows");
    }
    let num_matrices = num_experts.saturating_mul(modules.len() as u64);
    if num_matrices > *room {
        return Err(Reason::TooManyExperts { found: num_matrices as usize, max: *room as usize });
    }
    *room -= num_matrices;
    let expert_bytes = (tensor.end - tensor.begin) / num_experts;
    let part_bytes = expert_bytes / num_parts;
    for expert in 0..num_experts {
        for (index, module) in modules.iter().enumerate() {
            let part = if num_parts == 1 { 0 } else { index as u64 };
            let begin = tensor.begin + expert * expert_bytes + part * part_bytes;
            planned.push(TensorPlan {
                name: format!("{}[{expert}]", tensor.name),
                peft_name: Some(format!("base_model.model.{experts}.{expert}.{module}.{suffix}")),
                dtype: tensor.dtype,
                shape: vec![rows / num_parts, cols],
                transposed: false,
                begin,
                end: begin + part_bytes,
            });
        }
    }
    Ok(())
}
