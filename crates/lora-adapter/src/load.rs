//! From the files of a PEFT directory to an [`Adapter`], collecting every reason on the way.

use std::collections::BTreeMap;
use std::sync::Arc;

use lora_math::Site;

use crate::adapter::Adapter;
use crate::config::{CONFIG_FILE, Config, Expected, MAX_CONFIG_BYTES};
use crate::error::{LoadError, Reasons, shown};
use crate::feature::Feature;
use crate::keys::{self, Dialect, Half, Kind};
use crate::matrix::FileDtype;
use crate::notes::Note;
use crate::pair::{LoraPair, MAX_RANK};
use crate::reason::Reason;
use crate::shards::Joined;
use crate::source::AdapterSource;
use crate::tensor_file::{FilePlan, TensorPlan};
use crate::values::{self, MatrixPlan};
use crate::weights;

/// A pair whose shapes agree and whose values are not read yet.
struct PairPlan {
    site: Site,
    path: String,
    a: MatrixPlan,
    b: MatrixPlan,
}

impl PairPlan {
    fn rank(&self) -> usize {
        self.a.shape[0]
    }
}

/// Reads the adapter in `source`, or the only one in a folder below it: there PEFT saves an adapter with a name.
pub(crate) fn open(source: &AdapterSource) -> Result<Adapter, LoadError> {
    let mut reasons = Reasons::default();
    let mut notes = Vec::new();
    let is_here = source.holds(CONFIG_FILE) || weights::are_in(source);
    let inner = if is_here { Ok(None) } else { source.only_folder_with(CONFIG_FILE) };
    let inner = inner.unwrap_or_else(|reason| {
        reasons.push(None, reason);
        None
    });
    if !reasons.is_empty() {
        return Err(reasons.into_error(Some(source.directory())));
    }
    let source = match &inner {
        Some((folder, inner)) => {
            notes.push(Note::NamedFolder { folder: folder.clone() });
            inner
        }
        None => source,
    };
    let config = match source.read(CONFIG_FILE, MAX_CONFIG_BYTES) {
        Ok(bytes) => Config::parse(&bytes, &mut reasons, &mut notes),
        Err(reason) => {
            reasons.push(CONFIG_FILE, reason);
            None
        }
    };
    let mut pairs = BTreeMap::new();
    if let Some((mut file, plan)) = weights::open(source, &mut reasons, &mut notes) {
        let planned = plan_pairs(&plan, &mut reasons, &mut notes);
        let alphas = config.as_ref().and_then(|config| alphas(config, &plan, &planned, &mut reasons, &mut notes));
        pairs = read_pairs(&mut file, &plan, planned, config.as_ref().zip(alphas), &mut reasons);
    }
    reasons.into_result(Some(source.directory()))?;
    count_alphas(&pairs, &mut notes);
    Ok(Adapter::new(pairs, notes, config.map(|config| config.origin).unwrap_or_default()))
}

/// Halves of one site while tensors are sorted.
#[derive(Default)]
struct Halves<'a> {
    path: String,
    a: Option<&'a TensorPlan>,
    b: Option<&'a TensorPlan>,
}

/// Sorts every tensor of the file by what it is. Each ends in a pair, in a note or in a reason.
fn plan_pairs<'a>(plan: &'a FilePlan, reasons: &mut Reasons, notes: &mut Vec<Note>) -> Vec<PairPlan> {
    let mut sites: BTreeMap<Site, Halves<'a>> = BTreeMap::new();
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
            Kind::Half { site, half } => {
                key.dialects.iter().for_each(|dialect| *naming.entry(*dialect).or_default() += 1);
                let halves = sites.entry(site).or_default();
                halves.path = key.path;
                let place = if half == Half::A { &mut halves.a } else { &mut halves.b };
                if let Some(first) = place.replace(tensor) {
                    let (first, second) = (shown(&first.name), shown(name));
                    reasons.push(plan.file, Reason::AmbiguousTensor { site, first, second });
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
    let nothing = sites.is_empty() && unsupported.is_empty() && dialects.is_empty();
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
    sites.into_iter().filter_map(|(site, halves)| plan_pair(site, halves, plan, reasons)).collect()
}

fn plan_pair(site: Site, halves: Halves<'_>, plan: &FilePlan, reasons: &mut Reasons) -> Option<PairPlan> {
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
    let pair = PairPlan { site, path: halves.path, a: a?, b: b? };
    let [rank, _] = pair.a.shape;
    if rank != pair.b.shape[1] {
        let (a, b) = (shown(&pair.a.tensor), shown(&pair.b.tensor));
        let mismatch = Reason::PairMismatch { a, a_shape: pair.a.shape, b, b_shape: pair.b.shape };
        reasons.push(plan.file, mismatch);
        return None;
    }
    if rank > MAX_RANK {
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

/// The alpha of each pair, once the ranks of all of them agree with the config by one rule.
fn alphas(
    config: &Config,
    plan: &FilePlan,
    pairs: &[PairPlan],
    reasons: &mut Reasons,
    notes: &mut Vec<Note>,
) -> Option<Vec<f64>> {
    let paths: Vec<&str> = pairs.iter().map(|pair| pair.path.as_str()).collect();
    let expected: Vec<Expected> = paths.iter().map(|path| config.expected(path)).collect();
    if pairs.iter().zip(&expected).all(|(pair, expected)| pair.rank() == expected.rank) {
        config.remark(&paths, &expected, notes);
        return Some(expected.iter().map(|expected| expected.alpha).collect());
    }
    if let Some(older) = config.expected_before_0_14(&paths)
        && pairs.iter().zip(&older).all(|(pair, (rank, _))| pair.rank() == *rank)
    {
        notes.push(Note::OldPatternRule);
        return Some(older.into_iter().map(|(_, alpha)| alpha).collect());
    }
    for (pair, Expected { rank, rank_source, .. }) in pairs.iter().zip(expected) {
        if pair.rank() != rank {
            let tensor = pair.a.tensor.to_string();
            let disagrees =
                Reason::RankDisagrees { tensor, found: pair.rank(), expected: rank, source_field: rank_source };
            reasons.push(plan.file, disagrees);
        }
    }
    None
}

/// Reads the values of every pair. Without alphas the adapter is refused already, and the values are read for their own
/// reasons.
fn read_pairs(
    file: &mut Joined,
    plan: &FilePlan,
    planned: Vec<PairPlan>,
    scales: Option<(&Config, Vec<f64>)>,
    reasons: &mut Reasons,
) -> BTreeMap<Site, LoraPair> {
    let plans: Vec<MatrixPlan> = planned.iter().flat_map(|pair| [pair.a.clone(), pair.b.clone()]).collect();
    let mut matrices = match values::read(file, &plans) {
        Ok(matrices) => matrices.into_iter(),
        Err(reason) => {
            reasons.push(plan.file, reason);
            return BTreeMap::new();
        }
    };
    let mut pairs = BTreeMap::new();
    for (index, PairPlan { site, .. }) in planned.into_iter().enumerate() {
        let mut next = || {
            let matrix = matrices.next()?;
            matrix.map_err(|error| reasons.push(plan.file, Reason::Matrix(error))).ok()
        };
        let (a, b) = (next(), next());
        let alpha = scales.as_ref().and_then(|(config, alphas)| Some((*alphas.get(index)?, config.rule)));
        if let (Some(a), Some(b), Some((alpha, rule))) = (a, b, alpha) {
            match LoraPair::new(a, b, alpha, rule) {
                Ok(pair) => drop(pairs.insert(site, pair)),
                Err(reason) => reasons.push(plan.file, reason),
            }
        }
    }
    pairs
}

fn count_alphas(pairs: &BTreeMap<Site, LoraPair>, notes: &mut Vec<Note>) {
    let count = |wanted: fn(f64) -> bool| pairs.values().filter(|pair| wanted(pair.alpha())).count();
    match count(|alpha| alpha == 0.0) {
        0 => {}
        num_pairs => notes.push(Note::ZeroAlpha { num_pairs }),
    }
    match count(|alpha| alpha < 0.0) {
        0 => {}
        num_pairs => notes.push(Note::NegativeAlpha { num_pairs }),
    }
}
