//! Rotary position embedding: inverse frequencies and tables of cosines and sines, in the half-rotation layout.
//!
//! Half rotation pairs element `i` of a head with element `i + head_dim / 2`; both turn by
//! `position · inv_freq[i]`. The arithmetic follows transformers (`modeling_rope_utils.py` and the rotary modules of
//! Llama, Qwen2 and Qwen3) step by step in f32, since an f32 angle at a far position carries the rounding of every
//! step before it. Applying the rotation to q and k is the forward pass's work.
//!
//! | rule | frequencies | source |
//! |---|---|---|
//! | default | `1 / theta^(2i / head_dim)` | RoFormer, <https://arxiv.org/abs/2104.09864> |
//! | linear | default over `factor` | transformers `_compute_linear_scaling_rope_parameters` |
//! | dynamic | default with a base that grows with the sequence | transformers `_compute_dynamic_ntk_parameters` |
//! | yarn | a ramp between default and default over `factor` | YaRN, <https://arxiv.org/abs/2309.00071> |
//! | llama3 | piecewise over wavelengths | transformers `_compute_llama3_parameters` |
//! | divisors | default over one divisor each | llama.cpp `rope_freqs.weight` |

use std::f32::consts::PI;

use crate::checkpoint::config::{Llama3Scaling, RopeConfig, RopeScaling, YarnScaling};

/// Why a table cannot be built. The configuration has to change; a retry cannot help.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RopeError {
    /// The head cannot be split into two equal halves.
    #[error("rotary embedding needs an even head_dim of at least 2, found {head_dim}")]
    HeadDim {
        /// What was asked for.
        head_dim: usize,
    },
    /// A number is outside the range in which the rule is defined.
    #[error("rope {name} is {value}, expected {expected}")]
    OutOfRange {
        /// Which number.
        name: &'static str,
        /// Its value.
        value: f64,
        /// The range that is accepted.
        expected: &'static str,
    },
    /// There is not one divisor for each frequency.
    #[error("rope has {found} frequency divisors, expected head_dim / 2 = {expected}")]
    NumDivisors {
        /// `head_dim / 2`.
        expected: usize,
        /// How many there are.
        found: usize,
    },
}

/// Cosines and sines by position, grown by [`RopeTable::reserve`].
#[derive(Debug, Clone)]
pub struct RopeTable {
    theta: f64,
    dynamic: Option<DynamicScaling>,
    inv_freq: Vec<f32>,
    attention_factor: f32,
    /// One row a position: `head_dim / 2` cosines, then as many sines.
    rows: Vec<f32>,
}

#[derive(Debug, Clone, Copy)]
struct DynamicScaling {
    factor: f64,
    max_position_embeddings: usize,
}

impl RopeTable {
    /// A table of positions `0..num_positions` for heads of width `head_dim`.
    ///
    /// # Errors
    /// [`RopeError`] when a number of the configuration is outside the range its rule is defined for.
    pub fn new(config: &RopeConfig, head_dim: usize, num_positions: usize) -> Result<Self, RopeError> {
        let inv_freq = inverse_frequencies(config, head_dim)?;
        let attention_factor = match &config.scaling {
            RopeScaling::Yarn(yarn) => yarn.attention_factor as f32,
            _ => 1.0,
        };
        let dynamic = match config.scaling {
            RopeScaling::Dynamic { factor, max_position_embeddings } => {
                Some(DynamicScaling { factor, max_position_embeddings })
            }
            _ => None,
        };
        let mut table = Self { theta: config.theta, dynamic, inv_freq, attention_factor, rows: Vec::new() };
        table.reserve(num_positions);
        Ok(table)
    }

    /// The frequencies by which positions are multiplied, `[head_dim / 2]`, radians per token.
    ///
    /// Under dynamic scaling these are the ones for sequences up to the trained length.
    #[must_use]
    pub fn inv_freq(&self) -> &[f32] {
        &self.inv_freq
    }

    /// The factor already contained in every cosine and sine of the table.
    #[must_use]
    pub fn attention_factor(&self) -> f32 {
        self.attention_factor
    }

    /// The longest sequence whose rotations are the table's own; `None` when the length never matters.
    ///
    /// Past it (dynamic scaling only) a rotation depends on the sequence's length too: use
    /// [`RopeTable::write_cos_sin`].
    #[must_use]
    pub fn max_fixed_length(&self) -> Option<usize> {
        self.dynamic.map(|dynamic| dynamic.max_position_embeddings)
    }

    /// How many positions the table holds.
    #[must_use]
    pub fn num_positions(&self) -> usize {
        self.rows.len() / (2 * self.inv_freq.len())
    }

    /// Grows the table so that it holds positions `0..num_positions` at least.
    pub fn reserve(&mut self, num_positions: usize) {
        let half = self.inv_freq.len();
        let first = self.num_positions();
        if num_positions <= first {
            return;
        }
        self.rows.resize(num_positions * 2 * half, 0.0);
        for (row, position) in self.rows.chunks_exact_mut(2 * half).zip(0..).skip(first) {
            let (cos, sin) = row.split_at_mut(half);
            rotate(&self.inv_freq, self.attention_factor, position, cos, sin);
        }
    }

    /// Cosines and sines of `position`, `[head_dim / 2]` each.
    ///
    /// # Panics
    /// When `position` is not below [`RopeTable::num_positions`]: the caller reserves before it steps.
    #[must_use]
    pub fn cos_sin(&self, position: usize) -> (&[f32], &[f32]) {
        let half = self.inv_freq.len();
        self.rows[position * 2 * half..(position + 1) * 2 * half].split_at(half)
    }

    /// Writes cosines and sines of `position` in a sequence of `sequence_length` tokens, `[head_dim / 2]` each.
    ///
    /// Needs no reserved rows. For a prompt `sequence_length` is the whole prompt's length, whatever chunks it is cut
    /// in, and for a decoded token its position + 1: the lengths that transformers' dynamic rule sees when one
    /// sequence runs alone. Where the length does not matter the result equals [`RopeTable::cos_sin`].
    ///
    /// # Panics
    /// When `cos` or `sin` is not `head_dim / 2` long.
    pub fn write_cos_sin(&self, position: usize, sequence_length: usize, cos: &mut [f32], sin: &mut [f32]) {
        assert_eq!((cos.len(), sin.len()), (self.inv_freq.len(), self.inv_freq.len()), "rope row width");
        match self.dynamic {
            Some(dynamic) if sequence_length > dynamic.max_position_embeddings => {
                let inv_freq = dynamic_frequencies(self.theta, dynamic, 2 * self.inv_freq.len(), sequence_length);
                rotate(&inv_freq, self.attention_factor, position, cos, sin);
            }
            _ if position < self.num_positions() => {
                let (known_cos, known_sin) = self.cos_sin(position);
                cos.copy_from_slice(known_cos);
                sin.copy_from_slice(known_sin);
            }
            _ => rotate(&self.inv_freq, self.attention_factor, position, cos, sin),
        }
    }
}

fn rotate(inv_freq: &[f32], attention_factor: f32, position: usize, cos: &mut [f32], sin: &mut [f32]) {
    for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(inv_freq) {
        let angle = position as f32 * frequency;
        *cos = angle.cos() * attention_factor;
        *sin = angle.sin() * attention_factor;
    }
}

/// `[head_dim / 2]` inverse frequencies of `config`.
fn inverse_frequencies(config: &RopeConfig, head_dim: usize) -> Result<Vec<f32>, RopeError> {
    if head_dim < 2 || !head_dim.is_multiple_of(2) {
        return Err(RopeError::HeadDim { head_dim });
    }
    above("theta", config.theta, 0.0, "a finite number above 0")?;
    let base = config.theta as f32;
    let default = || frequencies(base, head_dim);
    Ok(match &config.scaling {
        RopeScaling::Default => default(),
        RopeScaling::Linear { factor } => {
            above("factor", *factor, 0.0, "a finite number above 0")?;
            default().into_iter().map(|frequency| frequency / *factor as f32).collect()
        }
        RopeScaling::Dynamic { factor, max_position_embeddings } => {
            above("factor", *factor, 0.0, "a finite number above 0")?;
            above("max_position_embeddings", *max_position_embeddings as f64, 0.0, "at least 1")?;
            // The exponent of the growth is dim / (dim - 2).
            if head_dim < 4 {
                return Err(RopeError::HeadDim { head_dim });
            }
            default()
        }
        RopeScaling::Yarn(yarn) => yarn_frequencies(config.theta, yarn, head_dim)?,
        RopeScaling::Llama3(llama3) => llama3_frequencies(llama3, default())?,
        RopeScaling::Divisors(divisors) => {
            if divisors.len() != head_dim / 2 {
                return Err(RopeError::NumDivisors { expected: head_dim / 2, found: divisors.len() });
            }
            for divisor in divisors {
                above("frequency divisor", f64::from(*divisor), 0.0, "a finite number above 0")?;
            }
            default().into_iter().zip(divisors).map(|(frequency, divisor)| frequency / divisor).collect()
        }
    })
}

fn above(name: &'static str, value: f64, limit: f64, expected: &'static str) -> Result<(), RopeError> {
    if value.is_finite() && value > limit { Ok(()) } else { Err(RopeError::OutOfRange { name, value, expected }) }
}

/// `base^(2i / dim)` for each pair `i`.
fn position_frequencies(base: f32, dim: usize) -> impl Iterator<Item = f32> {
    (0..dim / 2).map(move |pair| base.powf((2 * pair) as f32 / dim as f32))
}

fn frequencies(base: f32, dim: usize) -> Vec<f32> {
    position_frequencies(base, dim).map(|frequency| 1.0 / frequency).collect()
}

/// The base becomes `theta · (factor · length / max - (factor - 1))^(dim / (dim - 2))`, in f32 as transformers'
/// tensor arithmetic does it.
fn dynamic_frequencies(theta: f64, dynamic: DynamicScaling, dim: usize, sequence_length: usize) -> Vec<f32> {
    let factor = dynamic.factor;
    let ratio = factor as f32 * sequence_length as f32 / dynamic.max_position_embeddings as f32;
    let growth = ratio - (factor - 1.0) as f32;
    let exponent = (dim as f64 / (dim as f64 - 2.0)) as f32;
    frequencies(theta as f32 * growth.powf(exponent), dim)
}

/// Frequencies turning more than `beta_fast` times over the trained length stay, those turning less than `beta_slow`
/// times are divided by `factor`, and between them the mixture changes linearly with the dimension.
fn yarn_frequencies(theta: f64, yarn: &YarnScaling, dim: usize) -> Result<Vec<f32>, RopeError> {
    let &YarnScaling { factor, attention_factor, beta_fast, beta_slow, .. } = yarn;
    above("factor", factor, 0.0, "a finite number above 0")?;
    above("attention_factor", attention_factor, 0.0, "a finite number above 0")?;
    above("beta_fast", beta_fast, 0.0, "a finite number above 0")?;
    above("beta_slow", beta_slow, 0.0, "a finite number above 0")?;
    above("theta", theta, 1.0, "a finite number above 1")?;
    let trained = yarn.original_max_position_embeddings as f64;
    above("original_max_position_embeddings", trained, 0.0, "at least 1")?;

    let dimension_of =
        |rotations: f64| dim as f64 * (trained / (rotations * 2.0 * std::f64::consts::PI)).ln() / (2.0 * theta.ln());
    let (mut low, mut high) = (dimension_of(beta_fast), dimension_of(beta_slow));
    if yarn.truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    let (low, mut high) = (low.max(0.0), high.min(dim as f64 - 1.0));
    if low == high {
        // A ramp of no width would divide by zero.
        high += 0.001;
    }
    Ok(position_frequencies(theta as f32, dim)
        .enumerate()
        .map(|(pair, frequency)| {
            let ramp = ((pair as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
            let kept = 1.0 - ramp;
            let interpolated = 1.0 / (factor as f32 * frequency);
            interpolated * (1.0 - kept) + 1.0 / frequency * kept
        })
        .collect())
}

/// Wavelengths over `trained / low_freq_factor` are divided by `factor`, those under `trained / high_freq_factor`
/// stay, those between are mixed.
fn llama3_frequencies(llama3: &Llama3Scaling, default: Vec<f32>) -> Result<Vec<f32>, RopeError> {
    let &Llama3Scaling { factor, low_freq_factor, high_freq_factor, .. } = llama3;
    above("factor", factor, 0.0, "a finite number above 0")?;
    above("low_freq_factor", low_freq_factor, 0.0, "a finite number above 0")?;
    above("high_freq_factor", high_freq_factor, low_freq_factor, "a finite number above low_freq_factor")?;
    let trained = llama3.original_max_position_embeddings as f64;
    above("original_max_position_embeddings", trained, 0.0, "at least 1")?;

    let longest = (trained / low_freq_factor) as f32;
    let shortest = (trained / high_freq_factor) as f32;
    let factor = factor as f32;
    let (low, width) = (low_freq_factor as f32, (high_freq_factor - low_freq_factor) as f32);
    Ok(default
        .into_iter()
        .map(|frequency| {
            let wavelength = 2.0 * PI / frequency;
            if wavelength > longest {
                frequency / factor
            } else if wavelength < shortest {
                frequency
            } else {
                let smooth = (trained as f32 / wavelength - low) / width;
                (1.0 - smooth) * frequency / factor + smooth * frequency
            }
        })
        .collect())
}
