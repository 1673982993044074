//! What an operation must give, in double precision, and how far it may be from that.

use half::{bf16, f16};
use lora_math::SlotDtype;

use super::problem::Problem;

/// The nearest value of a type.
#[must_use]
pub fn round_to(dtype: SlotDtype, value: f64) -> f32 {
    match dtype {
        SlotDtype::F16 => f16::from_f64(value).to_f32(),
        SlotDtype::Bf16 => bf16::from_f64(value).to_f32(),
        _ => value as f32,
    }
}

/// Half of the distance between two values of a type, relative.
fn unit_roundoff(dtype: SlotDtype) -> f64 {
    match dtype {
        SlotDtype::F16 => 2f64.powi(-11),
        SlotDtype::Bf16 => 2f64.powi(-8),
        _ => 2f64.powi(-24),
    }
}

/// Slack for the f32 sums on the way, whatever their order: these cases add up to 14,336 products.
const SUM_SLACK: f64 = 3e-6;

/// Checks outputs `[site][rows with padding, out_features]` in `activations` against the problem: places to which nothing
/// is added have the bits that were there, and the others are as near to the exact result as roundings of h and of y, and
/// sums in f32, allow; each element, and the norm of the difference over the norm of the result.
///
/// # Errors
/// The site, row and column of the first element that is not, with its value and what it must be.
pub fn check(problem: &Problem, activations: SlotDtype, outputs: &[Vec<f32>]) -> Result<(), String> {
    let unit = unit_roundoff(activations);
    for (site, output) in outputs.iter().enumerate() {
        let width = problem.sites[site].features.out_features;
        if output.len() != problem.y[site].len() {
            return Err(format!("site {site}: {} values for {}", output.len(), problem.y[site].len()));
        }
        let (mut difference, mut size, mut slack, mut largest) = (0f64, 0f64, 0f64, 0f64);
        for row in 0..problem.num_rows() {
            let before = &problem.y[site][row * width..][..width];
            let after = &output[row * width..][..width];
            let Some(expected) = expected_row(problem, activations, site, row) else {
                let changed = before.iter().zip(after).position(|(before, after)| before.to_bits() != after.to_bits());
                match changed {
                    Some(n) => {
                        let (before, after) = (before[n], after[n]);
                        return Err(format!(
                            "site {site}, row {row}, column {n}: nothing is added, {before} became {after}"
                        ));
                    }
                    None => continue,
                }
            };
            for (n, (&found, element)) in after.iter().zip(&expected).enumerate() {
                let allowed = unit * element.value.abs() + element.slack;
                let off = (f64::from(found) - element.value).abs();
                if off.is_nan() || off > allowed {
                    let value = element.value;
                    return Err(format!(
                        "site {site}, row {row}, column {n}: {found}, expected {value} within {allowed:e}"
                    ));
                }
                difference += off * off;
                size += element.value * element.value;
                slack += element.slack * element.slack;
                largest = largest.max(element.value.abs());
            }
        }
        let norm = (difference / size.max(f64::MIN_POSITIVE)).sqrt();
        // Roundings of many elements are not all at their worst; of few they may be.
        if difference.sqrt() > 0.75 * unit * size.sqrt() + slack.sqrt() + unit * largest {
            return Err(format!(
                "site {site}: the difference has {norm:e} of the result's norm, the type's unit is {unit:e}"
            ));
        }
    }
    Ok(())
}

/// One element of a result, and what it may be off beside its own rounding.
struct Expected {
    value: f64,
    slack: f64,
}

/// A row of a site's output; none where nothing is added to it.
fn expected_row(problem: &Problem, activations: SlotDtype, site: usize, row: usize) -> Option<Vec<Expected>> {
    let width = problem.sites[site].features.out_features;
    let k = problem.case.in_features;
    let adapters = problem.rows.get(row).map_or(&[][..], Vec::as_slice);
    let uses: Vec<_> = adapters
        .iter()
        .map(|adapter| (&problem.pairs[adapter.slot.index()][site], adapter.scale))
        .filter(|(pair, _)| pair.rank > 0)
        .collect();
    if uses.is_empty() {
        return None;
    }
    let x = &problem.x[row * k..][..k];
    let before = &problem.y[site][row * width..][..width];
    let mut out: Vec<Expected> =
        before.iter().map(|&y| Expected { value: f64::from(y), slack: SUM_SLACK * f64::from(y.abs()) }).collect();
    for (pair, scale) in uses {
        let factor = f64::from(scale * pair.scaling);
        // h, and what it may be off: a sum in f32 that falls on the other side of a rounding, or none.
        let h: Vec<(f64, f64)> = (0..pair.rank)
            .map(|r| {
                let products = || x.iter().zip(&pair.a[r * k..][..k]).map(|(&x, &a)| f64::from(x) * f64::from(a));
                let (sum, size) = (products().sum::<f64>(), products().map(f64::abs).sum::<f64>());
                let off = SUM_SLACK * size;
                (f64::from(round_to(activations, sum)), off + spread(activations, sum, off))
            })
            .collect();
        for (n, out) in out.iter_mut().enumerate() {
            let b = &pair.b[n * pair.rank..][..pair.rank];
            let sum: f64 = h.iter().zip(b).map(|(h, &b)| h.0 * f64::from(b)).sum();
            let size: f64 = h.iter().zip(b).map(|(h, &b)| (h.0 * f64::from(b)).abs()).sum();
            let off: f64 = h.iter().zip(b).map(|(h, &b)| (h.1 * f64::from(b)).abs()).sum();
            out.value += factor * sum;
            out.slack += factor.abs() * (off + SUM_SLACK * size);
        }
    }
    Some(out)
}

/// How far apart the roundings of sums lie that are `off` to either side.
fn spread(dtype: SlotDtype, sum: f64, off: f64) -> f64 {
    f64::from(round_to(dtype, sum + off)) - f64::from(round_to(dtype, sum - off))
}
