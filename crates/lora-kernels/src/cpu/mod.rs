//! The fast back end of a machine without a GPU.

use lora_math::StepRows;

use crate::activations::{Rows, RowsMut, ShrinkBuffer};
use crate::error::KernelError;
use crate::ops::{DeltaRun, LoraKernels};
use crate::reference::Reference;
use crate::table::{SiteRef, SlotTable};
use crate::weights::WeightView;

/// The CPU back end.
#[derive(Clone, Debug, Default)]
pub struct Cpu;

impl Cpu {
    /// Chooses the best instruction set of this machine.
    pub fn new() -> Self {
        Cpu
    }

    /// `y[row][n] = Σ_k x[row][k] · weight[n][k] + bias[n]`. The bits of `y[row][n]` depend on row and n only.
    pub fn matmul(
        &self,
        x: Rows<'_>,
        weight: &WeightView<'_>,
        bias: Option<&[f32]>,
        y: RowsMut<'_>,
    ) -> Result<(), KernelError> {
        Reference.matmul(x, weight, bias, y)
    }
}

impl LoraKernels for Cpu {
    fn shrink(
        &self,
        table: &SlotTable<'_>,
        rows: &StepRows,
        sites: &[SiteRef],
        x: Rows<'_>,
        h: &mut ShrinkBuffer,
    ) -> Result<(), KernelError> {
        Reference.shrink(table, rows, sites, x, h)
    }

    fn expand(
        &self,
        table: &SlotTable<'_>,
        rows: &StepRows,
        sites: &[SiteRef],
        h: &ShrinkBuffer,
        y: &mut [RowsMut<'_>],
    ) -> Result<(), KernelError> {
        Reference.expand(table, rows, sites, h, y)
    }

    fn delta(
        &self,
        run: DeltaRun<'_, '_>,
        x: Rows<'_>,
        y: &mut [RowsMut<'_>],
        scratch: &mut ShrinkBuffer,
    ) -> Result<(), KernelError> {
        Reference.delta(run, x, y, scratch)
    }
}
