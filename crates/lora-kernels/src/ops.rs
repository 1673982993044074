//! The operations that every back end offers, and the checks that all of them run first.

use std::ops::Range;

use lora_math::{RowRun, StepRows};

use crate::activations::{Rows, RowsMut, ShrinkBuffer};
use crate::error::{KernelError, Operand};
use crate::table::{SiteRef, SlotTable};
use crate::weights::WeightView;

/// LoRA on rows that use different adapters.
///
/// `sites` are projections that read the same `x` (q, k and v; gate and up; or one alone). Nothing is allocated, and on
/// an error nothing is written. The crate's front page gives the numeric contract.
pub trait LoraKernels: Send + Sync {
    /// h = A·x for every entry of the step at every site; `x` has a row for each row of the step, padding included.
    fn shrink(
        &self,
        table: &SlotTable<'_>,
        rows: &StepRows,
        sites: &[SiteRef],
        x: Rows<'_>,
        h: &mut ShrinkBuffer,
    ) -> Result<(), KernelError>;

    /// h = A\[token of the row\] for every entry of the step: the shrink of an embedding, whose A lies
    /// `[vocab_size, rank]` and whose `in_features` are the vocabulary. `token_ids` has one for each row of the step,
    /// padding included; those of rows without entries are not read. The [`expand`](Self::expand) of the same site adds
    /// it to the embedded rows.
    ///
    /// # Errors
    /// [`KernelError::TokenOutOfRange`] for a token past the vocabulary, and what a shrink is refused for; h is not
    /// written.
    fn gather(
        &self,
        table: &SlotTable<'_>,
        rows: &StepRows,
        site: &SiteRef,
        token_ids: &[u32],
        h: &mut ShrinkBuffer,
    ) -> Result<(), KernelError>;

    /// `y[site][row] += scale · scaling · B·h` for every entry, those of one row in the request's order; `h` holds the
    /// shrink of the same step and sites. Rows without entries are not touched.
    fn expand(
        &self,
        table: &SlotTable<'_>,
        rows: &StepRows,
        sites: &[SiteRef],
        h: &ShrinkBuffer,
        y: &mut [RowsMut<'_>],
    ) -> Result<(), KernelError>;

    /// Shrink and expand of consecutive rows that use one slot: `y[site][row] += scale · scaling · B·A·x[row]`, to the
    /// same bits as [`shrink`](Self::shrink) and [`expand`](Self::expand). `x` and `y` hold the whole batch; rows
    /// outside of the run are not touched. `scratch` needs room for one row at least; a run is worked through in pieces
    /// of as many rows as it has entries. It holds no shrink afterwards.
    fn delta(
        &self,
        run: DeltaRun<'_, '_>,
        x: Rows<'_>,
        y: &mut [RowsMut<'_>],
        scratch: &mut ShrinkBuffer,
    ) -> Result<(), KernelError>;
}

/// What a delta applies, and where.
#[derive(Clone, Copy, Debug)]
pub struct DeltaRun<'t, 's> {
    /// The pool's slot table.
    pub table: &'s SlotTable<'t>,
    /// The slot and the rows.
    pub run: &'s RowRun,
    /// The request's own scale.
    pub scale: f32,
    /// Projections that read the same input.
    pub sites: &'s [SiteRef],
}

/// [`LoraKernels::gather`] for memory that this process reads: a copy of a few values for each entry, which leaves
/// nothing for threads or SIMD, so both back ends take it.
pub(crate) fn gather(
    table: &SlotTable<'_>,
    rows: &StepRows,
    site: &SiteRef,
    token_ids: &[u32],
    h: &mut ShrinkBuffer,
) -> Result<(), KernelError> {
    expect_rows(Operand::Input, rows.row_slots().len(), token_ids.len())?;
    h.check_fits(rows.entries().len(), 1)?;
    check_pairs(table, std::slice::from_ref(site), h, rows.groups().iter().map(|group| group.slot))?;
    let vocab_size = site.features.in_features;
    for entry in rows.entries() {
        let (row, token_id) = (entry.row as usize, token_ids[entry.row as usize]);
        if token_id as usize >= vocab_size {
            return Err(KernelError::TokenOutOfRange { row, token_id, vocab_size });
        }
    }
    h.hold(rows.entries().len(), 1);
    for group in rows.groups() {
        let Some(pair) = table.pair(group.slot, site)? else { continue };
        for entry in group.first_entry as usize..(group.first_entry + group.count) as usize {
            let first = token_ids[rows.entries()[entry].row as usize] as usize * pair.rank;
            let offset = h.offset(entry, 0);
            for (r, h) in h.h_mut()[offset..offset + pair.rank].iter_mut().enumerate() {
                // SAFETY: the token is below the vocabulary, the number of rows of A, each of `rank` values.
                *h = unsafe { pair.a.value(first + r) };
            }
        }
    }
    Ok(())
}

/// Checks a shrink; gives the largest rank that it meets.
pub(crate) fn check_shrink(
    table: &SlotTable<'_>,
    rows: &StepRows,
    sites: &[SiteRef],
    x: Rows<'_>,
    h: &ShrinkBuffer,
) -> Result<usize, KernelError> {
    expect_rows(Operand::Input, rows.row_slots().len(), x.num_rows())?;
    check_inputs(sites, x)?;
    h.check_fits(rows.entries().len(), sites.len())?;
    check_pairs(table, sites, h, rows.groups().iter().map(|group| group.slot))
}

/// Checks an expand; gives the largest rank that it meets.
pub(crate) fn check_expand(
    table: &SlotTable<'_>,
    rows: &StepRows,
    sites: &[SiteRef],
    h: &ShrinkBuffer,
    y: &[RowsMut<'_>],
) -> Result<usize, KernelError> {
    check_outputs(sites, y, rows.row_slots().len())?;
    h.check_holds(rows.entries().len(), sites.len())?;
    check_pairs(table, sites, h, rows.groups().iter().map(|group| group.slot))
}

/// Checks a delta; gives the largest rank that it meets.
pub(crate) fn check_delta(
    run: &DeltaRun<'_, '_>,
    x: Rows<'_>,
    y: &[RowsMut<'_>],
    scratch: &ShrinkBuffer,
) -> Result<usize, KernelError> {
    let DeltaRun { table, run, sites, .. } = *run;
    check_inputs(sites, x)?;
    check_outputs(sites, y, x.num_rows())?;
    let Range { start, end } = run.rows;
    if start > end || end > x.num_rows() {
        return Err(KernelError::RunOutOfRange { start, end, num_rows: x.num_rows() });
    }
    scratch.check_fits(usize::from(start < end), sites.len())?;
    check_pairs(table, sites, scratch, std::iter::once(run.slot.raw()))
}

/// Checks a base product.
pub(crate) fn check_matmul(
    x: Rows<'_>,
    weight: &WeightView<'_>,
    bias: Option<&[f32]>,
    y: &RowsMut<'_>,
) -> Result<(), KernelError> {
    let features = weight.features();
    expect_width(Operand::Input, features.in_features, x.width())?;
    expect_width(Operand::Output, features.out_features, y.width())?;
    expect_rows(Operand::Output, x.num_rows(), y.num_rows())?;
    match bias {
        Some(bias) if bias.len() != features.out_features => {
            Err(KernelError::BiasSize { out_features: features.out_features, values: bias.len() })
        }
        _ => Ok(()),
    }
}

fn check_inputs(sites: &[SiteRef], x: Rows<'_>) -> Result<(), KernelError> {
    sites.iter().try_for_each(|site| expect_width(Operand::Input, site.features.in_features, x.width()))
}

fn check_outputs(sites: &[SiteRef], y: &[RowsMut<'_>], num_rows: usize) -> Result<(), KernelError> {
    if sites.len() != y.len() {
        return Err(KernelError::OutputCount { sites: sites.len(), outputs: y.len() });
    }
    sites.iter().zip(y).try_for_each(|(site, y)| {
        expect_width(Operand::Output, site.features.out_features, y.width())?;
        expect_rows(Operand::Output, num_rows, y.num_rows())
    })
}

fn check_pairs(
    table: &SlotTable<'_>,
    sites: &[SiteRef],
    h: &ShrinkBuffer,
    slots: impl Iterator<Item = u32>,
) -> Result<usize, KernelError> {
    let max_rank = h.capacity().max_rank;
    let num_sites = table.num_sites();
    if let Some(site) = sites.iter().find(|site| site.index >= num_sites) {
        return Err(KernelError::SiteOutOfRange { site: site.index, num_sites });
    }
    let mut widest = 0;
    for slot in slots {
        for site in sites {
            let rank = table.pair(slot, site)?.map_or(0, |pair| pair.rank);
            if rank > max_rank {
                return Err(KernelError::RankTooLarge { slot, site: site.index, rank, max_rank });
            }
            widest = widest.max(rank);
        }
    }
    Ok(widest)
}

fn expect_rows(operand: Operand, expected: usize, found: usize) -> Result<(), KernelError> {
    if expected != found {
        return Err(KernelError::RowCount { operand, expected, found });
    }
    Ok(())
}

fn expect_width(operand: Operand, expected: usize, found: usize) -> Result<(), KernelError> {
    if expected != found {
        return Err(KernelError::Width { operand, expected, found });
    }
    Ok(())
}
