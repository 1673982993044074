//! Parameters that hold all experts of a layer: which parameter a pair of tensors is for, and how it lies there.
//!
//! The names say neither. PEFT wraps the parameters of a module one around the other, so that a name tells only how many
//! wrappers stand outside; which side of a delta is the input depends on the versions that trained it; the order of the
//! columns of B on the trainer. Shapes decide wherever they can, then the config; what is left to a default is noted.

use std::collections::{BTreeMap, BTreeSet};

use lora_math::{Module, Site};
use serde::Serialize;

use crate::error::{Reasons, shown};
use crate::marks::{Columns, Family, Marks};
use crate::modules::Target;
use crate::notes::Note;
use crate::reason::Reason;
use crate::sort::PairPlan;

/// How gate and up share the output features of one matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum GateUpOrder {
    /// The rows of gate, then those of up.
    Concatenated,
    /// Gate in the even rows, up in the odd ones: gpt-oss.
    Interleaved,
}

/// A parameter that holds all experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Parameter {
    GateUp,
    Down,
}

impl Parameter {
    fn name(self) -> &'static str {
        match self {
            Parameter::GateUp => "gate_up_proj",
            Parameter::Down => "down_proj",
        }
    }
}

/// Parameters of an experts module in the order in which PEFT wraps them, the last one outermost. Biases have wrappers
/// too, and no place here.
const REGISTERED: [(&str, Option<Parameter>); 4] = [
    ("gate_up_proj", Some(Parameter::GateUp)),
    ("gate_up_proj_bias", None),
    ("down_proj", Some(Parameter::Down)),
    ("down_proj_bias", None),
];

/// How the stacked parameters of a file lie.
#[derive(Debug)]
pub(crate) struct Experts {
    pub(crate) parameters: BTreeMap<Target, (Parameter, Columns)>,
    /// A is on the side of the output and B on that of the input.
    pub(crate) swapped: bool,
    pub(crate) order: GateUpOrder,
    /// Some matrix holds gate and up.
    pub(crate) is_fused: bool,
}

/// Finds out how the stacked parameters lie, and completes the paths that patterns are matched against: those of
/// parameters end in the name of the parameter.
pub(crate) fn resolve(
    marks: &Marks,
    pairs: &mut [PairPlan],
    file: &'static str,
    reasons: &mut Reasons,
    notes: &mut Vec<Note>,
) -> Option<Experts> {
    let family = family(pairs).or(marks.family);
    let mut parameters = BTreeMap::new();
    let num_wrapped = num_wrapped(pairs);
    let mut num_grouped = 0;
    let mut is_whole = true;
    for pair in pairs.iter_mut() {
        let Target::Stacked { layer, depth } = pair.target else {
            if names(&marks.parameters, &format!("{}.weight", pair.path)) {
                pair.path.push_str(".weight");
            }
            continue;
        };
        // PEFT matches against the parameter of the model without wrappers.
        pair.path.truncate(pair.path.len() - depth * ".base_layer".len());
        let Some(parameter) = parameter(marks, &pair.path, depth, num_wrapped.get(&layer).copied()) else {
            let tensor = shown(&pair.a.tensor);
            reasons.push(file, Reason::UnknownParameter { tensor, target_parameters: shown(&list(marks)) });
            is_whole = false;
            continue;
        };
        // The heuristic of Unsloth's own reader: files of the versions that grouped columns and left no mark.
        let unmarked = marks.is_unsloth && !marks.parameters.is_empty() && family != Some(Family::Llama4);
        let columns = marks.columns(parameter.name()).unwrap_or_else(|| {
            num_grouped += usize::from(unmarked);
            if unmarked { Columns::Grouped } else { Columns::RankMajor }
        });
        pair.path = format!("{}.{}", pair.path, parameter.name());
        parameters.insert(pair.target, (parameter, columns));
    }
    if num_grouped > 0 {
        notes.push(Note::GroupedColumnsAssumed { num_pairs: num_grouped });
    }
    if !is_whole {
        return None;
    }
    let swapped = swapped(marks, family, pairs, &parameters, file, reasons, notes)?;
    let is_stacked = parameters.values().any(|(parameter, _)| *parameter == Parameter::GateUp);
    let is_fused = is_stacked || pairs.iter().any(|pair| matches!(pair.target, Target::ExpertGateUp { .. }));
    let order = match family {
        Some(Family::GptOss) => GateUpOrder::Interleaved,
        _ => GateUpOrder::Concatenated,
    };
    if is_fused && family.is_none() {
        notes.push(Note::GateUpOrderAssumed);
    }
    Some(Experts { parameters, swapped, order, is_fused })
}

/// Whether an entry names this parameter: by its whole path or by an end of it after a dot.
fn names(entries: &BTreeSet<String>, path: &str) -> bool {
    let ends = path.match_indices('.').map(|(dot, _)| &path[dot + 1..]);
    !entries.is_empty() && std::iter::once(path).chain(ends).any(|end| entries.contains(end))
}

fn list(marks: &Marks) -> String {
    if marks.parameters.is_empty() {
        return "nothing".to_owned();
    }
    marks.parameters.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
}

/// Wrappers of the experts of each layer.
fn num_wrapped(pairs: &[PairPlan]) -> BTreeMap<usize, usize> {
    let mut found = BTreeMap::new();
    for pair in pairs {
        if let Target::Stacked { layer, .. } = pair.target {
            *found.entry(layer).or_default() += 1;
        }
    }
    found
}

/// The parameter `depth` wrappers below the outermost one.
fn parameter(marks: &Marks, path: &str, depth: usize, num_wrapped: Option<usize>) -> Option<Parameter> {
    let hits = REGISTERED.iter().filter(|(name, _)| names(&marks.parameters, &format!("{path}.{name}")));
    let mut hits: Vec<Option<Parameter>> = hits.map(|(_, parameter)| *parameter).collect();
    if hits.is_empty() && num_wrapped == Some(2) {
        // Two wrappers and no word of the config: the two weights.
        hits = vec![Some(Parameter::GateUp), Some(Parameter::Down)];
    }
    *hits.get(hits.len().checked_sub(1 + depth)?)?
}

/// The family that the modules of the adapter speak for.
fn family(pairs: &[PairPlan]) -> Option<Family> {
    let of = |pair: &PairPlan| match pair.target {
        _ if pair.path.contains(".feed_forward.") => Some(Family::Llama4),
        Target::ExpertGateUp { .. } => Some(Family::GptOss),
        _ if pair.path.contains(".mlp.router") || pair.path.contains(".down_projs.") => Some(Family::GptOss),
        _ if pair.path.contains(".linear_attn.") || pair.path.contains(".block_sparse_moe.") => Some(Family::Other),
        _ if pair.path.ends_with(".mlp.gate") || pair.path.contains(".mlp.shared_expert") => Some(Family::Other),
        _ => None,
    };
    pairs.iter().find_map(of)
}

/// Which side is the input, by the shapes of the whole file: one hidden size, one width inside of the experts. Where both
/// ways fit, by the versions that trained it.
fn swapped(
    marks: &Marks,
    family: Option<Family>,
    pairs: &[PairPlan],
    parameters: &BTreeMap<Target, (Parameter, Columns)>,
    file: &'static str,
    reasons: &mut Reasons,
    notes: &mut Vec<Note>,
) -> Option<bool> {
    let stacked = pairs.iter().filter_map(|pair| {
        let (parameter, _) = *parameters.get(&pair.target)?;
        Some((parameter, pair.a.shape[1], pair.b.shape[0]))
    });
    let stacked: BTreeSet<(Parameter, usize, usize)> = stacked.collect();
    if stacked.is_empty() {
        return Some(false);
    }
    let hidden = hidden_size(pairs);
    match [false, true].map(|swapped| fits(&stacked, hidden, swapped)) {
        [true, false] => return Some(false),
        [false, true] => return Some(true),
        [true, true] => {}
        [false, false] => {
            let shapes = stacked.iter().take(8).map(|(parameter, a, b)| (parameter.name(), *a, *b)).collect();
            reasons.push(file, Reason::ExpertShapes { shapes, hidden_size: hidden });
            return None;
        }
    }
    let from_0_19 = marks.peft.is_some_and(|version| version >= (0, 19));
    let (swapped, is_certain) = match family {
        Some(Family::Llama4) => (from_0_19, true),
        Some(Family::GptOss) => (false, !from_0_19),
        Some(Family::Other) => (!from_0_19, true),
        None => (marks.peft == Some((0, 18)), false),
    };
    if !is_certain {
        notes.push(Note::OrientationAssumed { swapped });
    }
    Some(swapped)
}

/// Whether every shape agrees with one hidden size and one width inside of the experts.
fn fits(stacked: &BTreeSet<(Parameter, usize, usize)>, hidden: Option<usize>, swapped: bool) -> bool {
    let mut hidden: BTreeSet<usize> = hidden.into_iter().collect();
    let mut inside = BTreeSet::new();
    for &(parameter, a_cols, b_rows) in stacked {
        let (input, output) = if swapped { (b_rows, a_cols) } else { (a_cols, b_rows) };
        match parameter {
            Parameter::GateUp if output % 2 == 1 => return false,
            Parameter::GateUp => (hidden.insert(input), inside.insert(output / 2)),
            Parameter::Down => (hidden.insert(output), inside.insert(input)),
        };
    }
    hidden.len() == 1 && inside.len() == 1
}

/// The hidden size by the modules that read it, where they agree.
fn hidden_size(pairs: &[PairPlan]) -> Option<usize> {
    let reads = |pair: &&PairPlan| match pair.target {
        Target::Site(Site::Layer { module, .. }) => {
            !matches!(module, Module::OProj | Module::DownProj | Module::LinearOutProj | Module::SharedDownProj)
        }
        _ => false,
    };
    let mut found: BTreeSet<usize> = pairs.iter().filter(reads).map(|pair| pair.a.shape[1]).collect();
    let hidden = found.pop_first()?;
    found.is_empty().then_some(hidden)
}
