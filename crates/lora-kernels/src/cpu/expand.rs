//! Expand: y += scale · scaling · B·h, cut over outputs.
//!
//! Whoever owns some outputs owns them for all rows, so entries of one row are added by one thread in the request's
//! order. Rows with one entry go through by group, which reads B once for up to eight of them; a row with several
//! entries goes through alone. Both run the same core, so a row's bits do not tell which.

use std::ops::Range;

use lora_math::StepRows;
use lora_math::abi::MAX_GROUP_ROWS;

use super::Cpu;
use super::expand_tile::{ExpandPanel, ExpandRow, MAX_OUTPUTS};
use super::parallel::{SharedPtr, cost, for_ranges};
use crate::activations::{RowsMut, ShrinkBuffer};
use crate::error::KernelError;
use crate::ops;
use crate::reference::entry_slot;
use crate::table::{SiteRef, SlotTable};

pub(super) fn expand(
    cpu: &Cpu,
    table: &SlotTable<'_>,
    rows: &StepRows,
    sites: &[SiteRef],
    h: &ShrinkBuffer,
    y: &mut [RowsMut<'_>],
) -> Result<(), KernelError> {
    let max_rank = ops::check_expand(table, rows, sites, h, y)?;
    let reads = rows.groups().len() * max_rank * table.dtype().bytes();
    let mul_adds = rows.entries().len() * max_rank;
    let step = Step { cpu, table, rows, h };
    for_outputs(sites, y, cost(reads, mul_adds), &|site| step.expand(site));
    Ok(())
}

/// Some outputs of one site of a call.
pub(super) struct SiteOutputs<'a> {
    /// The site's position in the call.
    pub(super) position: usize,
    pub(super) site: &'a SiteRef,
    /// y of row 0; rows are `site.features.out_features` apart.
    pub(super) y: SharedPtr,
    pub(super) outputs: Range<usize>,
}

/// Cuts the outputs of all sites into ranges and calls `body` on each; `y` fits the sites. `output_cost` is the cost of
/// one output of all rows.
pub(super) fn for_outputs(
    sites: &[SiteRef],
    y: &mut [RowsMut<'_>],
    output_cost: usize,
    body: &(impl Fn(SiteOutputs<'_>) + Sync),
) {
    let y = &*y;
    let units = |site: &SiteRef| site.features.out_features.div_ceil(MAX_OUTPUTS);
    let num_units: usize = sites.iter().map(units).sum();
    for_ranges(num_units, num_units * MAX_OUTPUTS * output_cost, &|range| {
        let mut first = 0;
        for (position, site) in sites.iter().enumerate() {
            let start = range.start.max(first) - first;
            let end = range.end.min(first + units(site)).saturating_sub(first);
            first += units(site);
            if start < end {
                let outputs = start * MAX_OUTPUTS..(end * MAX_OUTPUTS).min(site.features.out_features);
                body(SiteOutputs { position, site, y: SharedPtr::new(y[position].as_ptr()), outputs });
            }
        }
    });
}

struct Step<'a> {
    cpu: &'a Cpu,
    table: &'a SlotTable<'a>,
    rows: &'a StepRows,
    h: &'a ShrinkBuffer,
}

impl Step<'_> {
    /// Adds all entries of the step to some outputs of one site.
    fn expand(&self, site: SiteOutputs<'_>) {
        let Step { rows, .. } = *self;
        let mut panel_rows = [ExpandRow::UNUSED; MAX_GROUP_ROWS];
        for group in rows.groups() {
            let mut count = 0;
            for entry in group.first_entry..group.first_entry + group.count {
                if self.is_alone(entry) {
                    panel_rows[count] = self.row(&site, entry);
                    count += 1;
                }
            }
            self.add(&site, group.slot, &mut panel_rows[..count]);
        }
        for row in 0..rows.num_rows() {
            if let entries @ [_, _, ..] = rows.row_entries(row) {
                for &entry in entries {
                    self.add(&site, entry_slot(rows, entry), &mut [self.row(&site, entry)]);
                }
            }
        }
    }

    /// Whether the entry's row has no other entry.
    fn is_alone(&self, entry: u32) -> bool {
        self.rows.row_entries(self.rows.entries()[entry as usize].row as usize).len() == 1
    }

    /// An entry, with its request's scale as the factor.
    fn row(&self, site: &SiteOutputs<'_>, entry: u32) -> ExpandRow {
        let row_entry = self.rows.entries()[entry as usize];
        ExpandRow {
            h: self.h.h().as_ptr().wrapping_add(self.h.offset(entry as usize, site.position)),
            y: site.y.at(row_entry.row as usize * site.site.features.out_features),
            factor: row_entry.scale,
        }
    }

    fn add(&self, site: &SiteOutputs<'_>, slot: u32, rows: &mut [ExpandRow]) {
        let Ok(Some(pair)) = self.table.pair(slot, site.site) else { return };
        if rows.is_empty() {
            return;
        }
        for row in &mut *rows {
            row.factor *= pair.scaling;
        }
        let panel = ExpandPanel { rows, b: pair.b, rank: pair.rank, outputs: site.outputs.clone() };
        // SAFETY: the operation's checks made h and y fit the sites and ranks, and the table's contract makes B
        // readable. Outputs of a site have one owner, y is borrowed exclusively, and rows of one call differ.
        unsafe { self.cpu.expand_panel(&panel) };
    }
}
