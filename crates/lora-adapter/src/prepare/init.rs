//! Initialisations that changed the base weights before training: done again, and added to the pair as more ranks.
//!
//! Where training began on `W - U·V` instead of W, the adapter on W is `s·B·A - U·V`, which is one plain pair of twice the
//! rank with the scaling inside. The singular vectors come from the eigenvectors of the smaller of `WᵀW` and `WWᵀ` in f64:
//! of a matrix of f32 that keeps every singular component that f32 can tell from its neighbours.

use std::collections::BTreeMap;
use std::thread;

use lora_math::{ScalingRule, Site};
use nalgebra::{DMatrix, SymmetricEigen};

use super::vectors::on_threads;
use super::{BaseWeights, Misfit, PrepareOptions};
use crate::adapter::Adapter;
use crate::extras::{BaseInit, Extra};
use crate::matrix::Matrix;
use crate::pair::{LoraPair, MAX_RANK};

/// Seconds of one decomposition by the cube of the smaller side: measured at side 576, 47 s of processor time for 150 of these
/// and 60 of side 192, and half as much again for machines that are slower.
const SECONDS_PER_CUBE: f64 = 2.5e-9;

/// The pairs on the base as it is.
pub(super) fn pairs(
    adapter: &Adapter,
    base: &dyn BaseWeights,
    options: &PrepareOptions,
    reasons: &mut Vec<Misfit>,
) -> BTreeMap<Site, LoraPair> {
    let plain = || adapter.pairs().map(|(site, pair)| (site, pair.clone())).collect();
    let init = adapter.settings().base_init;
    if init == BaseInit::Kept {
        return plain();
    }
    let before = reasons.len();
    for (site, pair) in adapter.pairs() {
        if matches!(site, Site::Vocabulary { .. } | Site::Expert { .. }) {
            reasons.push(Misfit::InitElsewhere { site, init });
        }
        if 2 * pair.rank() > MAX_RANK {
            reasons.push(Misfit::InitRank { site, rank: pair.rank(), max: MAX_RANK });
        }
    }
    let num_threads = thread::available_parallelism().map_or(1, |threads| threads.get());
    let cube = |(_, pair): (Site, &LoraPair)| (pair.in_features().min(pair.out_features()) as f64).powi(3);
    if init != BaseInit::Olora {
        // A decomposition runs on one thread, so no number of threads is faster than the largest of them.
        let (total, largest) =
            adapter.pairs().map(cube).fold((0.0, 0.0), |(sum, max): (f64, f64), cost| (sum + cost, max.max(cost)));
        let estimate_seconds = (total / num_threads as f64).max(largest) * SECONDS_PER_CUBE;
        if estimate_seconds > options.max_decomposition.as_secs_f64() {
            let (num_weights, limit_seconds) = (adapter.pairs().len(), options.max_decomposition.as_secs());
            reasons.push(Misfit::DecompositionTooLong { num_weights, estimate_seconds, limit_seconds });
        }
    }
    if reasons.len() > before {
        return plain();
    }
    let all: Vec<(Site, &LoraPair)> = adapter.pairs().collect();
    let work = |thread: usize| {
        let mine = all.iter().skip(thread).step_by(num_threads);
        mine.map(|(site, pair)| (*site, on_clean_base(adapter, base, *site, pair))).collect::<Vec<_>>()
    };
    let found = on_threads(num_threads.min(all.len()), work).into_iter().flatten();
    let mut pairs = BTreeMap::new();
    let mut failed = Vec::new();
    for (site, pair) in found {
        match pair {
            Ok(pair) => drop(pairs.insert(site, pair)),
            Err(reason) => failed.push((site, reason)),
        }
    }
    failed.sort_by_key(|(site, _)| *site);
    reasons.extend(failed.into_iter().map(|(_, reason)| reason));
    pairs
}

/// The pair that does on the clean base what `pair` does on the changed one.
fn on_clean_base(adapter: &Adapter, base: &dyn BaseWeights, site: Site, pair: &LoraPair) -> Result<LoraPair, Misfit> {
    let (rank, in_features, out_features) = (pair.rank(), pair.in_features(), pair.out_features());
    let mut rows = vec![0f32; out_features * in_features];
    if !base.read_rows(site, 0, &mut rows) {
        return Err(Misfit::BadBase { site, message: "it has too few rows" });
    }
    if rows.iter().any(|value| !value.is_finite()) {
        return Err(Misfit::BadBase { site, message: "it holds a number that is not finite" });
    }
    let w = DMatrix::from_row_iterator(out_features, in_features, rows.into_iter().map(f64::from));
    let init = adapter.settings().base_init;
    let smallest = out_features.min(in_features);
    let taken = rank.min(smallest);
    // u·v is what was taken out of W.
    let (u, v) = match init {
        BaseInit::Olora => {
            let message = "its first columns depend on each other, so what olora took out is not known";
            let q = orthonormal_columns(&w, taken).ok_or(Misfit::BadBase { site, message })?;
            let r = q.tr_mul(&w);
            (q * f64::from(pair.scaling()), r)
        }
        _ => {
            let gram = if in_features <= out_features { w.tr_mul(&w) } else { &w * w.transpose() };
            let message = "its decomposition finds no end";
            let vectors =
                extreme_vectors(gram, taken, init == BaseInit::Pissa).ok_or(Misfit::BadBase { site, message })?;
            if in_features <= out_features {
                (&w * &vectors, vectors.transpose())
            } else {
                let v = vectors.tr_mul(&w);
                (vectors, v)
            }
        }
    };
    let diagonal = adapter.extra(Extra::Diagonal(site)).map(Matrix::to_f32);
    let scaled =
        |k: usize| f64::from(pair.scaling()) * diagonal.as_ref().map_or(1.0, |diagonal| f64::from(diagonal[k]));
    let (old_a, old_b) = (pair.a().to_f32(), pair.b().to_f32());
    let mut a = old_a;
    for k in 0..taken {
        a.extend(v.row(k).iter().map(|value| *value as f32));
    }
    let mut b = Vec::with_capacity(out_features * (rank + taken));
    for row in 0..out_features {
        b.extend((0..rank).map(|k| (f64::from(old_b[row * rank + k]) * scaled(k)) as f32));
        b.extend((0..taken).map(|k| -u[(row, k)] as f32));
    }
    let out_of_range = |error| Misfit::OutOfRange { site, error };
    let a = Matrix::from_f32(rank + taken, in_features, &a).map_err(out_of_range)?.renamed(pair.a().tensor().into());
    let b = Matrix::from_f32(out_features, rank + taken, &b).map_err(out_of_range)?.renamed(pair.b().tensor().into());
    // Cannot fail: both have rank + taken, at most twice the rank, which was compared with the largest.
    LoraPair::new(a, b, 1.0, ScalingRule::Given).map_err(|_| Misfit::InitRank { site, rank, max: MAX_RANK })
}

/// Eigenvectors of a symmetric matrix, as columns: those of the largest or of the smallest eigenvalues.
fn extreme_vectors(gram: DMatrix<f64>, count: usize, largest: bool) -> Option<DMatrix<f64>> {
    let side = gram.nrows();
    // Far more steps than a matrix without NaN takes; a bound all the same.
    let SymmetricEigen { eigenvectors, eigenvalues } = SymmetricEigen::try_new(gram, f64::EPSILON, 100 * side + 1000)?;
    let mut order: Vec<usize> = (0..side).collect();
    order.sort_by(|a, b| eigenvalues[*a].total_cmp(&eigenvalues[*b]));
    if largest {
        order.reverse();
    }
    Some(eigenvectors.select_columns(&order[..count]))
}

/// The first columns of Q of a QR decomposition, by Gram-Schmidt done twice, which is as orthogonal as f64 allows; none where
/// a column depends on those before it, for then Q is any of many. The sign of a column cancels in Q·R.
fn orthonormal_columns(w: &DMatrix<f64>, count: usize) -> Option<DMatrix<f64>> {
    let mut q = DMatrix::zeros(w.nrows(), count);
    for k in 0..count {
        let mut column = w.column(k).into_owned();
        let length = column.norm();
        for _ in 0..2 {
            for earlier in 0..k {
                let along = q.column(earlier).dot(&column);
                column.axpy(-along, &q.column(earlier), 1.0);
            }
        }
        let rest = column.norm();
        if rest <= length * 1e-9 {
            return None;
        }
        q.set_column(k, &(column / rest));
    }
    Some(q)
}
