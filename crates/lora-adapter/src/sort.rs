//! Every tensor of a file sorted by what it is: into a pair, a note or a reason.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::{Reasons, shown};
use crate::feature::Feature;
use crate::keys::{self, Dialect, Half, Kind};
use crate::matrix::FileDtype;
use crate::modules::Target;
use crate::notes::Note;
use crate::pair::MAX_RANK;
use crate::reason::Reason;
use crate::tensor_file::{FilePlan, TensorPlan};
use crate::values::MatrixPlan;

/// A pair whose shapes agree and whose values are not read yet.
#[derive(Debug)]
pub(crate) struct PairPlan {
    pub(crate) target: Target,
    /// What patterns are matched against.
    pub(crate) path: String,
    pub(crate) a: MatrixPlan,
    pub(crate) b: MatrixPlan,
}

impl PairPlan {
    /// Rows of A and columns of B: the rank, times the number of experts in a stacked parameter.
    pub(crate) fn num_rows(&self) -> usize {
        self.a.shape[0]
    }

    /// Whether it may have this rank by its shape.
    pub(crate) fn allows_rank(&self, rank: usize) -> bool {
        match self.target {
            Target::Stacked { .. } => self.num_rows().is_multiple_of(rank),
            _ => self.num_rows() == rank,
        }
    }
}

/// Halves of one target while tensors are sorted.
#[derive(Default)]
struct Halves<'a> {
    path: String,
    a: Option<&'a TensorPlan>,
    b: Option<&'a TensorPlan>,
}

/// Sorts every tensor of the file by what it is. Each ends in a pair, in a note or in a reason.
pub(crate) fn plan_pairs<'a>(plan: &'a FilePlan, reasons: &mut Reasons, notes: &mut Vec<Note>) -> Vec<PairPlan> {
    let mut targets: BTreeMap<Target, Halves<'a>> = BTreeMap::new();
    let mut unsupported: BTreeMap<Feature, (usize, &str)> = BTreeMap::new();
    let mut dialects: BTreeMap<Dialect, (usize, &str)> = BTreeMap::new();
    let mut training_only: BTreeMap<&'static str, usize> = BTreeMap::new();
    let mut naming: BTreeMap<Dialect, usize> = BTreeMap::new();
    let mut adapters: BTreeMap<&str, &str> = BTreeMap::new();
    for tensor in &plan.tensors {
        let name = tensor.name.as_str();
        let key = keys::parse(tensor.key());
        if let Some(adapter) = key.adapter {
            adapters.entry(adapter).or_insert(name);
        }
        match key.kind {
            Kind::Half { target, half } => {
                key.dialects.iter().for_each(|dialect| *naming.entry(*dialect).or_default() += 1);
                let halves = targets.entry(target).or_default();
                halves.path = key.path;
                let place = if half == Half::A { &mut halves.a } else { &mut halves.b };
                if let Some(first) = place.replace(tensor) {
                    let (first, second) = (shown(&first.name), shown(name));
                    reasons.push(plan.file, Reason::AmbiguousTensor { place: target.to_string(), first, second });
                }
            }
            Kind::TrainingOnly { method } => *training_only.entry(method).or_default() += 1,
            Kind::Unsupported(feature) => unsupported.entry(feature).or_insert((0, name)).0 += 1,
            Kind::Dialect(dialect) => dialects.entry(dialect).or_insert((0, name)).0 += 1,
            Kind::Unknown(part) => reasons.push(plan.file, Reason::UnknownTensor { tensor: shown(name), part }),
        }
    }
    let mut named = adapters.into_values();
    if let (Some(first), Some(second)) = (named.next(), named.next()) {
        let (first, second) = (shown(first), shown(second));
        reasons.push(plan.file, Reason::SeveralAdapters { first, second });
    }
    let nothing = targets.is_empty() && unsupported.is_empty() && dialects.is_empty();
    if nothing && plan.tensors.len() == training_only.values().sum::<usize>() {
        reasons.push(plan.file, Reason::NoPairs { num_tensors: plan.tensors.len() });
    }
    for (feature, (num_tensors, first)) in unsupported {
        let tensor = shown(first);
        reasons.push(plan.file, Reason::UnsupportedTensors { feature, num_tensors, tensor });
    }
    for (dialect, (num_tensors, first)) in dialects {
        let tensor = shown(first);
        reasons.push(plan.file, Reason::UnsupportedDialect { dialect, num_tensors, tensor });
    }
    for (method, num_tensors) in training_only {
        notes.push(Note::TrainingOnlyTensors { method, num_tensors });
    }
    for (dialect, num_tensors) in naming {
        notes.push(Note::OtherNaming { dialect, num_tensors });
    }
    targets.into_iter().filter_map(|(target, halves)| plan_pair(target, halves, plan, reasons)).collect()
}

fn plan_pair(target: Target, halves: Halves<'_>, plan: &FilePlan, reasons: &mut Reasons) -> Option<PairPlan> {
    let mut half_pair = |tensor: &TensorPlan, half: Half| {
        let missing = shown(&half.other_name(&tensor.name));
        reasons.push(plan.file, Reason::HalfPair { tensor: shown(&tensor.name), missing });
    };
    match (halves.a, halves.b) {
        (Some(a), None) => half_pair(a, Half::A),
        (None, Some(b)) => half_pair(b, Half::B),
        _ => {}
    }
    let mut matrix = |tensor: Option<&TensorPlan>| {
        let planned = matrix_plan(tensor?, plan.data_offset);
        planned.map_err(|reason| reasons.push(plan.file, reason)).ok()
    };
    let (a, b) = (matrix(halves.a), matrix(halves.b));
    let pair = PairPlan { target, path: halves.path, a: a?, b: b? };
    let [rank, _] = pair.a.shape;
    if rank != pair.b.shape[1] {
        let (a, b) = (shown(&pair.a.tensor), shown(&pair.b.tensor));
        let mismatch = Reason::PairMismatch { a, a_shape: pair.a.shape, b, b_shape: pair.b.shape };
        reasons.push(plan.file, mismatch);
        return None;
    }
    if rank > MAX_RANK && !matches!(target, Target::Stacked { .. }) {
        let tensor = shown(&pair.a.tensor);
        reasons.push(plan.file, Reason::RankTooLarge { tensor, found: rank, max: MAX_RANK });
        return None;
    }
    Some(pair)
}

fn matrix_plan(tensor: &TensorPlan, data_offset: u64) -> Result<MatrixPlan, Reason> {
    let name = || shown(&tensor.name);
    if tensor.shape.contains(&0) {
        return Err(Reason::EmptyTensor { tensor: name(), shape: tensor.shape.clone() });
    }
    let dtype = match tensor.dtype {
        "F64" => FileDtype::F64,
        "F32" => FileDtype::F32,
        "F16" => FileDtype::F16,
        "BF16" => FileDtype::Bf16,
        other => return Err(Reason::UnsupportedDtype { tensor: name(), dtype: other.to_owned() }),
    };
    let sides = match tensor.shape[..] {
        [rows, cols] => usize::try_from(rows).ok().zip(usize::try_from(cols).ok()),
        _ => None,
    };
    let Some((rows, cols)) = sides else {
        return Err(Reason::NotAMatrix { tensor: name(), shape: tensor.shape.clone() });
    };
    let range = data_offset + tensor.begin..data_offset + tensor.end;
    let tensor_name = Arc::from(shown(&tensor.name));
    Ok(MatrixPlan { tensor: tensor_name, shape: [rows, cols], dtype, range, transposed: tensor.transposed })
}
