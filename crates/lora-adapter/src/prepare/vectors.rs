//! Gains, shifts and norms: what an adapter changes besides adding its deltas.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::thread;

use lora_math::{Module, Site};

use super::base::{BaseWeights, SiteVectors};
use super::{AdapterVectors, Misfit};
use crate::adapter::Adapter;
use crate::extras::Extra;
use crate::matrix::Matrix;
use crate::pair::LoraPair;

/// Elements of the base weight that a thread reads at a time.
const BLOCK_ELEMENTS: usize = 1 << 18;

/// Works out the vectors, and multiplies B of every pair with a gain by it.
pub(super) fn of(
    adapter: &Adapter,
    base: &dyn BaseWeights,
    pairs: &mut BTreeMap<Site, LoraPair>,
    reasons: &mut Vec<Misfit>,
) -> AdapterVectors {
    let mut vectors = AdapterVectors::default();
    let mut sites = BTreeSet::new();
    for (extra, matrix) in adapter.extras() {
        let tensor = || matrix.tensor().to_owned();
        match extra {
            Extra::Norm(site) => match base.norm(site) {
                None => reasons.push(Misfit::NotInBase { extra, tensor: tensor() }),
                Some(norm) if norm.len() != matrix.num_elements() => {
                    let (expected, found) = (norm.len(), matrix.num_elements());
                    reasons.push(Misfit::ExtraLength { extra, expected, found, tensor: tensor() });
                }
                Some(_) => match in_range(extra, matrix) {
                    Ok(norm) => drop(vectors.norms.insert(site, norm.into())),
                    Err(reason) => reasons.push(reason),
                },
            },
            Extra::BaseCopy(site) => reasons.extend(compare(base, extra, site, matrix)),
            Extra::LoraBias(site) | Extra::Magnitude(site) | Extra::Bias(site) => drop(sites.insert(site)),
            _ => {}
        }
    }
    for site in sites {
        match site_vectors(adapter, base, site, pairs.get(&site)) {
            Ok(SiteVectors { gain: None, shift: None }) => {}
            Ok(found) => {
                if let (Some(gain), Some(pair)) = (&found.gain, pairs.get_mut(&site)) {
                    match scaled_rows(pair.b(), gain) {
                        Ok(b) => *pair = pair.clone().with_b(b),
                        Err(error) => reasons.push(Misfit::OutOfRange { site, error }),
                    }
                }
                vectors.sites.insert(site, found);
            }
            Err(reason) => reasons.push(reason),
        }
    }
    vectors
}

/// Gain and shift of one site, by the formula of [`SiteVectors`]. `whole` is the pair on the base as it is, where the
/// adapter's own may be one on a changed base: magnitudes scale the sum that the changed base gives.
fn site_vectors(
    adapter: &Adapter,
    base: &dyn BaseWeights,
    site: Site,
    whole: Option<&LoraPair>,
) -> Result<SiteVectors, Misfit> {
    let lora_bias = adapter.extra(Extra::LoraBias(site));
    let magnitude = adapter.extra(Extra::Magnitude(site));
    let trained = adapter.extra(Extra::Bias(site));
    if lora_bias.is_some() && magnitude.is_some() {
        return Err(Misfit::DoraWithBias { site });
    }
    let base_bias = base.bias(site);
    if let Some(trained) = trained {
        let (extra, tensor) = (Extra::Bias(site), trained.tensor().to_owned());
        match &base_bias {
            None => return Err(Misfit::NotInBase { extra, tensor }),
            Some(bias) if bias.len() != trained.num_elements() => {
                let (expected, found) = (bias.len(), trained.num_elements());
                return Err(Misfit::ExtraLength { extra, expected, found, tensor });
            }
            Some(_) => {}
        }
    }
    let gain = match (magnitude, whole) {
        (Some(magnitude), Some(pair)) => Some(gains(base, site, pair, magnitude)?),
        _ => None,
    };
    let trained = trained.map(|bias| in_range(Extra::Bias(site), bias)).transpose()?;
    let lora_bias = lora_bias.map(|bias| in_range(Extra::LoraBias(site), bias)).transpose()?;
    let scaling = adapter.pair(site).map_or(0.0, |pair| f64::from(pair.scaling()));
    let len = [&base_bias, &trained, &lora_bias].into_iter().flatten().map(Vec::len).max().unwrap_or_default();
    let at = |vector: &Option<Vec<f32>>, index: usize| vector.as_ref().map(|vector| f64::from(vector[index]));
    let shift = (0..len).map(|index| {
        let base_bias = at(&base_bias, index).unwrap_or(0.0);
        let gain = gain.as_ref().map_or(1.0, |gain| f64::from(gain[index]));
        let bias = at(&trained, index).unwrap_or(base_bias);
        (bias - gain * base_bias + scaling * at(&lora_bias, index).unwrap_or(0.0)) as f32
    });
    let shift: Arc<[f32]> = shift.collect();
    let vectors = [gain.as_deref().unwrap_or_default(), &shift];
    if let Some(feature) = vectors.iter().find_map(|vector| vector.iter().position(|value| !value.is_finite())) {
        return Err(Misfit::VectorOutOfRange { site, feature });
    }
    Ok(SiteVectors { gain, shift: shift.iter().any(|value| *value != 0.0).then_some(shift) })
}

/// A vector as f32; an f64 can be beyond its range.
fn in_range(extra: Extra, vector: &Matrix) -> Result<Vec<f32>, Misfit> {
    let values = vector.to_f32();
    match values.iter().position(|value| !value.is_finite()) {
        Some(index) => Err(Misfit::ExtraOutOfRange { extra, index, tensor: vector.tensor().to_owned() }),
        None => Ok(values),
    }
}

/// `magnitude / ‖W + s·B·A‖`, by output row; of an embedding by hidden column (Liu et al. 2024, "DoRA").
fn gains(base: &dyn BaseWeights, site: Site, pair: &LoraPair, magnitude: &Matrix) -> Result<Arc<[f32]>, Misfit> {
    let squares = if site == (Site::Vocabulary { module: Module::EmbedTokens }) {
        column_squares(base, site, pair)
    } else {
        row_squares(base, site, pair)
    };
    let squares = squares.ok_or(Misfit::BadBase { site, message: "it has too few rows" })?;
    let tensor = || magnitude.tensor().to_owned();
    if let Some(feature) = squares.iter().position(|square| *square == 0.0) {
        return Err(Misfit::ZeroNorm { site, feature, tensor: tensor() });
    }
    Ok(magnitude.to_f32().iter().zip(&squares).map(|(m, square)| (f64::from(*m) / square.sqrt()) as f32).collect())
}

/// Squared norms of the rows of `W + s·B·A`.
fn row_squares(base: &dyn BaseWeights, site: Site, pair: &LoraPair) -> Option<Vec<f64>> {
    let (a, b, width, rank) = (pair.a().to_f32(), pair.b().to_f32(), pair.in_features(), pair.rank());
    let mut squares = vec![0.0; pair.out_features()];
    let blocks = in_blocks(base, site, width, squares.len(), |first_row, rows| {
        let square = |(index, row): (usize, &mut [f32])| {
            let b = &b[(first_row + index) * rank..(first_row + index + 1) * rank];
            for (a, b) in a.chunks_exact(width).zip(b) {
                add_scaled(row, a, pair.scaling() * b);
            }
            row.iter().map(|value| f64::from(*value) * f64::from(*value)).sum()
        };
        rows.chunks_exact_mut(width).enumerate().map(square).collect::<Vec<f64>>()
    })?;
    for (first_row, found) in blocks {
        squares[first_row..first_row + found.len()].copy_from_slice(&found);
    }
    Some(squares)
}

/// Squared norms of the columns of `E + s·(B·A)ᵀ`.
fn column_squares(base: &dyn BaseWeights, site: Site, pair: &LoraPair) -> Option<Vec<f64>> {
    let (width, vocab_size) = (pair.out_features(), pair.in_features());
    // Rows of Bᵀ, so that a token's delta is a sum of rows.
    let (a, b) = (pair.a().to_f32(), pair.b().transposed().to_f32());
    let mut blocks = in_blocks(base, site, width, vocab_size, |first_row, rows| {
        let mut squares = vec![0.0; width];
        for (index, row) in rows.chunks_exact_mut(width).enumerate() {
            for (k, b) in b.chunks_exact(width).enumerate() {
                add_scaled(row, b, pair.scaling() * a[k * vocab_size + first_row + index]);
            }
            squares.iter_mut().zip(row).for_each(|(sum, value)| *sum += f64::from(*value) * f64::from(*value));
        }
        squares
    })?;
    // In the order of rows, so that the sums do not depend on threads.
    blocks.sort_by_key(|(first_row, _)| *first_row);
    let mut squares = vec![0.0; width];
    for (_, found) in blocks {
        squares.iter_mut().zip(found).for_each(|(sum, found)| *sum += found);
    }
    Some(squares)
}

fn add_scaled(row: &mut [f32], other: &[f32], factor: f32) {
    row.iter_mut().zip(other).for_each(|(value, other)| *value += factor * other);
}

/// Runs `work` for each index below `num_threads`, on threads of their own as far as the system gives any, else here.
pub(super) fn on_threads<T: Send>(num_threads: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let work = &work;
        let (mut threads, mut left) = (Vec::new(), vec![0]);
        for index in 1..num_threads {
            match thread::Builder::new().spawn_scoped(scope, move || work(index)) {
                Ok(thread) => threads.push(thread),
                Err(_) => left.push(index),
            }
        }
        let mut results: Vec<T> = left.into_iter().map(work).collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        results.extend(joined.map(|result| result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))));
        results
    })
}

/// Runs `f` on blocks of rows of a base weight, on all processors; each result with its first row. None where the base
/// lacks a row.
fn in_blocks<T: Send>(
    base: &dyn BaseWeights,
    site: Site,
    width: usize,
    num_rows: usize,
    f: impl Fn(usize, &mut [f32]) -> T + Sync,
) -> Option<Vec<(usize, T)>> {
    let block_rows = (BLOCK_ELEMENTS / width).max(1);
    let num_threads = thread::available_parallelism().map_or(1, |threads| threads.get());
    let num_blocks = num_rows.div_ceil(block_rows);
    let work = |thread: usize| {
        let mut rows = vec![0.0; block_rows * width];
        let blocks = (thread..num_blocks).step_by(num_threads);
        blocks
            .map(|block| {
                let first_row = block * block_rows;
                let rows = &mut rows[..(num_rows - first_row).min(block_rows) * width];
                base.read_rows(site, first_row, rows).then(|| (first_row, f(first_row, rows)))
            })
            .collect::<Option<Vec<_>>>()
    };
    let parts = on_threads(num_threads.min(num_blocks), work);
    Some(parts.into_iter().collect::<Option<Vec<_>>>()?.into_iter().flatten().collect())
}

/// The matrix with each row multiplied by its factor, in f32.
fn scaled_rows(matrix: &Matrix, factors: &[f32]) -> Result<Matrix, crate::matrix::MatrixError> {
    let mut values = matrix.to_f32();
    for (row, factor) in values.chunks_exact_mut(matrix.cols()).zip(factors) {
        row.iter_mut().for_each(|value| *value *= factor);
    }
    Ok(Matrix::from_f32(matrix.rows(), matrix.cols(), &values)?.renamed(matrix.tensor().into()))
}

/// How far a row of the base may be from its copy, relative to the copy: engines compute with narrowed or quantised weights,
/// of 4 bits at the least, and the copy is of the weights as they were trained.
const COPY_TOLERANCE: f64 = 0.2;

/// What is wrong with a copy of the base weight; none where it is one.
fn compare(base: &dyn BaseWeights, extra: Extra, site: Site, matrix: &Matrix) -> Option<Misfit> {
    let tensor = || matrix.tensor().to_owned();
    let features = base.shape().features(site)?;
    let expected = match site {
        Site::Vocabulary { module: Module::EmbedTokens } => [features.in_features, features.out_features],
        _ => [features.out_features, features.in_features],
    };
    let found = [matrix.rows(), matrix.cols()];
    if found != expected {
        return Some(Misfit::ResizedVocabulary { extra, expected, found, tensor: tensor() });
    }
    let width = matrix.cols();
    let blocks = in_blocks(base, site, width, matrix.rows(), |first_row, rows| {
        let copy = matrix.row_f32(first_row..first_row + rows.len() / width);
        let same = |(index, (base, copy)): (usize, (&[f32], &[f32]))| {
            let square = |value: f64| value * value;
            let apart = base.iter().zip(copy).map(|(base, copy)| square(f64::from(*base) - f64::from(*copy)));
            let length = copy.iter().map(|copy| square(f64::from(*copy)));
            let same = apart.sum::<f64>() <= square(COPY_TOLERANCE) * length.sum::<f64>();
            (!same).then_some(first_row + index)
        };
        rows.chunks_exact(width).zip(copy.chunks_exact(width)).enumerate().find_map(same)
    });
    match blocks {
        None => Some(Misfit::BadBase { site, message: "it has too few rows" }),
        Some(blocks) => {
            let row = blocks.into_iter().filter_map(|(_, row)| row).min()?;
            Some(Misfit::OtherBase { extra, row, tensor: tensor() })
        }
    }
}
