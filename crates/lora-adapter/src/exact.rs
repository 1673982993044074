//! Which element type of a pool holds an adapter without rounding.

use lora_math::SlotDtype;

use crate::matrix::FileDtype;

/// The narrowest element type that holds every number of matrices with these dtypes exactly; none where there is no
/// such type (float64 has none).
pub fn exact_slot_dtype(dtypes: impl IntoIterator<Item = FileDtype>) -> Option<SlotDtype> {
    let exact = |dtype| match dtype {
        FileDtype::F64 => None,
        FileDtype::F32 => Some(SlotDtype::F32),
        FileDtype::F16 => Some(SlotDtype::F16),
        // Both 8-bit types fit in bf16, and in f16 as well.
        FileDtype::Bf16 | FileDtype::F8E4m3 | FileDtype::F8E5m2 => Some(SlotDtype::Bf16),
    };
    let mut dtypes = dtypes.into_iter();
    let Some(first) = dtypes.next() else { return Some(SlotDtype::Bf16) };
    // Two different ones meet in f32: neither of f16 and bf16 holds the other.
    dtypes.try_fold(exact(first)?, |held, dtype| {
        let dtype = exact(dtype)?;
        Some(if dtype == held { held } else { SlotDtype::F32 })
    })
}

#[cfg(test)]
mod tests {
    use super::exact_slot_dtype;
    use crate::matrix::FileDtype::{Bf16, F8E4m3, F8E5m2, F16, F32, F64};
    use lora_math::SlotDtype;

    #[test]
    fn the_narrowest_type_that_rounds_nothing() {
        for (dtypes, expected) in [
            (vec![], Some(SlotDtype::Bf16)),
            (vec![Bf16, Bf16], Some(SlotDtype::Bf16)),
            (vec![F8E4m3, F8E5m2, Bf16], Some(SlotDtype::Bf16)),
            (vec![F16], Some(SlotDtype::F16)),
            (vec![F16, Bf16], Some(SlotDtype::F32)),
            (vec![Bf16, F32, Bf16], Some(SlotDtype::F32)),
            (vec![Bf16, F64], None),
            (vec![F64], None),
        ] {
            assert_eq!(exact_slot_dtype(dtypes.clone()), expected, "{dtypes:?}");
        }
    }
}
