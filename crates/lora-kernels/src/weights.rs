//! A view of a base weight: `[out_features, in_features]`, row-major, in the dtype that the checkpoint keeps.

use half::{bf16, f16};
use lora_math::Features;

use crate::error::KernelError;

/// A weight of a base product.
#[derive(Clone, Copy, Debug)]
pub struct WeightView<'a> {
    values: WeightValues<'a>,
    features: Features,
}

/// The values of a weight, by dtype.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum WeightValues<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// IEEE half precision.
    F16(&'a [f16]),
    /// bfloat16.
    Bf16(&'a [bf16]),
}

impl WeightValues<'_> {
    fn len(&self) -> usize {
        match self {
            WeightValues::F32(values) => values.len(),
            WeightValues::F16(values) => values.len(),
            WeightValues::Bf16(values) => values.len(),
        }
    }
}

impl<'a> WeightView<'a> {
    /// Views `values` as a weight; there must be `out_features` × `in_features` of them, neither 0.
    pub fn new(values: WeightValues<'a>, features: Features) -> Result<Self, KernelError> {
        let Features { in_features, out_features } = features;
        let values_expected = in_features.checked_mul(out_features);
        if values_expected != Some(values.len()) || values.len() == 0 {
            return Err(KernelError::WeightSize { out_features, in_features, values: values.len() });
        }
        Ok(WeightView { values, features })
    }

    /// A single-precision weight.
    pub fn f32(values: &'a [f32], features: Features) -> Result<Self, KernelError> {
        Self::new(WeightValues::F32(values), features)
    }

    /// A half-precision weight.
    pub fn f16(values: &'a [f16], features: Features) -> Result<Self, KernelError> {
        Self::new(WeightValues::F16(values), features)
    }

    /// A bfloat16 weight.
    pub fn bf16(values: &'a [bf16], features: Features) -> Result<Self, KernelError> {
        Self::new(WeightValues::Bf16(values), features)
    }

    /// The values.
    pub fn values(&self) -> WeightValues<'a> {
        self.values
    }

    /// Input and output width.
    pub fn features(&self) -> Features {
        self.features
    }

    /// One value, widened.
    ///
    /// # Panics
    /// If the indices are out of range.
    pub fn value(&self, output: usize, input: usize) -> f32 {
        let index = output * self.features.in_features + input;
        match self.values {
            WeightValues::F32(values) => values[index],
            WeightValues::F16(values) => values[index].to_f32(),
            WeightValues::Bf16(values) => values[index].to_f32(),
        }
    }
}
