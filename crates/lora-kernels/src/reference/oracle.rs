//! The same results in double precision, for checks: no result of a back end is rounded on the way.
//!
//! These functions allocate what they return and check nothing beyond what the back ends check.

use lora_math::StepRows;

use super::entry_slot;
use crate::activations::Rows;
use crate::error::KernelError;
use crate::table::{PairView, SiteRef, SlotTable};
use crate::weights::WeightView;

/// `Σ_k x[row][k] · weight[n][k] + bias[n]`, row-major `[rows, out_features]`.
pub fn matmul(x: Rows<'_>, weight: &WeightView<'_>, bias: Option<&[f32]>) -> Vec<f64> {
    let mut y = Vec::new();
    for row in 0..x.num_rows() {
        for n in 0..weight.features().out_features {
            let products = x.row(row).iter().enumerate().map(|(k, &x)| f64::from(x) * f64::from(weight.value(n, k)));
            y.push(products.sum::<f64>() + bias.map_or(0.0, |bias| f64::from(bias[n])));
        }
    }
    y
}

/// What the adapters of a step add to the output of one site: for each row Σ over its entries of
/// `scale · scaling · B·A·x[row]`, row-major `[rows, out_features]`, padding rows included.
pub fn step_delta(
    table: &SlotTable<'_>,
    rows: &StepRows,
    site: &SiteRef,
    x: Rows<'_>,
) -> Result<Vec<f64>, KernelError> {
    let out_features = site.features.out_features;
    let mut y = vec![0.0; rows.row_slots().len() * out_features];
    for row in 0..rows.num_rows() {
        for &entry in rows.row_entries(row) {
            let Some(pair) = table.pair(entry_slot(rows, entry), site)? else { continue };
            let factor = f64::from(rows.entries()[entry as usize].scale) * f64::from(pair.scaling);
            let h = shrink(&pair, x.row(row));
            for (n, y) in y[row * out_features..][..out_features].iter_mut().enumerate() {
                *y += factor * expand(&pair, &h, n);
            }
        }
    }
    Ok(y)
}

fn shrink(pair: &PairView<'_>, x: &[f32]) -> Vec<f64> {
    // SAFETY: r < rank and k < in_features, which is the width of x.
    let value = |r: usize, k: usize| f64::from(unsafe { pair.a.value(r * x.len() + k) });
    (0..pair.rank).map(|r| x.iter().enumerate().map(|(k, &x)| f64::from(x) * value(r, k)).sum()).collect()
}

fn expand(pair: &PairView<'_>, h: &[f64], n: usize) -> f64 {
    // SAFETY: n < out_features and r < rank, which is the length of h.
    h.iter().enumerate().map(|(r, h)| h * f64::from(unsafe { pair.b.value(n * pair.rank + r) })).sum()
}
