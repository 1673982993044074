//! The delta of a run of rows of one slot: shrink and expand in pieces of as many rows as the scratch holds.

use std::ops::Range;

use super::Cpu;
use super::dot::MAX_ROWS;
use super::expand::{SiteOutputs, for_outputs};
use super::expand_tile::{ExpandPanel, ExpandRow};
use super::parallel::cost;
use super::shrink::{ShrinkBlock, ShrinkBlocks, shrink_blocks};
use crate::activations::{Rows, RowsMut, ShrinkBuffer};
use crate::error::KernelError;
use crate::ops::{self, DeltaRun};

pub(super) fn delta(
    cpu: &Cpu,
    run: &DeltaRun<'_, '_>,
    x: Rows<'_>,
    y: &mut [RowsMut<'_>],
    scratch: &mut ShrinkBuffer,
) -> Result<(), KernelError> {
    let max_rank = ops::check_delta(run, x, y, scratch)?;
    let Range { start, end } = run.run.rows;
    for first in (start..end).step_by(scratch.capacity().max_entries.max(1)) {
        let piece = first..end.min(first + scratch.capacity().max_entries);
        scratch.hold(piece.len(), run.sites.len());
        shrink_piece(cpu, run, max_rank, x, &piece, scratch);
        let reads = max_rank * run.table.dtype().bytes();
        for_outputs(run.sites, y, cost(reads, piece.len() * max_rank), &|site| {
            expand_piece(cpu, run, &piece, scratch, site);
        });
    }
    scratch.hold(0, 0);
    Ok(())
}

fn shrink_piece(
    cpu: &Cpu,
    run: &DeltaRun<'_, '_>,
    max_rank: usize,
    x: Rows<'_>,
    piece: &Range<usize>,
    scratch: &mut ShrinkBuffer,
) {
    let num_blocks = piece.len().div_ceil(MAX_ROWS);
    let blocks = ShrinkBlocks { table: run.table, sites: run.sites, num_blocks, block_rows: MAX_ROWS, max_rank };
    let block = |index: usize| ShrinkBlock {
        slot: run.run.slot.raw(),
        first_entry: index * MAX_ROWS,
        count: (piece.len() - index * MAX_ROWS).min(MAX_ROWS),
    };
    shrink_blocks(cpu, &blocks, x, scratch, &block, &|entry| piece.start + entry);
}

fn expand_piece(
    cpu: &Cpu,
    run: &DeltaRun<'_, '_>,
    piece: &Range<usize>,
    scratch: &ShrinkBuffer,
    site: SiteOutputs<'_>,
) {
    let Ok(Some(pair)) = run.table.pair(run.run.slot.raw(), site.site) else { return };
    let out_features = site.site.features.out_features;
    let mut rows = [ExpandRow::UNUSED; MAX_ROWS];
    for first in (0..piece.len()).step_by(MAX_ROWS) {
        let count = (piece.len() - first).min(MAX_ROWS);
        for (entry, place) in (first..).zip(&mut rows[..count]) {
            *place = ExpandRow {
                h: scratch.h().as_ptr().wrapping_add(scratch.offset(entry, site.position)),
                y: site.y.at((piece.start + entry) * out_features),
                factor: run.scale * pair.scaling,
            };
        }
        let panel = ExpandPanel { rows: &rows[..count], b: pair.b, rank: pair.rank, outputs: site.outputs.clone() };
        // SAFETY: the operation's checks made the scratch and y fit the sites, ranks and rows, and the table's contract
        // makes B readable. Outputs of a site have one owner, y is borrowed exclusively, and all rows differ.
        unsafe { cpu.expand_panel(&panel) };
    }
}
