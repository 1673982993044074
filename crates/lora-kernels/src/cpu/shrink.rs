//! Shrink: h = A·x, cut over blocks of rows, sites and ranks.

use lora_math::StepRows;
use lora_math::abi::MAX_GROUP_ROWS;

use super::Cpu;
use super::dot::{DotPanel, DotRow, MAX_ROWS, TILE_OUTPUTS};
use super::parallel::{SharedPtr, cost, for_ranges, segments};
use crate::activations::{Rows, ShrinkBuffer};
use crate::error::KernelError;
use crate::ops;
use crate::table::{SiteRef, SlotTable};

/// Ranks of a unit: whole tiles.
const UNIT_RANKS: usize = 2 * TILE_OUTPUTS;

/// A block of rows of one slot, as shrink sees it: entry `i` of the block reads x of `row(i)` and writes h of
/// `first_entry + i`.
pub(super) struct ShrinkBlock {
    pub(super) slot: u32,
    pub(super) first_entry: usize,
    pub(super) count: usize,
}

/// The blocks of a shrink, and how large they are.
pub(super) struct ShrinkBlocks<'a> {
    pub(super) table: &'a SlotTable<'a>,
    pub(super) sites: &'a [SiteRef],
    pub(super) num_blocks: usize,
    /// Upper bound of a block's rows.
    pub(super) block_rows: usize,
    /// Upper bound of the ranks.
    pub(super) max_rank: usize,
}

pub(super) fn shrink(
    cpu: &Cpu,
    table: &SlotTable<'_>,
    rows: &StepRows,
    sites: &[SiteRef],
    x: Rows<'_>,
    h: &mut ShrinkBuffer,
) -> Result<(), KernelError> {
    let max_rank = ops::check_shrink(table, rows, sites, x, h)?;
    h.hold(rows.entries().len(), sites.len());
    let num_blocks = rows.groups().len();
    let blocks = ShrinkBlocks { table, sites, num_blocks, block_rows: MAX_GROUP_ROWS, max_rank };
    let block = |index: usize| {
        let group = rows.groups()[index];
        ShrinkBlock { slot: group.slot, first_entry: group.first_entry as usize, count: group.count as usize }
    };
    shrink_blocks(cpu, &blocks, x, h, &block, &|entry| rows.entries()[entry].row as usize);
    Ok(())
}

/// Shrinks checked blocks: `block` gives a block, `entry_row` the row of x of an entry. Blocks do not share entries.
pub(super) fn shrink_blocks(
    cpu: &Cpu,
    blocks: &ShrinkBlocks<'_>,
    x: Rows<'_>,
    h: &mut ShrinkBuffer,
    block: &(impl Fn(usize) -> ShrinkBlock + Sync),
    entry_row: &(impl Fn(usize) -> usize + Sync),
) {
    let ShrinkBlocks { table, sites, num_blocks, block_rows, max_rank } = *blocks;
    let in_features = x.width();
    let units = max_rank.div_ceil(UNIT_RANKS);
    let values = num_blocks * sites.len() * max_rank * in_features;
    let whole_cost = cost(values * table.dtype().bytes(), values * block_rows);
    let out = SharedPtr::new(h.h_mut().as_mut_ptr());
    let h = &*h;

    for_ranges(num_blocks * sites.len() * units, whole_cost, &|range| {
        let mut rows = [DotRow::UNUSED; MAX_ROWS];
        for (pair_index, segment) in segments(range, units) {
            let (block, position) = (block(pair_index / sites.len()), pair_index % sites.len());
            let Ok(Some(pair)) = table.pair(block.slot, &sites[position]) else { continue };
            let ranks = segment.start * UNIT_RANKS..(segment.end * UNIT_RANKS).min(pair.rank);
            if ranks.is_empty() {
                continue;
            }
            for (entry, place) in (block.first_entry..).zip(&mut rows[..block.count]) {
                *place = DotRow { x: x.row(entry_row(entry)).as_ptr(), y: out.at(h.offset(entry, position)) };
            }
            // SAFETY: the operation's checks made x and h fit the sites and ranks, and the table's contract makes A
            // readable. Ranges are disjoint, so each value of h has one writer, and h is borrowed exclusively.
            unsafe {
                cpu.dot(&DotPanel {
                    rows: &rows[..block.count],
                    weight: pair.a,
                    in_features,
                    outputs: ranks,
                    bias: None,
                });
            }
        }
    });
}
