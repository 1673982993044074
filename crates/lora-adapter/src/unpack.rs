//! From a matrix of many experts, or of gate and up, to a pair for each site.
//!
//! A of expert e are the rows e · rank + k. They are shared, not copied: gate and up read the same input. Columns of B of
//! one expert lie apart, so B is copied once, into the order expert, gate or up, row.

use std::sync::Arc;

use lora_math::{Module, Site};

use crate::experts::{GateUpOrder, Parameter};
use crate::marks::Columns;
use crate::matrix::{Matrix, MatrixError};

/// A and B of a parameter of `num_experts` experts, the first of which is `first_expert` of `layer`.
pub(crate) struct Packed<'a> {
    pub(crate) a: &'a Matrix,
    pub(crate) b: &'a Matrix,
    pub(crate) layer: usize,
    pub(crate) first_expert: usize,
    pub(crate) num_experts: usize,
    pub(crate) parameter: Parameter,
    pub(crate) columns: Columns,
    pub(crate) swapped: bool,
    pub(crate) order: GateUpOrder,
}

impl Packed<'_> {
    /// A and B of every site. The rows of A are a multiple of the experts, and those of a fused B of 2.
    pub(crate) fn unpack(&self) -> Result<Vec<(Site, Matrix, Matrix)>, MatrixError> {
        let modules: &[Module] = match self.parameter {
            Parameter::GateUp => &[Module::ExpertGateProj, Module::ExpertUpProj],
            Parameter::Down => &[Module::ExpertDownProj],
        };
        let rank = self.a.rows() / self.num_experts;
        let (inputs, outputs) = if self.swapped { (self.b, self.a) } else { (self.a, self.b) };
        let in_features = if self.swapped { inputs.rows() } else { inputs.cols() };
        let out_features = if self.swapped { outputs.cols() } else { outputs.rows() };
        // A' of a swapped parameter is the transpose of what B holds of an expert, and B' that of A.
        let a_bytes = if self.swapped { Some(Arc::new(self.columns_of_b(rank, true))) } else { None };
        let b_bytes = if self.swapped { self.transposed_rows_of_a(rank) } else { self.columns_of_b(rank, false) };
        let b_bytes = Arc::new(self.split(b_bytes, [out_features, rank]));
        let rows = out_features / modules.len();
        let mut unpacked = Vec::with_capacity(self.num_experts * modules.len());
        for expert in 0..self.num_experts {
            let a = match &a_bytes {
                Some(bytes) => part(self.b, bytes, expert, [rank, in_features])?,
                None => self.a.row_range(expert * rank..(expert + 1) * rank)?,
            };
            for (index, &module) in modules.iter().enumerate() {
                let name_from = if self.swapped { self.a } else { self.b };
                let b = part(name_from, &b_bytes, expert * modules.len() + index, [rows, rank])?;
                let site = Site::Expert { layer: self.layer, expert: self.first_expert + expert, module };
                unpacked.push((site, a.clone(), b));
            }
        }
        Ok(unpacked)
    }

    /// The elements of B by expert: `[rows, rank]` each, or its transpose.
    fn columns_of_b(&self, rank: usize, transposed: bool) -> Vec<u8> {
        let (rows, size) = (self.b.rows(), self.b.dtype().bytes());
        let mut out = vec![0; self.b.bytes().len()];
        for (index, element) in self.b.bytes().chunks_exact(size).enumerate() {
            let (row, column) = (index / self.b.cols(), index % self.b.cols());
            let (expert, k) = match self.columns {
                Columns::RankMajor => (column % self.num_experts, column / self.num_experts),
                Columns::Grouped => (column / rank, column % rank),
            };
            let within = if transposed { k * rows + row } else { row * rank + k };
            let at = (expert * rows * rank + within) * size;
            out[at..at + size].copy_from_slice(element);
        }
        out
    }

    /// The elements of A by expert, each transposed to `[columns, rank]`.
    fn transposed_rows_of_a(&self, rank: usize) -> Vec<u8> {
        let (cols, size) = (self.a.cols(), self.a.dtype().bytes());
        let mut out = vec![0; self.a.bytes().len()];
        for (index, element) in self.a.bytes().chunks_exact(size).enumerate() {
            let (row, column) = (index / cols, index % cols);
            let (expert, k) = (row / rank, row % rank);
            let at = (expert * cols * rank + column * rank + k) * size;
            out[at..at + size].copy_from_slice(element);
        }
        out
    }

    /// Moves the rows of gate before those of up, where they are interleaved.
    fn split(&self, bytes: Vec<u8>, [rows, rank]: [usize; 2]) -> Vec<u8> {
        if self.parameter == Parameter::Down || self.order == GateUpOrder::Concatenated {
            return bytes;
        }
        let row_bytes = bytes.len() / (rows * self.num_experts);
        debug_assert_eq!(row_bytes % rank, 0);
        let mut out = Vec::with_capacity(bytes.len());
        for expert in bytes.chunks_exact(rows * row_bytes) {
            for first in 0..2 {
                expert.chunks_exact(row_bytes).skip(first).step_by(2).for_each(|row| out.extend_from_slice(row));
            }
        }
        out
    }
}

/// Matrix number `index` of equal ones, of the dtype and under the name of `of`.
fn part(of: &Matrix, bytes: &Arc<Vec<u8>>, index: usize, shape: [usize; 2]) -> Result<Matrix, MatrixError> {
    let length = shape[0] * shape[1] * of.dtype().bytes();
    let range = index * length..(index + 1) * length;
    Matrix::from_bytes(of.tensor().into(), shape, of.dtype(), Arc::clone(bytes), range)
}

/// B of gate and of up with the rows of both put in the other order: what was read as one order is read as the other.
pub(crate) fn reordered(gate: &Matrix, up: &Matrix, from: GateUpOrder) -> Result<[Matrix; 2], MatrixError> {
    let row_bytes = gate.cols() * gate.dtype().bytes();
    let rows = |matrix: &Matrix| matrix.bytes().chunks_exact(row_bytes).map(<[u8]>::to_vec).collect::<Vec<_>>();
    let (gate_rows, up_rows) = (rows(gate), rows(up));
    let (first, second): (Vec<_>, Vec<_>) = match from {
        GateUpOrder::Concatenated => {
            let all = gate_rows.iter().chain(&up_rows).enumerate();
            let (even, odd): (Vec<_>, Vec<_>) = all.partition(|(row, _)| row % 2 == 0);
            (even.into_iter().map(|(_, row)| row).collect(), odd.into_iter().map(|(_, row)| row).collect())
        }
        GateUpOrder::Interleaved => {
            let all: Vec<&Vec<u8>> = gate_rows.iter().zip(&up_rows).flat_map(|(gate, up)| [gate, up]).collect();
            let (gate, up) = all.split_at(gate_rows.len());
            (gate.to_vec(), up.to_vec())
        }
    };
    let matrix = |of: &Matrix, rows: Vec<&Vec<u8>>| {
        let bytes = Arc::new(rows.into_iter().flatten().copied().collect::<Vec<u8>>());
        part(of, &bytes, 0, [of.rows(), of.cols()])
    };
    Ok([matrix(gate, first)?, matrix(up, second)?])
}
