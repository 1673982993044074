//! From the files of a PEFT directory to an [`Adapter`], collecting every reason on the way.

use std::collections::BTreeMap;

use lora_math::Site;
use lora_math::scaling::ScalingRule;

use crate::adapter::Adapter;
use crate::blocks;
use crate::config::{CONFIG_FILE, Config, Expected, MAX_CONFIG_BYTES, Tool};
use crate::error::{LoadError, Reasons, shown};
use crate::experts::{self, Experts, Parameter};
use crate::extras::{Extra, Settings};
use crate::gguf::{self, Opened};
use crate::keys::Half;
use crate::marks::Columns;
use crate::matrix::{Matrix, MatrixError};
use crate::modules::Target;
use crate::notes::Note;
use crate::pair::LoraPair;
use crate::reason::Reason;
use crate::shards::Joined;
use crate::sort::{self, PairPlan, Sorted};
use crate::source::AdapterSource;
use crate::tensor_file::FilePlan;
use crate::unpack::Packed;
use crate::values::{self, MatrixPlan};
use crate::weights;

/// More than the pairs of stacked experts in any model: a small file could claim millions.
pub(crate) const MAX_EXPERT_PAIRS: usize = 1 << 18;

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
        return Err(reasons.into_error(Some(&source.path())));
    }
    let source = match &inner {
        Some((folder, inner)) => {
            notes.push(Note::NamedFolder { folder: folder.clone() });
            inner
        }
        None => source,
    };
    let Parts { config, weights, awaits_heads } = parts(source, &mut reasons, &mut notes);
    let mut values = Values::default();
    let mut gate_up = None;
    let mut settings = Settings::default();
    if let Some((mut file, plan)) = weights {
        let blocks = config.as_ref().and_then(|config| config.declared.blocks.as_ref());
        let mut sorted = sort::sort(&plan, blocks, &mut reasons, &mut notes);
        let marks = config.as_ref().map(|config| &config.marks);
        let experts =
            marks.and_then(|marks| experts::resolve(marks, &mut sorted.pairs, plan.file, &mut reasons, &mut notes));
        let scales = config.as_ref().and_then(|config| scales(config, &plan, &sorted.pairs, &mut reasons, &mut notes));
        let layout = experts.as_ref().zip(scales.as_ref());
        let layout = layout.filter(|(_, scales)| check_experts(&sorted.pairs, scales, &plan, &mut reasons));
        gate_up = layout.and_then(|(experts, _)| experts.is_fused.then_some(experts.order));
        if let Some(config) = &config {
            settings = config.declared.check(&sorted, &plan, &mut reasons);
        }
        values = read_values(&mut file, &plan, sorted, layout, &mut reasons);
    }
    reasons.into_result(Some(&source.path()))?;
    count_alphas(&values.pairs, &mut notes);
    let origin = config.map(|config| config.origin).unwrap_or_default();
    if awaits_heads {
        notes.push(Note::HeadsAwaited);
    }
    let adapter = Adapter::new(values.pairs, notes, origin).carrying(values.extras, settings);
    Ok(adapter.fused_as(gate_up).awaiting_heads(awaits_heads))
}

/// What an adapter is read from: its config and its weights, out of two files or of one.
struct Parts {
    config: Option<Config>,
    weights: Option<(Joined, FilePlan)>,
    /// Rows of q and k are in an order that only head counts tell.
    awaits_heads: bool,
}

fn parts(source: &AdapterSource, reasons: &mut Reasons, notes: &mut Vec<Note>) -> Parts {
    let opened = match weights::gguf_file(source) {
        Ok(None) => None,
        Ok(Some(name)) => Some(gguf::open(source, &name, reasons, notes)),
        Err(reason) => {
            reasons.push(None, reason);
            Some(None)
        }
    };
    if let Some(opened) = opened {
        let awaits_heads = opened.as_ref().is_some_and(|opened| opened.awaits_heads);
        let (config, weights) = opened.map(|Opened { config, file, plan, .. }| (config, (file, plan))).unzip();
        return Parts { config, weights, awaits_heads };
    }
    let config = match source.read(CONFIG_FILE, MAX_CONFIG_BYTES) {
        Ok(bytes) => Config::parse(&bytes, reasons, notes),
        Err(reason) => {
            reasons.push(CONFIG_FILE, reason);
            None
        }
    };
    let weights = weights::open(source, config.as_ref(), reasons, notes);
    Parts { config, weights, awaits_heads: false }
}

/// What the config gives for each pair.
struct Scales {
    /// Rank and alpha, in the order of the pairs.
    pairs: Vec<(usize, f64)>,
    rule: ScalingRule,
}

/// Rank and alpha of each pair, once the ranks of all of them agree with the config by one rule.
fn scales(
    config: &Config,
    plan: &FilePlan,
    pairs: &[PairPlan],
    reasons: &mut Reasons,
    notes: &mut Vec<Note>,
) -> Option<Scales> {
    let scales = |pairs| Scales { pairs, rule: config.rule };
    if config.tool == Tool::Gguf {
        return Some(scales(pairs.iter().map(|pair| (pair.num_rows(), config.alpha)).collect()));
    }
    let paths: Vec<&str> = pairs.iter().map(|pair| pair.path.as_str()).collect();
    let expected: Vec<Expected> = paths.iter().map(|path| config.expected(path)).collect();
    if pairs.iter().zip(&expected).all(|(pair, expected)| pair.allows_rank(expected.rank)) {
        config.remark(&paths, &expected, notes);
        return Some(scales(expected.iter().map(|expected| (expected.rank, expected.alpha)).collect()));
    }
    // Stacked experts are younger than the older rule.
    let is_old = !pairs.iter().any(|pair| matches!(pair.target, Target::Stacked { .. }));
    if let Some(older) = config.expected_before_0_14(&paths).filter(|_| is_old)
        && pairs.iter().zip(&older).all(|(pair, (rank, _))| pair.allows_rank(*rank))
    {
        notes.push(Note::OldPatternRule);
        return Some(scales(older));
    }
    for (pair, Expected { rank, rank_source, .. }) in pairs.iter().zip(expected) {
        if pair.allows_rank(rank) {
            continue;
        }
        let (tensor, found) = (pair.a.tensor.to_string(), pair.num_rows());
        reasons.push(
            plan.file,
            match pair.target {
                Target::Stacked { .. } => Reason::ExpertRows { tensor, rows: found, rank, source_field: rank_source },
                _ => Reason::RankDisagrees { tensor, found, expected: rank, source_field: rank_source },
            },
        );
    }
    None
}

/// Whether all stacked parameters hold equally many experts, and not more than any model.
fn check_experts(pairs: &[PairPlan], scales: &Scales, plan: &FilePlan, reasons: &mut Reasons) -> bool {
    let stacked = pairs.iter().zip(&scales.pairs).filter(|(pair, _)| matches!(pair.target, Target::Stacked { .. }));
    let mut counts = stacked.map(|(pair, (rank, _))| (pair, *rank, pair.num_rows() / rank));
    let Some((first, _, expected)) = counts.next() else { return true };
    let (mut num_experts, mut agree) = (expected, true);
    for (pair, rank, found) in counts {
        num_experts += found;
        if found != expected {
            agree = false;
            let (tensor, other) = (pair.a.tensor.to_string(), first.a.tensor.to_string());
            let rows = pair.num_rows();
            reasons.push(plan.file, Reason::ExpertCount { tensor, rows, rank, found, expected, other });
        }
    }
    if num_experts > MAX_EXPERT_PAIRS {
        reasons.push(plan.file, Reason::TooManyExperts { found: num_experts, max: MAX_EXPERT_PAIRS });
    }
    agree && num_experts <= MAX_EXPERT_PAIRS
}

/// What was read.
#[derive(Default)]
struct Values {
    pairs: BTreeMap<Site, LoraPair>,
    extras: BTreeMap<Extra, Matrix>,
}

/// Reads the values of every pair and of every tensor beside them. Without a layout the adapter is refused already, and the
/// values are read for their own reasons.
fn read_values(
    file: &mut Joined,
    plan: &FilePlan,
    Sorted { pairs: planned, extras }: Sorted,
    layout: Option<(&Experts, &Scales)>,
    reasons: &mut Reasons,
) -> Values {
    let plans = planned.iter().flat_map(|pair| [&pair.a, &pair.b]);
    let plans: Vec<MatrixPlan> = plans.chain(extras.values().map(|extra| &extra.matrix)).cloned().collect();
    let mut matrices = match values::read(file, &plans) {
        Ok(matrices) => matrices,
        Err(reason) => {
            reasons.push(plan.file, reason);
            return Values::default();
        }
    };
    let beside = matrices.split_off(2 * planned.len());
    let pairs = read_pairs(plan, planned, matrices, layout, reasons);
    let beside = extras.into_keys().zip(beside).filter_map(|(extra, matrix)| {
        let matrix = matrix.map_err(|error| reasons.push(plan.file, Reason::Matrix(error))).ok()?;
        Some((extra, matrix))
    });
    Values { extras: beside.collect(), pairs }
}

fn read_pairs(
    plan: &FilePlan,
    planned: Vec<PairPlan>,
    matrices: Vec<Result<Matrix, MatrixError>>,
    layout: Option<(&Experts, &Scales)>,
    reasons: &mut Reasons,
) -> BTreeMap<Site, LoraPair> {
    let mut matrices = matrices.into_iter();
    let mut pairs: BTreeMap<Site, LoraPair> = BTreeMap::new();
    for (index, planned) in planned.into_iter().enumerate() {
        let mut next = || {
            let matrix = matrices.next()?;
            matrix.map_err(|error| reasons.push(plan.file, Reason::Matrix(error))).ok()
        };
        let (Some(a), Some(b), Some((experts, scales))) = (next(), next(), layout) else { continue };
        let Some(&(rank, alpha)) = scales.pairs.get(index) else { continue };
        let sites = match on_diagonal(&planned, a, b).and_then(|(a, b)| sites(&planned, a, b, rank, experts)) {
            Ok(sites) => sites,
            Err(reason) => {
                reasons.push(plan.file, reason);
                continue;
            }
        };
        for (site, a, b) in sites {
            match LoraPair::new(a, b, alpha, scales.rule) {
                Ok(pair) => {
                    let second = shown(pair.a().tensor());
                    if let Some(first) = pairs.insert(site, pair) {
                        let first = shown(first.a().tensor());
                        reasons.push(plan.file, Reason::AmbiguousTensor { place: site.to_string(), first, second });
                    }
                }
                Err(reason) => reasons.push(plan.file, reason),
            }
        }
    }
    pairs
}

/// The pair with the blocks of its half on a diagonal, where it has any.
fn on_diagonal(planned: &PairPlan, a: Matrix, b: Matrix) -> Result<(Matrix, Matrix), Reason> {
    Ok(match planned.blocks {
        Some((Half::A, num_blocks)) => (blocks::on_diagonal(&a, num_blocks)?, b),
        Some((Half::B, num_blocks)) => (a, blocks::on_diagonal(&b, num_blocks)?),
        None => (a, b),
    })
}

/// A and B of each site of a pair.
fn sites(
    planned: &PairPlan,
    a: Matrix,
    b: Matrix,
    rank: usize,
    experts: &Experts,
) -> Result<Vec<(Site, Matrix, Matrix)>, Reason> {
    let Experts { parameters, swapped, order, .. } = experts;
    let (layer, first_expert, num_experts) = match planned.target {
        Target::Site(site) => return Ok(vec![(site, a, b)]),
        Target::ExpertGateUp { layer, expert } => (layer, expert, 1),
        Target::Stacked { layer, .. } => (layer, 0, a.rows() / rank),
    };
    let linear = (Parameter::GateUp, Columns::RankMajor);
    let (parameter, columns) = parameters.get(&planned.target).copied().unwrap_or(linear);
    let swapped = *swapped && parameters.contains_key(&planned.target);
    let rows = if swapped { a.cols() } else { b.rows() };
    if parameter == Parameter::GateUp && rows % 2 == 1 {
        return Err(Reason::OddGateUp { tensor: shown(b.tensor()), rows });
    }
    let (a, b, order) = (&a, &b, *order);
    let packed = Packed { a, b, layer, first_expert, num_experts, parameter, columns, swapped, order };
    Ok(packed.unpack()?)
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
