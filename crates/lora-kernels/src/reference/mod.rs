//! The plain back end: every sum in index order, one f32 accumulator, one thread.
//!
//! It is what the others are read against; [`oracle`] gives the same results in double precision, for checks. Neither
//! is meant to be fast.

pub mod oracle;

use lora_math::StepRows;

use crate::activations::{Rows, RowsMut, ShrinkBuffer};
use crate::error::KernelError;
use crate::ops::{self, DeltaRun, LoraKernels};
use crate::table::{PairView, SiteRef, SlotTable};
use crate::weights::WeightView;

/// The plain back end.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reference;

impl Reference {
    /// `y[row][n] = Σ_k x[row][k] · weight[n][k] + bias[n]`.
    pub fn matmul(
        &self,
        x: Rows<'_>,
        weight: &WeightView<'_>,
        bias: Option<&[f32]>,
        mut y: RowsMut<'_>,
    ) -> Result<(), KernelError> {
        ops::check_matmul(x, weight, bias, &y)?;
        for row in 0..x.num_rows() {
            for (n, y) in y.row_mut(row).iter_mut().enumerate() {
                let sum: f32 = x.row(row).iter().enumerate().map(|(k, x)| x * weight.value(n, k)).sum();
                *y = sum + bias.map_or(0.0, |bias| bias[n]);
            }
        }
        Ok(())
    }
}

impl LoraKernels for Reference {
    fn shrink(
        &self,
        table: &SlotTable<'_>,
        rows: &StepRows,
        sites: &[SiteRef],
        x: Rows<'_>,
        h: &mut ShrinkBuffer,
    ) -> Result<(), KernelError> {
        ops::check_shrink(table, rows, sites, x, h)?;
        h.hold(rows.entries().len(), sites.len());
        for group in rows.groups() {
            for (position, site) in sites.iter().enumerate() {
                let Some(pair) = table.pair(group.slot, site)? else { continue };
                for entry in group.first_entry as usize..(group.first_entry + group.count) as usize {
                    let offset = h.offset(entry, position);
                    let row = rows.entries()[entry].row as usize;
                    shrink_row(&pair, x.row(row), &mut h.h_mut()[offset..]);
                }
            }
        }
        Ok(())
    }

    fn gather(
        &self,
        table: &SlotTable<'_>,
        rows: &StepRows,
        site: &SiteRef,
        token_ids: &[u32],
        h: &mut ShrinkBuffer,
    ) -> Result<(), KernelError> {
        ops::gather(table, rows, site, token_ids, h)
    }

    fn expand(
        &self,
        table: &SlotTable<'_>,
        rows: &StepRows,
        sites: &[SiteRef],
        h: &ShrinkBuffer,
        y: &mut [RowsMut<'_>],
    ) -> Result<(), KernelError> {
        ops::check_expand(table, rows, sites, h, y)?;
        for (position, (site, y)) in sites.iter().zip(y).enumerate() {
            for row in 0..rows.num_rows() {
                for &entry in rows.row_entries(row) {
                    let Some(pair) = table.pair(entry_slot(rows, entry), site)? else { continue };
                    let scale = rows.entries()[entry as usize].scale;
                    let h = &h.h()[h.offset(entry as usize, position)..];
                    expand_row(&pair, scale, h, y.row_mut(row));
                }
            }
        }
        Ok(())
    }

    fn delta(
        &self,
        run: DeltaRun<'_, '_>,
        x: Rows<'_>,
        y: &mut [RowsMut<'_>],
        scratch: &mut ShrinkBuffer,
    ) -> Result<(), KernelError> {
        ops::check_delta(&run, x, y, scratch)?;
        scratch.hold(0, 0);
        for (site, y) in run.sites.iter().zip(y) {
            let Some(pair) = run.table.pair(run.run.slot.raw(), site)? else { continue };
            for row in run.run.rows.clone() {
                shrink_row(&pair, x.row(row), scratch.h_mut());
                expand_row(&pair, run.scale, scratch.h(), y.row_mut(row));
            }
        }
        Ok(())
    }
}

/// The slot of an entry: that of the group which holds it.
pub(crate) fn entry_slot(rows: &StepRows, entry: u32) -> u32 {
    let group = rows.groups().partition_point(|group| group.first_entry <= entry) - 1;
    rows.groups()[group].slot
}

/// `h[r] = Σ_k x[k] · A[r][k]`; only the first `rank` values of `h` are written.
fn shrink_row(pair: &PairView<'_>, x: &[f32], h: &mut [f32]) {
    for (r, h) in h[..pair.rank].iter_mut().enumerate() {
        // SAFETY: r < rank and k < in_features, which is the width of x.
        *h = x.iter().enumerate().map(|(k, value)| value * unsafe { pair.a.value(r * x.len() + k) }).sum();
    }
}

/// `y[n] += scale · scaling · Σ_r h[r] · B[n][r]`.
fn expand_row(pair: &PairView<'_>, scale: f32, h: &[f32], y: &mut [f32]) {
    let h = &h[..pair.rank];
    for (n, y) in y.iter_mut().enumerate() {
        // SAFETY: n < out_features, which is the width of y, and r < rank.
        let sum: f32 = h.iter().enumerate().map(|(r, h)| h * unsafe { pair.b.value(n * pair.rank + r) }).sum();
        *y += (scale * pair.scaling) * sum;
    }
}
