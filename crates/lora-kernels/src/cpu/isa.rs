//! The instruction sets that the CPU back end knows, and which of them this machine has.

use crate::error::KernelError;

/// An instruction set. Bits of results differ between instruction sets, never within one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Isa {
    /// Plain Rust, on any machine.
    Scalar,
    /// AVX2 with FMA and F16C: 8 lanes.
    Avx2,
    /// AVX-512 F, BW and VL: 16 lanes.
    Avx512,
}

impl Isa {
    /// Every instruction set, the plainest first.
    pub const ALL: [Isa; 3] = [Isa::Scalar, Isa::Avx2, Isa::Avx512];

    /// The best that this machine has.
    pub fn detect() -> Isa {
        Isa::ALL.into_iter().rev().find(|isa| isa.is_available()).unwrap_or(Isa::Scalar)
    }

    /// Whether this machine has it.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 => false,
        }
    }

    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "AVX2",
            Isa::Avx512 => "AVX-512",
        }
    }

    /// This instruction set, if the machine has it.
    pub(super) fn require(self) -> Result<Isa, KernelError> {
        if self.is_available() { Ok(self) } else { Err(KernelError::MissingIsa { isa: self.name() }) }
    }
}
