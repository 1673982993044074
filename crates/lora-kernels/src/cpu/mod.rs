//! The back end of a machine without a GPU: SIMD chosen at run time, threads of the rayon pool that a call runs in.
//!
//! Two cores do all arithmetic: `dot` (base products and shrink, lanes over K) and `expand_tile` (lanes over
//! outputs). The operations only cut the work, so threads and batch mates cannot reach the order of a sum.

mod delta;
mod dot;
mod expand;
mod expand_tile;
mod isa;
mod matmul;
mod parallel;
mod shrink;
mod simd;

use lora_math::StepRows;

pub use self::isa::Isa;
use crate::activations::{Rows, RowsMut, ShrinkBuffer};
use crate::error::KernelError;
use crate::ops::{self, DeltaRun, LoraKernels};
use crate::table::{SiteRef, SlotTable};

/// The CPU back end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpu {
    isa: Isa,
}

impl Cpu {
    /// With the best instruction set of this machine.
    pub fn new() -> Self {
        Cpu { isa: Isa::detect() }
    }

    /// With this instruction set, or an error if the machine lacks it.
    pub fn with_isa(isa: Isa) -> Result<Self, KernelError> {
        Ok(Cpu { isa: isa.require()? })
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// # Safety
    /// As for [`dot::run`], the instruction set aside.
    unsafe fn dot(&self, panel: &dot::DotPanel<'_>) {
        // SAFETY: passed on; a `Cpu` is only made with an instruction set that the machine has.
        unsafe {
            match self.isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => simd::avx512::dot(panel),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => simd::avx2::dot(panel),
                _ => simd::scalar::dot(panel),
            }
        }
    }

    /// # Safety
    /// As for [`expand_tile::run`], the instruction set aside.
    unsafe fn expand_panel(&self, panel: &expand_tile::ExpandPanel<'_>) {
        // SAFETY: passed on; a `Cpu` is only made with an instruction set that the machine has.
        unsafe {
            match self.isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => simd::avx512::expand(panel),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => simd::avx2::expand(panel),
                _ => simd::scalar::expand(panel),
            }
        }
    }
}

impl Default for Cpu {
    fn default() -> Self {
        Cpu::new()
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
        shrink::shrink(self, table, rows, sites, x, h)
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
        expand::expand(self, table, rows, sites, h, y)
    }

    fn delta(
        &self,
        run: DeltaRun<'_, '_>,
        x: Rows<'_>,
        y: &mut [RowsMut<'_>],
        scratch: &mut ShrinkBuffer,
    ) -> Result<(), KernelError> {
        delta::delta(self, &run, x, y, scratch)
    }
}
