//! The factor on B·A·x: alpha / rank, alpha / √rank, or a given one.
//!
//! This is the only place that divides alpha by a rank. Which rank and which alpha a site has is for
//! [`patterns`](crate::patterns) and for the reader of the adapter's tensors.

use thiserror::Error;

/// How alpha and rank make the scaling of a site.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum ScalingRule {
    /// alpha / rank (Hu et al. 2021, "LoRA").
    #[default]
    Standard,
    /// alpha / √rank (Kalajdzievski 2023, "rsLoRA"): `use_rslora` in an adapter's config.
    RankStabilized,
    /// Alpha itself, whatever the rank: mlx-lm's `scale`.
    Given,
}

/// Numbers that make no scaling. Loading the same adapter again will not help.
#[derive(Clone, Copy, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum ScalingError {
    /// The rank is 0: nothing to scale, and alpha / 0 has no value.
    #[error("rank is 0 (alpha {alpha}); a scaling needs at least rank 1")]
    ZeroRank {
        /// The alpha given.
        alpha: f64,
    },
    /// Alpha is infinite or not a number.
    #[error("alpha is {alpha}; it must be a finite number (rank {rank})")]
    BadAlpha {
        /// The alpha given.
        alpha: f64,
        /// The rank given.
        rank: usize,
    },
    /// The quotient does not fit in single precision.
    #[error("alpha {alpha} over rank {rank} does not fit in single precision")]
    Overflow {
        /// The alpha given.
        alpha: f64,
        /// The rank given.
        rank: usize,
    },
}

impl ScalingRule {
    /// The scaling of a site, computed in double precision and rounded once. Alpha may be 0 (the adapter then equals
    /// the base at that site) and may be negative; both occur in files and have this plain meaning.
    pub fn scaling(self, alpha: f64, rank: usize) -> Result<f32, ScalingError> {
        if rank == 0 {
            return Err(ScalingError::ZeroRank { alpha });
        }
        if !alpha.is_finite() {
            return Err(ScalingError::BadAlpha { alpha, rank });
        }
        let divisor = match self {
            ScalingRule::Standard => rank as f64,
            ScalingRule::RankStabilized => (rank as f64).sqrt(),
            ScalingRule::Given => 1.0,
        };
        let scaling = (alpha / divisor) as f32;
        if scaling.is_finite() { Ok(scaling) } else { Err(ScalingError::Overflow { alpha, rank }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measured_scalings() {
        use ScalingRule::{Given, RankStabilized, Standard};
        for (rule, alpha, rank, expected) in [
            (RankStabilized, 16.0, 16, 4.0),
            (Standard, 64.0, 16, 4.0),
            (RankStabilized, 8.0, 2, 5.656_854),
            (RankStabilized, 8.0, 4, 4.0),
            (Standard, 3.5, 4, 0.875),
            (Standard, 9.0, 4, 2.25),
            (Standard, 0.5, 1, 0.5),
            (RankStabilized, 0.5, 1, 0.5),
            (Standard, 0.0, 8, 0.0),
            (Standard, -8.0, 4, -2.0),
            (Given, 2.5, 4, 2.5),
            (Given, 0.1, 7, 0.1),
        ] {
            assert_eq!(rule.scaling(alpha, rank), Ok(expected), "{rule:?} {alpha} {rank}");
        }
    }

    #[test]
    fn numbers_without_a_scaling_are_refused() {
        for rule in [ScalingRule::Standard, ScalingRule::RankStabilized, ScalingRule::Given] {
            assert_eq!(rule.scaling(16.0, 0), Err(ScalingError::ZeroRank { alpha: 16.0 }));
            assert!(matches!(rule.scaling(f64::NAN, 4), Err(ScalingError::BadAlpha { rank: 4, .. })));
            let alpha = f64::INFINITY;
            assert_eq!(rule.scaling(alpha, 4), Err(ScalingError::BadAlpha { alpha, rank: 4 }));
            assert_eq!(rule.scaling(1e300, 4), Err(ScalingError::Overflow { alpha: 1e300, rank: 4 }));
        }
    }
}
