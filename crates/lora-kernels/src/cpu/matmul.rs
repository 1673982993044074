//! The base product, cut over rows and outputs.

use super::Cpu;
use super::dot::{DotPanel, DotRow, MAX_ROWS, TILE_OUTPUTS};
use super::parallel::{SharedPtr, cost, for_ranges, segments};
use crate::activations::{Rows, RowsMut};
use crate::error::KernelError;
use crate::ops;
use crate::weights::WeightView;

/// Outputs of a unit: whole tiles, and whole cache lines of y, so that two threads seldom share one.
const UNIT_OUTPUTS: usize = 8 * TILE_OUTPUTS;

impl Cpu {
    /// `y[row][n] = Σ_k x[row][k] · weight[n][k] + bias[n]`, with f32 sums. The bits of `y[row][n]` depend on the row's
    /// x, the weight's row n and the bias only: not on the number of rows or threads.
    ///
    /// Runs on the threads of the rayon pool that it is called in.
    pub fn matmul(
        &self,
        x: Rows<'_>,
        weight: &WeightView<'_>,
        bias: Option<&[f32]>,
        y: RowsMut<'_>,
    ) -> Result<(), KernelError> {
        ops::check_matmul(x, weight, bias, &y)?;
        let (num_rows, in_features, out_features) = (x.num_rows(), x.width(), y.width());
        let matrix = weight.matrix();
        let units = out_features.div_ceil(UNIT_OUTPUTS);
        let blocks = num_rows.div_ceil(MAX_ROWS);
        // Blocks of about one size, in whole tiles: at most MAX_ROWS, which is a multiple of 4.
        let block_rows = num_rows.div_ceil(blocks.max(1)).next_multiple_of(4);
        let weight_values = in_features * out_features;
        let whole_cost = cost(blocks * weight_values * matrix.dtype.bytes(), num_rows * weight_values);
        let outputs = SharedPtr::new(y.as_ptr());

        for_ranges(blocks * units, whole_cost, &|range| {
            let mut rows = [DotRow::UNUSED; MAX_ROWS];
            for (block, segment) in segments(range, units) {
                let first = block * block_rows;
                let count = num_rows.saturating_sub(first).min(block_rows);
                for (row, place) in (first..).zip(&mut rows[..count]) {
                    *place = DotRow { x: x.row(row).as_ptr(), y: outputs.at(row * out_features) };
                }
                let outputs = segment.start * UNIT_OUTPUTS..(segment.end * UNIT_OUTPUTS).min(out_features);
                // SAFETY: x, y and the weight have the sizes checked above. Ranges are disjoint, so each output of each
                // row has one writer, and y is borrowed exclusively until all are done.
                unsafe { self.dot(&DotPanel { rows: &rows[..count], weight: matrix, in_features, outputs, bias }) };
            }
        });
        Ok(())
    }
}
