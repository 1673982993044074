//! Every tensor of a file sorted by what it is: into a pair, a tensor beside the pairs, a note or a reason.

use std::collections::BTreeMap;
use std::sync::Arc;

use lora_math::{Module, Site};

use crate::blocks::BlockDiagonal;
use crate::error::{Reasons, shown};
use crate::extras::Extra;
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
    /// Which half is stored as the blocks of a diagonal, and how many they are.
    pub(crate) blocks: Option<(Half, usize)>,
}

/// A tensor beside the pairs whose values are not read yet.
#[derive(Debug)]
pub(crate) struct ExtraPlan {
    /// The path of its module.
    pub(crate) path: String,
    /// A vector has one row.
    pub(crate) matrix: MatrixPlan,
}

/// What a file holds, by what it is.
#[derive(Debug, Default)]
pub(crate) struct Sorted {
    pub(crate) pairs: Vec<PairPlan>,
    pub(crate) extras: BTreeMap<Extra, ExtraPlan>,
}

impl PairPlan {
    /// Rows of A and columns of B: the rank, times the number of experts in a stacked parameter.
    pub(crate) fn num_rows(&self) -> usize {
        self.a.shape[0]
    }

    /// Shape of A once its blocks stand on their diagonal.
    pub(crate) fn a_shape(&self) -> [usize; 2] {
        self.unfolded(Half::A, self.a.shape)
    }

    /// Shape of B once its blocks stand on their diagonal.
    pub(crate) fn b_shape(&self) -> [usize; 2] {
        self.unfolded(Half::B, self.b.shape)
    }

    fn unfolded(&self, half: Half, [rows, cols]: [usize; 2]) -> [usize; 2] {
        match self.blocks {
            Some((stored, num_blocks)) if stored == half => [rows, cols.saturating_mul(num_blocks)],
            _ => [rows, cols],
        }
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

/// Sorts every tensor of the file by what it is. Each ends in a pair, beside the pairs, in a note or in a reason. `blocks`
/// says which pairs are stored as blocks of a diagonal.
pub(crate) fn sort<'a>(
    plan: &'a FilePlan,
    blocks: Option<&BlockDiagonal>,
    reasons: &mut Reasons,
    notes: &mut Vec<Note>,
) -> Sorted {
    let mut extras: BTreeMap<Extra, (String, &TensorPlan)> = BTreeMap::new();
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
            Kind::Extra(extra) => {
                key.dialects.iter().for_each(|dialect| *naming.entry(*dialect).or_default() += 1);
                if let Some((_, first)) = extras.insert(extra, (key.path, tensor)) {
                    let (first, second) = (shown(&first.name), shown(name));
                    reasons.push(plan.file, Reason::AmbiguousTensor { place: extra.to_string(), first, second });
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
    if nothing && plan.tensors.len() == extras.len() + training_only.values().sum::<usize>() {
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
    let pairs = targets.into_iter().filter_map(|(target, halves)| plan_pair(target, halves, plan, blocks, reasons));
    let mut pairs: Vec<PairPlan> = pairs.collect();
    unflip_embedding(&mut pairs);
    let extras = extras.into_iter().filter_map(|(extra, (path, tensor))| {
        let planned = extra_plan(extra, tensor, plan.data_offset);
        let matrix = planned.map_err(|reason| reasons.push(plan.file, reason)).ok()?;
        Some((extra, ExtraPlan { path, matrix }))
    });
    let sorted = Sorted { extras: extras.collect(), pairs };
    check_extras(&sorted, plan, reasons);
    sorted
}

/// mergekit writes the pair of an embedding as that of a linear layer from hidden size to vocabulary: what it calls A is
/// the transpose of B. Seen where another projection tells the hidden size.
fn unflip_embedding(pairs: &mut [PairPlan]) {
    let reads_hidden = |pair: &PairPlan| match pair.target {
        Target::Site(Site::Layer { module, .. }) => {
            matches!(module, Module::QProj | Module::KProj | Module::VProj | Module::GateProj | Module::UpProj)
        }
        _ => false,
    };
    let Some(hidden_size) = pairs.iter().find(|pair| reads_hidden(pair)).map(|pair| pair.a.shape[1]) else { return };
    let embedding = Target::Site(Site::Vocabulary { module: Module::EmbedTokens });
    let Some(pair) = pairs.iter_mut().find(|pair| pair.target == embedding) else { return };
    if pair.a.shape[1] == hidden_size && pair.b.shape[0] != hidden_size {
        std::mem::swap(&mut pair.a, &mut pair.b);
        for matrix in [&mut pair.a, &mut pair.b] {
            matrix.shape.reverse();
            matrix.transposed = !matrix.transposed;
        }
    }
}

/// The plan of a tensor beside the pairs; a vector becomes a matrix of one row.
fn extra_plan(extra: Extra, tensor: &TensorPlan, data_offset: u64) -> Result<MatrixPlan, Reason> {
    let is_matrix = matches!(extra, Extra::Weight(_) | Extra::BaseCopy(_) | Extra::TokenRows(_));
    match tensor.shape[..] {
        [length] if !is_matrix => {
            let row = TensorPlan { shape: vec![1, length], ..tensor.clone() };
            matrix_plan(&row, data_offset)
        }
        [_, _] if is_matrix => matrix_plan(tensor, data_offset),
        _ => {
            let expected = if is_matrix { "two dimensions" } else { "one dimension" };
            Err(Reason::ExtraDimensions { tensor: shown(&tensor.name), shape: tensor.shape.clone(), expected })
        }
    }
}

/// Tensors that belong to a pair have one, and its size.
fn check_extras(sorted: &Sorted, plan: &FilePlan, reasons: &mut Reasons) {
    let pairs: BTreeMap<Target, &PairPlan> = sorted.pairs.iter().map(|pair| (pair.target, pair)).collect();
    for (&extra, ExtraPlan { matrix, .. }) in &sorted.extras {
        let pair = extra.site().and_then(|site| pairs.get(&Target::Site(site)));
        let needs_pair =
            matches!(extra, Extra::LoraBias(_) | Extra::Magnitude(_) | Extra::Diagonal(_) | Extra::BaseCopy(_));
        let tensor = || matrix.tensor.to_string();
        let Some(pair) = pair else {
            if needs_pair {
                let place = extra.to_string();
                reasons.push(plan.file, Reason::WithoutPair { tensor: tensor(), place });
            }
            continue;
        };
        let is_embedding = extra.site() == Some(Site::Vocabulary { module: Module::EmbedTokens });
        let (out_features, in_features) = (pair.b.shape[0], pair.a_shape()[1]);
        let expected = match extra {
            Extra::LoraBias(_) | Extra::Magnitude(_) | Extra::Bias(_) => [1, out_features],
            Extra::Diagonal(_) => [1, pair.num_rows()],
            Extra::BaseCopy(_) | Extra::Weight(_) if is_embedding => [in_features, out_features],
            Extra::BaseCopy(_) | Extra::Weight(_) => [out_features, in_features],
            _ => continue,
        };
        if matrix.shape != expected {
            let (found, pair) = (matrix.shape, pair.a.tensor.to_string());
            reasons.push(plan.file, Reason::ExtraSize { tensor: tensor(), found, expected, pair });
        }
    }
}

fn plan_pair(
    target: Target,
    halves: Halves<'_>,
    plan: &FilePlan,
    blocks: Option<&BlockDiagonal>,
    reasons: &mut Reasons,
) -> Option<PairPlan> {
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
    let blocks = blocks.and_then(|blocks| blocks.half(&halves.path).map(|half| (half, blocks.num_blocks)));
    let pair = PairPlan { target, path: halves.path, a: a?, b: b?, blocks };
    if let Some((half, num_blocks)) = pair.blocks {
        let stored = if half == Half::A { &pair.a } else { &pair.b };
        if !stored.shape[0].is_multiple_of(num_blocks) {
            let (tensor, rows) = (stored.tensor.to_string(), stored.shape[0]);
            reasons.push(plan.file, Reason::UnevenBlocks { tensor, rows, num_blocks });
            return None;
        }
    }
    let [rank, _] = pair.a.shape;
    if rank != pair.b_shape()[1] {
        let (a, b) = (shown(&pair.a.tensor), shown(&pair.b.tensor));
        let mismatch = Reason::PairMismatch { a, a_shape: pair.a_shape(), b, b_shape: pair.b_shape() };
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
        "F8_E4M3" => FileDtype::F8E4m3,
        "F8_E5M2" => FileDtype::F8E5m2,
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
