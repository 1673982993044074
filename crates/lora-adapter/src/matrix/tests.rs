//! Conversions against rounding done by hand from the neighbours of a value, and the reasons for refusing one.

use super::*;

fn matrix(dtype: FileDtype, bytes: Vec<u8>) -> Matrix {
    let cols = bytes.len() / dtype.bytes();
    let range = 0..bytes.len();
    Matrix::from_bytes("m".into(), [1, cols], dtype, Arc::new(bytes), range).unwrap()
}

fn from_f64(values: &[f64]) -> Matrix {
    matrix(FileDtype::F64, values.iter().flat_map(|value| value.to_le_bytes()).collect())
}

fn write(matrix: &Matrix, dtype: SlotDtype) -> Result<Vec<u8>, MatrixError> {
    let mut out = vec![0xaa; matrix.num_elements() * dtype.bytes()];
    matrix.write_as(dtype, &mut out).map(|()| out)
}

/// The nearest of all finite f16 or bf16, ties to the even one, found by trying every one of them.
fn nearest(value: f64, of: fn(u16) -> f64) -> u16 {
    let distance = |bits: &u16| (of(*bits) - value).abs();
    let candidates = (0..=u16::MAX).filter(|bits| of(*bits).is_finite());
    candidates.min_by(|a, b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1)))).unwrap()
}

fn hard_values() -> Vec<f64> {
    let mut values =
        vec![1.0 + 2f64.powi(-11), 1.0 + 3.0 * 2f64.powi(-11), 1.0 + 2f64.powi(-8), 1.0 + 3.0 * 2f64.powi(-8)];
    // A hair beside a tie, which f32 cannot tell from it and f64 can.
    values.extend([1.0 + 2f64.powi(-11) + 2f64.powi(-40), 1.0 + 2f64.powi(-8) - 2f64.powi(-40)]);
    values.extend([65519.0, 6.1e-5, 5.9e-8, 2f64.powi(-25), 2f64.powi(-25) * 1.01, 1e-30, 0.1, 1.0 / 3.0, 2047.5]);
    values.extend(values.clone().iter().map(|value| -value));
    values
}

#[test]
fn rounding_is_to_nearest_even_from_every_dtype() {
    type Value = fn(u16) -> f64;
    let halves: [(SlotDtype, Value); 2] = [
        (SlotDtype::F16, |bits| f16::from_bits(bits).to_f64()),
        (SlotDtype::Bf16, |bits| bf16::from_bits(bits).to_f64()),
    ];
    let wide = from_f64(&hard_values());
    let singles: Vec<f32> = hard_values().iter().map(|value| *value as f32).collect();
    let single = Matrix::from_f32(1, singles.len(), &singles).unwrap();
    for (dtype, of) in halves {
        for matrix in [&wide, &single] {
            let out = write(matrix, dtype).unwrap();
            for (index, raw) in out.as_chunks::<2>().0.iter().enumerate() {
                let (value, got) = (matrix.value(index), of(u16::from_le_bytes(*raw)));
                assert_eq!(got, of(nearest(value, of)), "{value:e} from {} to {}", matrix.dtype(), dtype.name());
                assert_eq!(got.is_sign_negative(), value.is_sign_negative());
            }
        }
    }
    let out = write(&wide, SlotDtype::F32).unwrap();
    let written: Vec<f32> = out.as_chunks().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect();
    assert_eq!(written, singles);
    assert_eq!(wide.to_f32(), singles);
}

/// Every finite value of the two half types comes back from f32 as it went, and crosses to the other type rounded.
#[test]
fn halves_widen_exactly() {
    for (dtype, same, of) in [
        (FileDtype::F16, SlotDtype::F16, (|bits| f16::from_bits(bits).to_f32()) as fn(u16) -> f32),
        (FileDtype::Bf16, SlotDtype::Bf16, |bits| bf16::from_bits(bits).to_f32()),
    ] {
        let bits: Vec<u16> = (0..=u16::MAX).filter(|bits| of(*bits).is_finite()).collect();
        let narrow = matrix(dtype, bits.iter().flat_map(|bits| bits.to_le_bytes()).collect());
        let wide = write(&narrow, SlotDtype::F32).unwrap();
        assert_eq!(write(&matrix(FileDtype::F32, wide), same).unwrap(), narrow.bytes());
        assert_eq!(write(&narrow, same).unwrap(), narrow.bytes());
    }
}

#[test]
fn values_that_a_slot_cannot_hold_are_refused() {
    let mut values = vec![0.5f32; 3000];
    values[2001] = 70_000.0;
    let matrix = Matrix::from_f32(2, 1500, &values).unwrap();
    let error = write(&matrix, SlotDtype::F16).unwrap_err();
    let expected = MatrixError::Overflow {
        tensor: "matrix in memory".into(),
        row: 1,
        col: 501,
        value: 70_000.0,
        dtype: SlotDtype::F16,
    };
    assert_eq!(error, expected);
    assert_eq!(error.to_string(), "matrix in memory: element [1, 501] is 70000, which f16 cannot hold (largest 65504)");
    assert!(write(&matrix, SlotDtype::Bf16).is_ok() && write(&matrix, SlotDtype::F32).is_ok());
    for (value, dtype, fits) in [
        (65_519.999_999_999, SlotDtype::F16, true),
        (65_520.0, SlotDtype::F16, false),
        (-65_520.0, SlotDtype::F16, false),
        (3.39e38, SlotDtype::Bf16, true),
        (f64::from(f32::MAX), SlotDtype::Bf16, false),
        (f64::from(f32::MAX), SlotDtype::F32, true),
        (1e39, SlotDtype::F32, false),
        (1e39, SlotDtype::F16, false),
        (-1e300, SlotDtype::Bf16, false),
    ] {
        let result = write(&from_f64(&[0.0, value]), dtype);
        assert_eq!(result.is_ok(), fits, "{value} as {}", dtype.name());
        if let Err(error) = result {
            assert!(matches!(error, MatrixError::Overflow { col: 1, value: found, .. } if found == value));
        }
    }
}

#[test]
fn destinations_of_another_size_are_refused() {
    let matrix = Matrix::from_f32(2, 2, &[1.0; 4]).unwrap();
    let error = matrix.write_as(SlotDtype::Bf16, &mut [0; 7]).unwrap_err();
    assert_eq!(error, MatrixError::WrongDestination { tensor: "matrix in memory".into(), expected: 8, found: 7 });
}

#[test]
fn a_value_that_is_not_finite_is_found_beyond_the_first_block() {
    let mut values = vec![1.0f32; 40_000];
    values[33_333] = f32::INFINITY;
    let error = Matrix::from_f32(200, 200, &values).unwrap_err();
    let tensor = "matrix in memory".into();
    assert_eq!(error, MatrixError::NonFinite { tensor, row: 166, col: 133, value: f64::INFINITY });
}

#[test]
fn matrices_of_equal_contents_are_equal_whatever_their_name() {
    let one = Matrix::from_f32(2, 3, &[0.5; 6]).unwrap();
    let two = one.clone().renamed("other".into());
    assert_eq!(one, two);
    assert_eq!(one.digest(), blake3::hash(one.bytes()).as_bytes());
    assert_ne!(one, Matrix::from_f32(3, 2, &[0.5; 6]).unwrap());
}

/// Every value of the 8-bit types against the formula of their standard, and exact in every slot.
#[test]
fn eight_bit_types_widen_exactly() {
    for (dtype, exponent_bits, bias) in [(FileDtype::F8E4m3, 4, 7), (FileDtype::F8E5m2, 5, 15)] {
        let mantissa_bits = 7 - exponent_bits;
        for bits in 0..=u8::MAX {
            let (exponent, mantissa) =
                (i32::from(bits & 0x7f) >> mantissa_bits, i32::from(bits) & ((1 << mantissa_bits) - 1));
            let fraction = f64::from(mantissa) / f64::from(1 << mantissa_bits);
            let value = match exponent {
                0 => fraction * 2f64.powi(1 - bias),
                _ => (1.0 + fraction) * 2f64.powi(exponent - bias),
            };
            let value = if bits & 0x80 == 0 { value } else { -value };
            let is_special = match dtype {
                FileDtype::F8E4m3 => bits & 0x7f == 0x7f,
                _ => exponent == 31,
            };
            let made = Matrix::from_bytes("m".into(), [1, 1], dtype, Arc::new(vec![bits]), 0..1);
            if is_special {
                assert!(matches!(made, Err(MatrixError::NonFinite { .. })), "{dtype} {bits:#x}");
                continue;
            }
            let made = made.unwrap();
            assert_eq!((made.value(0), f64::from(made.to_f32()[0])), (value, value), "{dtype} {bits:#x}");
            let f32_bytes = write(&made, SlotDtype::F32).unwrap();
            assert_eq!(f64::from(f32::from_le_bytes(f32_bytes.try_into().unwrap())), value);
            let half = write(&made, SlotDtype::F16).unwrap();
            assert_eq!(f16::from_le_bytes(half.try_into().unwrap()).to_f64(), value);
            let half = write(&made, SlotDtype::Bf16).unwrap();
            assert_eq!(bf16::from_le_bytes(half.try_into().unwrap()).to_f64(), value);
        }
    }
}
