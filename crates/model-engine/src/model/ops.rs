//! Arithmetic on single rows: RMS norm, rotation, SwiGLU, the exponential under both softmax and sigmoid.
//!
//! Plain loops over fixed lanes: the order of every sum is written down here, so a row's bits depend on the row alone,
//! on every processor. Matrix products are the kernels' work, attention its own module's.

/// Partial sums of a reduction. Eight vector registers of four, or one of sixteen: enough for every processor.
pub(crate) const LANES: usize = 16;

/// `Σ x²`, as [`LANES`] interleaved sums added pairwise.
fn sum_of_squares(x: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let mut chunks = x.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (lane, element) in lanes.iter_mut().zip(chunk) {
            *lane += element * element;
        }
    }
    for (lane, element) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane += element * element;
    }
    add_lanes(lanes)
}

/// The sum of all lanes: halves added until one is left.
#[inline(always)]
pub(crate) fn add_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (sum_of_squares(x) / x.len() as f32 + eps).sqrt()
}

/// `out = weight · (x / √(mean(x²) + eps))`, all of one width (RMSNorm, <https://arxiv.org/abs/1910.07467>).
pub(crate) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = inverse_rms(x, eps);
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = weight * (x * scale);
    }
}

/// [`rms_norm`] in place.
pub(crate) fn rms_norm_in_place(x: &mut [f32], weight: &[f32], eps: f32) {
    let scale = inverse_rms(x, eps);
    for (x, weight) in x.iter_mut().zip(weight) {
        *x = weight * (*x * scale);
    }
}

/// Turns one head in place: element `i` with element `i + head_dim / 2` by the angle of pair `i`.
pub(crate) fn rotate_half(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, second) = head.split_at_mut(cos.len());
    for (((first, second), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        let (a, b) = (*first, *second);
        *first = a * cos - b * sin;
        *second = b * cos + a * sin;
    }
}

/// `gate = silu(gate) · up`, where `silu(g) = g / (1 + exp(−g))`.
pub(crate) fn silu_mul(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = *gate / (1.0 + exp(-*gate)) * up;
    }
}

/// `x += delta`.
pub(crate) fn add(x: &mut [f32], delta: &[f32]) {
    for (x, delta) in x.iter_mut().zip(delta) {
        *x += delta;
    }
}

/// `exp(x)` within two units in the last place; arguments below −87.3 and above 88.3 are clamped to those.
///
/// The argument is split as `x = n·ln 2 + r` with `|r| ≤ ln 2 / 2`, `ln 2` in two parts so that `r` keeps its bits, and
/// `exp(r)` is its Taylor polynomial of degree 7. No branch and no table, so that loops over it become vector code.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    /// `1.5 · 2²³`: adding it leaves the nearest integer in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let x = x.clamp(-87.3, 88.3);
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    let mut sum = 1.0 / 5040.0;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        sum = sum * r + coefficient;
    }
    let power_of_two = f32::from_bits((shifted.to_bits() << 23).wrapping_add(1.0f32.to_bits()));
    sum * power_of_two
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_agrees_with_float64_over_its_range() {
        let mut worst = 0.0f64;
        for step in -87_000..=88_000 {
            let x = step as f32 * 1e-3;
            let expected = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) - expected).abs() / expected);
        }
        assert!(worst < 2.0 * f64::from(f32::EPSILON), "largest relative error {worst:e}");
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NEG_INFINITY) < 1.3e-38 && exp(f32::INFINITY).is_finite());
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn norm_and_rotation_follow_their_formulas() {
        let x: Vec<f32> = (0..37).map(|i| (i as f32 * 0.7).sin()).collect();
        let weight: Vec<f32> = (0..37).map(|i| 1.0 + i as f32 * 0.01).collect();
        let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / 37.0;
        let mut normed = vec![0.0; 37];
        rms_norm(&x, &weight, 1e-5, &mut normed);
        for ((normed, x), weight) in normed.iter().zip(&x).zip(&weight) {
            let expected = f64::from(*weight) * f64::from(*x) / (mean + 1e-5).sqrt();
            assert!((f64::from(*normed) - expected).abs() < 1e-6);
        }
        let mut in_place = x.clone();
        rms_norm_in_place(&mut in_place, &weight, 1e-5);
        assert_eq!(in_place, normed);

        let mut head = [1.0, 2.0, 3.0, 4.0];
        rotate_half(&mut head, &[0.0, 1.0], &[1.0, 0.0]);
        assert_eq!(head, [-3.0, 2.0, 1.0, 4.0]);
    }

    #[test]
    fn silu_gates_by_the_sigmoid() {
        let mut gate = [-100.0, -1.0, 0.0, 2.0, 100.0];
        silu_mul(&mut gate, &[1.0, 2.0, 3.0, 4.0, 5.0]);
        for (found, expected) in gate.iter().zip([0.0, -0.537_882_84, 0.0, 7.046_376_6, 500.0]) {
            assert!((found - expected).abs() < 1e-5, "{found} for {expected}");
        }
    }
}
