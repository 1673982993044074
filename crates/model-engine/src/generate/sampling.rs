//! The next token from logits: the largest, or a draw at a temperature.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::model::ops::exp;

/// Draws tokens for one request.
#[derive(Debug, Clone)]
pub(crate) struct Sampler {
    temperature: f32,
    rng: StdRng,
    /// Weights and their running sums; kept between tokens so that a draw allocates nothing.
    weights: Vec<f32>,
    cumulative: Vec<f64>,
}

impl Sampler {
    /// A sampler; equal seeds give equal draws.
    pub(crate) fn new(temperature: f32, seed: u64) -> Self {
        Sampler { temperature, rng: StdRng::seed_from_u64(seed), weights: Vec::new(), cumulative: Vec::new() }
    }

    /// The next token; at temperature 0 the one with the largest logit, and of equals the first.
    pub(crate) fn sample(&mut self, logits: &[f32]) -> u32 {
        let best = largest(logits);
        if self.temperature <= 0.0 {
            return best as u32;
        }
        let (top, temperature) = (logits[best], self.temperature);
        self.weights.clear();
        self.weights.extend(logits.iter().map(|logit| exp((logit - top) / temperature)));
        let mut sum = 0.0;
        self.cumulative.clear();
        self.cumulative.extend(self.weights.iter().map(|weight| {
            sum += f64::from(*weight);
            sum
        }));
        let drawn = self.rng.random::<f64>() * sum;
        let token = self.cumulative.partition_point(|cumulative| *cumulative <= drawn);
        token.min(logits.len() - 1) as u32
    }
}

fn largest(logits: &[f32]) -> usize {
    let mut best = 0;
    for (index, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = index;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        let mut sampler = Sampler::new(0.0, 1);
        assert_eq!(sampler.sample(&[0.5, 2.0, -1.0, 2.0]), 1);
    }

    #[test]
    fn a_tiny_temperature_is_as_good_as_none() {
        let mut sampler = Sampler::new(1e-42, 3);
        assert!((0..100).all(|_| sampler.sample(&[0.5, 2.0, -1.0, 1.999]) == 1));
    }

    #[test]
    fn draws_follow_the_softmax_and_the_seed() {
        let logits = [0.0, 1.0, -1.0, 2.0, f32::NEG_INFINITY];
        for temperature in [0.5f32, 1.0, 2.0] {
            let weights = logits.map(|logit| (f64::from(logit) / f64::from(temperature)).exp());
            let sum: f64 = weights.iter().sum();
            let mut sampler = Sampler::new(temperature, 7);
            let mut counts = [0.0f64; 5];
            let draws: Vec<u32> = (0..20_000).map(|_| sampler.sample(&logits)).collect();
            draws.iter().for_each(|token| counts[*token as usize] += 1.0);
            for (count, weight) in counts.iter().zip(weights) {
                // Five standard deviations of the count.
                let probability = weight / sum;
                let bound = 5.0 * (20_000.0 * probability * (1.0 - probability)).sqrt();
                assert!((count - 20_000.0 * probability).abs() <= bound, "{counts:?} at {temperature}");
            }
            let mut again = Sampler::new(temperature, 7);
            assert!(draws.iter().take(100).all(|token| *token == again.sample(&logits)));
            let mut other = Sampler::new(temperature, 8);
            assert!(draws.iter().take(100).any(|token| *token != other.sample(&logits)));
        }
    }
}
