//! A LoRA pair: A, B and their scaling at one site.

use lora_math::Site;
use lora_math::scaling::ScalingRule;

use crate::matrix::Matrix;
use crate::reason::Reason;

/// The largest rank that an adapter may have at a site.
pub const MAX_RANK: usize = 512;

/// A `[rank, in_features]`, B `[out_features, rank]` and the scaling of `delta = scaling · B·A·x`.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraPair {
    a: Matrix,
    b: Matrix,
    alpha: f64,
    scaling: f32,
}

impl LoraPair {
    /// A pair, with the scaling that `rule` makes of `alpha` and the rank.
    ///
    /// # Errors
    /// A and B of different ranks, a rank above [`MAX_RANK`], or a scaling that is not a finite f32.
    pub fn new(a: Matrix, b: Matrix, alpha: f64, rule: ScalingRule) -> Result<Self, Reason> {
        let rank = a.rows();
        if rank != b.cols() {
            return Err(Reason::PairMismatch {
                a: a.tensor().into(),
                a_shape: [a.rows(), a.cols()],
                b: b.tensor().into(),
                b_shape: [b.rows(), b.cols()],
            });
        }
        if rank > MAX_RANK {
            return Err(Reason::RankTooLarge { tensor: a.tensor().into(), found: rank, max: MAX_RANK });
        }
        match rule.scaling(alpha, rank) {
            Ok(scaling) => Ok(LoraPair { a, b, alpha, scaling }),
            Err(error) => Err(Reason::Scaling { tensor: a.tensor().into(), error }),
        }
    }

    /// A, `[rank, in_features]`.
    pub fn a(&self) -> &Matrix {
        &self.a
    }

    /// B, `[out_features, rank]`.
    pub fn b(&self) -> &Matrix {
        &self.b
    }

    /// Rows of A and columns of B.
    pub fn rank(&self) -> usize {
        self.a.rows()
    }

    /// Columns of A.
    pub fn in_features(&self) -> usize {
        self.a.cols()
    }

    /// Rows of B.
    pub fn out_features(&self) -> usize {
        self.b.rows()
    }

    /// Alpha as the adapter's config gives it for this site.
    pub fn alpha(&self) -> f64 {
        self.alpha
    }

    /// What B·A·x is multiplied by.
    pub fn scaling(&self) -> f32 {
        self.scaling
    }

    /// Bytes of A and B in the dtypes of the file.
    pub fn file_bytes(&self) -> usize {
        self.a.bytes().len() + self.b.bytes().len()
    }

    /// Other matrices of the same rank under the same scaling.
    pub(crate) fn with_matrices(self, a: Matrix, b: Matrix) -> Self {
        LoraPair { a, b, ..self }
    }

    /// The pair with another B of the same shape.
    pub(crate) fn with_b(self, b: Matrix) -> Self {
        LoraPair { b, ..self }
    }

    /// Gives matrices made in memory the name of their site in messages.
    pub(crate) fn named_by(self, site: Site) -> Self {
        let a = self.a.renamed(format!("{site} A").into());
        let b = self.b.renamed(format!("{site} B").into());
        LoraPair { a, b, ..self }
    }
}
