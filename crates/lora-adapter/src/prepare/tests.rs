//! Against double-precision sums written out here: the whole site, `W·x` with everything on it, and every refusal. Long
//! because one base and its sums serve all of it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use lora_math::shape::{AttentionSize, MlpSize};
use lora_math::{Features, LayerShape, ModelShape, Module, NormSite, ScalingRule, Site};

use super::*;
use crate::extras::Settings;
use crate::matrix::Matrix;

/// A base with weights of its own at every site, biases on q, k and v.
struct Base {
    is_tied: bool,
    shape: ModelShape,
    weights: BTreeMap<Site, Vec<f32>>,
}

fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

const Q: Site = Site::Layer { layer: 0, module: Module::QProj };
const UP: Site = Site::Layer { layer: 0, module: Module::UpProj };
const DOWN: Site = Site::Layer { layer: 0, module: Module::DownProj };
const EMBED: Site = Site::Vocabulary { module: Module::EmbedTokens };
const HEAD: Site = Site::Vocabulary { module: Module::LmHead };

impl Base {
    fn new() -> Self {
        let layer = LayerShape::new()
            .with_attention(AttentionSize { hidden_size: 12, q_features: 12, kv_features: 6, o_features: 12 })
            .with_mlp(MlpSize { hidden_size: 12, intermediate_size: 20 });
        let shape = ModelShape::uniform(12, 30, 1, layer).unwrap();
        let sites = [Q, UP, DOWN, EMBED, HEAD].into_iter().zip(100..);
        let weights = sites.map(|(site, seed)| {
            let Features { in_features, out_features } = shape.features(site).unwrap();
            (site, numbers(seed, in_features * out_features))
        });
        Base { is_tied: false, weights: weights.collect(), shape }
    }

    fn width(&self, site: Site) -> usize {
        let Features { in_features, out_features } = self.shape.features(site).unwrap();
        if site == EMBED { out_features } else { in_features }
    }
}

impl BaseWeights for Base {
    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    fn is_tied(&self) -> bool {
        self.is_tied
    }

    fn read_rows(&self, site: Site, first_row: usize, rows: &mut [f32]) -> bool {
        let begin = first_row * self.width(site);
        let found = self.weights.get(&site).and_then(|weight| weight.get(begin..begin + rows.len()));
        found.map(|found| rows.copy_from_slice(found)).is_some()
    }

    fn bias(&self, site: Site) -> Option<Vec<f32>> {
        (site == Q).then(|| numbers(7, 12))
    }

    fn norm(&self, site: NormSite) -> Option<Vec<f32>> {
        (site == NormSite::Final).then(|| vec![1.0; 12])
    }
}

fn pair(base: &Base, site: Site, rank: usize, seed: u64) -> LoraPair {
    let Features { in_features, out_features } = base.shape.features(site).unwrap();
    let a = Matrix::from_f32(rank, in_features, &numbers(seed, rank * in_features)).unwrap();
    let b = Matrix::from_f32(out_features, rank, &numbers(seed + 1, out_features * rank)).unwrap();
    LoraPair::new(a, b, 1.5 * rank as f64, ScalingRule::Standard).unwrap()
}

fn row(values: &[f32]) -> Matrix {
    Matrix::from_f32(1, values.len(), values).unwrap()
}

fn adapter(pairs: Vec<(Site, LoraPair)>, extras: Vec<(Extra, Matrix)>, base_init: BaseInit) -> Adapter {
    let settings = Settings { base_init, ..Settings::default() };
    Adapter::new(pairs.into_iter().collect(), Vec::new(), Default::default())
        .carrying(extras.into_iter().collect(), settings)
}

fn prepared(base: &Base, adapter: Adapter) -> PreparedAdapter {
    prepare_with(adapter, base, &PrepareOptions::default()).unwrap_or_else(|refusal| panic!("{refusal}"))
}

fn refused(base: &Base, adapter: Adapter) -> Vec<Misfit> {
    prepare_with(adapter, base, &PrepareOptions::default()).expect_err("refused").reasons
}

/// `s·B·diag·A`, `[out_features, in_features]`.
fn product(pair: &LoraPair, diagonal: &dyn Fn(usize) -> f64) -> Vec<f64> {
    let (a, b, rank, width) = (pair.a().to_f32(), pair.b().to_f32(), pair.rank(), pair.in_features());
    let element = |index: usize| {
        let (out, input) = (index / width, index % width);
        let term = |k: usize| f64::from(b[out * rank + k]) * diagonal(k) * f64::from(a[k * width + input]);
        f64::from(pair.scaling()) * (0..rank).map(term).sum::<f64>()
    };
    (0..pair.out_features() * width).map(element).collect()
}

/// The weight and the bias that a prepared adapter makes of a site: what the engine computes, as one matrix.
fn effect(base: &Base, prepared: &PreparedAdapter, site: Site) -> (Vec<f64>, Vec<f64>) {
    let Features { in_features, out_features } = base.shape.features(site).unwrap();
    let vectors = prepared.vectors().sites.get(&site).cloned().unwrap_or_default();
    let gain = |out: usize| vectors.gain.as_ref().map_or(1.0, |gain| f64::from(gain[out]));
    let delta = prepared.pair(site).map(|pair| product(pair, &|_| 1.0));
    let weight = |index: usize| {
        let (out, input) = (index / in_features, index % in_features);
        // An embedding is [vocab_size, hidden_size], and its pair the transpose.
        let at = if site == EMBED { input * out_features + out } else { index };
        gain(out) * f64::from(base.weights[&site][at]) + delta.as_ref().map_or(0.0, |delta| delta[index])
    };
    let bias = base.bias(site).unwrap_or_else(|| vec![0.0; out_features]);
    let bias = bias.iter().enumerate().map(|(out, bias)| {
        gain(out) * f64::from(*bias) + vectors.shift.as_ref().map_or(0.0, |shift| f64::from(shift[out]))
    });
    ((0..in_features * out_features).map(weight).collect(), bias.collect())
}

#[track_caller]
fn assert_near(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!((found - expected).abs() < 3e-6, "{index}: {found} is not {expected}");
    }
}

/// W as `[out_features, in_features]` in f64.
fn weight(base: &Base, site: Site) -> Vec<f64> {
    let weight: Vec<f64> = base.weights[&site].iter().map(|value| f64::from(*value)).collect();
    if site != EMBED {
        return weight;
    }
    let Features { in_features, out_features } = base.shape.features(site).unwrap();
    (0..in_features * out_features)
        .map(|index| weight[index % in_features * out_features + index / in_features])
        .collect()
}

#[test]
fn dora_scales_every_output_to_its_magnitude() {
    let base = Base::new();
    for site in [Q, UP, DOWN, EMBED, HEAD] {
        let Features { in_features, out_features } = base.shape.features(site).unwrap();
        let pair = pair(&base, site, 3, 20);
        let magnitude = numbers(30, out_features);
        let adapter =
            adapter(vec![(site, pair.clone())], vec![(Extra::Magnitude(site), row(&magnitude))], BaseInit::Kept);
        let (found, bias) = effect(&base, &prepared(&base, adapter), site);
        let whole: Vec<f64> =
            weight(&base, site).iter().zip(product(&pair, &|_| 1.0)).map(|(w, delta)| w + delta).collect();
        let expected = whole.chunks_exact(in_features).zip(&magnitude).flat_map(|(row, magnitude)| {
            let norm = row.iter().map(|value| value * value).sum::<f64>().sqrt();
            row.iter().map(move |value| f64::from(*magnitude) / norm * value)
        });
        assert_near(&found, &expected.collect::<Vec<_>>());
        let base_bias = base.bias(site).unwrap_or_else(|| vec![0.0; out_features]);
        assert_near(&bias, &base_bias.iter().map(|bias| f64::from(*bias)).collect::<Vec<_>>());
    }
}

#[test]
fn biases_and_norms() {
    let base = Base::new();
    let (trained, scaled, norm) = (numbers(40, 12), numbers(41, 12), numbers(42, 12));
    let pair = pair(&base, Q, 2, 20);
    let extras = vec![
        (Extra::Bias(Q), row(&trained)),
        (Extra::LoraBias(Q), row(&scaled)),
        (Extra::Norm(NormSite::Final), row(&norm)),
    ];
    let prepared_q = prepared(&base, adapter(vec![(Q, pair.clone())], extras, BaseInit::Kept));
    let expected = trained.iter().zip(&scaled).map(|(b, c)| f64::from(*b) + f64::from(pair.scaling()) * f64::from(*c));
    assert_near(&effect(&base, &prepared_q, Q).1, &expected.collect::<Vec<_>>());
    assert_eq!(prepared_q.vectors().norms[&NormSite::Final][..], norm);
    assert_eq!(prepared_q.vectors().num_bytes(), 4 * 24);

    // A bias of B where the base has none; a trained bias without a pair; one equal to the base's changes nothing.
    let up = super::tests::pair(&base, UP, 2, 22);
    let bias = numbers(43, 20);
    let prepared_up =
        prepared(&base, adapter(vec![(UP, up.clone())], vec![(Extra::LoraBias(UP), row(&bias))], BaseInit::Kept));
    let expected: Vec<f64> = bias.iter().map(|c| f64::from(up.scaling()) * f64::from(*c)).collect();
    assert_near(&effect(&base, &prepared_up, UP).1, &expected);
    let alone = prepared(&base, adapter(vec![], vec![(Extra::Bias(Q), row(&trained))], BaseInit::Kept));
    assert_near(&effect(&base, &alone, Q).1, &trained.iter().map(|b| f64::from(*b)).collect::<Vec<_>>());
    let same = prepared(&base, adapter(vec![], vec![(Extra::Bias(Q), row(&numbers(7, 12)))], BaseInit::Kept));
    assert!(same.vectors().is_empty());
}

/// Singular vectors on the right, largest first, by one-sided Jacobi rotations of the columns.
fn right_singular_vectors(weight: &[f64], width: usize) -> Vec<Vec<f64>> {
    let height = weight.len() / width;
    let mut columns: Vec<Vec<f64>> = (0..width).map(|c| (0..height).map(|r| weight[r * width + c]).collect()).collect();
    let mut v: Vec<Vec<f64>> = (0..width).map(|c| (0..width).map(|r| f64::from(u8::from(r == c))).collect()).collect();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    for _ in 0..60 {
        for i in 0..width {
            for j in i + 1..width {
                let (alpha, beta, gamma) =
                    (dot(&columns[i], &columns[i]), dot(&columns[j], &columns[j]), dot(&columns[i], &columns[j]));
                if gamma.abs() < 1e-300 {
                    continue;
                }
                let zeta = (beta - alpha) / (2.0 * gamma);
                let t = zeta.signum() / (zeta.abs() + (1.0 + zeta * zeta).sqrt());
                let c = 1.0 / (1.0 + t * t).sqrt();
                let s = c * t;
                for vectors in [&mut columns, &mut v] {
                    for k in 0..vectors[i].len() {
                        let (x, y) = (vectors[i][k], vectors[j][k]);
                        vectors[i][k] = c * x - s * y;
                        vectors[j][k] = s * x + c * y;
                    }
                }
            }
        }
    }
    let mut order: Vec<usize> = (0..width).collect();
    order.sort_by(|a, b| dot(&columns[*b], &columns[*b]).total_cmp(&dot(&columns[*a], &columns[*a])));
    order.into_iter().map(|index| v[index].clone()).collect()
}

/// `W - Σ W·v·vᵀ` over `vectors`.
fn without(weight: &[f64], width: usize, vectors: &[Vec<f64>]) -> Vec<f64> {
    weight
        .chunks_exact(width)
        .flat_map(|row| {
            let mut row = row.to_vec();
            for v in vectors {
                let along: f64 = row.iter().zip(v).map(|(w, v)| w * v).sum();
                row.iter_mut().zip(v).for_each(|(w, v)| *w -= along * v);
            }
            row
        })
        .collect()
}

#[test]
fn changed_bases_become_more_ranks() {
    let base = Base::new();
    for site in [Q, UP, DOWN] {
        let Features { in_features, out_features } = base.shape.features(site).unwrap();
        let (rank, whole) = (3, weight(&base, site));
        let pair = pair(&base, site, rank, 20);
        let vectors = right_singular_vectors(&whole, in_features);
        // A wide weight has no more singular components than rows.
        let num_components = in_features.min(out_features);
        let check = |init, extras: Vec<(Extra, Matrix)>, changed: Vec<f64>, diagonal: &dyn Fn(usize) -> f64| {
            let prepared = prepared(&base, adapter(vec![(site, pair.clone())], extras, init));
            assert_eq!((prepared.max_rank(), prepared.vectors().is_empty()), (2 * rank, true), "{site} {init:?}");
            let expected: Vec<f64> = changed.iter().zip(product(&pair, diagonal)).map(|(w, delta)| w + delta).collect();
            assert_near(&effect(&base, &prepared, site).0, &expected);
        };
        check(BaseInit::Pissa, vec![], without(&whole, in_features, &vectors[..rank]), &|_| 1.0);
        let diagonal = numbers(50, rank);
        let smallest = &vectors[num_components - rank..num_components];
        check(
            BaseInit::Kasa,
            vec![(Extra::Diagonal(site), row(&diagonal))],
            without(&whole, in_features, smallest),
            &|k| f64::from(diagonal[k]),
        );
        // The first columns of Q span the first columns of W.
        let mut q: Vec<Vec<f64>> = Vec::new();
        for column in 0..rank {
            let mut rest: Vec<f64> = (0..out_features).map(|out| whole[out * in_features + column]).collect();
            for earlier in &q {
                let along: f64 = rest.iter().zip(earlier).map(|(a, b)| a * b).sum();
                rest.iter_mut().zip(earlier).for_each(|(a, b)| *a -= along * b);
            }
            let norm = rest.iter().map(|a| a * a).sum::<f64>().sqrt();
            q.push(rest.iter().map(|a| a / norm).collect());
        }
        let changed = |index: usize| {
            let (out, input) = (index / in_features, index % in_features);
            let taken = q.iter().map(|q| {
                let along: f64 = (0..out_features).map(|row| q[row] * whole[row * in_features + input]).sum();
                q[out] * along
            });
            whole[index] - f64::from(pair.scaling()) * taken.sum::<f64>()
        };
        check(BaseInit::Olora, vec![], (0..whole.len()).map(changed).collect(), &|_| 1.0);
    }
}

#[test]
fn copies_of_the_base_are_compared_with_it() {
    let base = Base::new();
    let copy = |rows: usize, values: &[f32]| {
        let matrix = Matrix::from_f32(rows, 12, values).unwrap();
        adapter(vec![(HEAD, pair(&base, HEAD, 2, 20))], vec![(Extra::BaseCopy(HEAD), matrix)], BaseInit::Kept)
    };
    let own = &base.weights[&HEAD];
    assert!(prepared(&base, copy(30, own)).vectors().is_empty());
    // The engine's weights may be narrower than the copy.
    let narrowed: Vec<f32> = own.iter().map(|value| value * 1.01).collect();
    prepared(&base, copy(30, &narrowed));
    let mut other = own.clone();
    other[12 * 17..12 * 18].iter_mut().for_each(|value| *value = -*value);
    assert!(matches!(refused(&base, copy(30, &other))[..], [Misfit::OtherBase { row: 17, .. }]));
    let resized = refused(&base, copy(32, &numbers(1, 32 * 12)));
    assert!(
        matches!(resized[..], [Misfit::ResizedVocabulary { expected: [30, 12], found: [32, 12], .. }]),
        "{resized:?}"
    );
}

#[test]
fn what_cannot_be_prepared_is_refused_with_its_numbers() {
    let base = Base::new();
    let vector = |extra, len| adapter(vec![], vec![(extra, row(&vec![1.0; len]))], BaseInit::Kept);
    let found = refused(&base, vector(Extra::Bias(UP), 20));
    assert!(matches!(found[..], [Misfit::NotInBase { extra: Extra::Bias(UP), .. }]), "{found:?}");
    let found = refused(&base, vector(Extra::Bias(Q), 11));
    assert!(matches!(found[..], [Misfit::ExtraLength { expected: 12, found: 11, .. }]), "{found:?}");
    let found = refused(&base, vector(Extra::Norm(NormSite::Final), 11));
    assert!(matches!(found[..], [Misfit::ExtraLength { expected: 12, found: 11, .. }]), "{found:?}");
    let input_norm = Extra::Norm(NormSite::Layer { layer: 0, norm: lora_math::LayerNorm::Input });
    let found = refused(&base, vector(input_norm, 12));
    assert!(matches!(found[..], [Misfit::NotInBase { .. }]), "{found:?}");

    let dora = |base: &Base, extras| refused(base, adapter(vec![(Q, pair(base, Q, 2, 20))], extras, BaseInit::Kept));
    let both = vec![(Extra::Magnitude(Q), row(&[1.0; 12])), (Extra::LoraBias(Q), row(&[1.0; 12]))];
    let found = dora(&base, both);
    assert!(matches!(found[..], [Misfit::DoraWithBias { site: Q }]), "{found:?}");
    let mut hollow = Base::new();
    let q = pair(&hollow, Q, 2, 20);
    let delta = product(&q, &|_| 1.0);
    assert!(delta.iter().all(|value| *value != 0.0));
    hollow.weights.get_mut(&Q).unwrap().fill(0.0);
    let zero = LoraPair::new(q.a().clone(), q.b().clone(), 0.0, ScalingRule::Standard).unwrap();
    let magnitude = vec![(Extra::Magnitude(Q), row(&[1.0; 12]))];
    let found = refused(&hollow, adapter(vec![(Q, zero)], magnitude, BaseInit::Kept));
    assert!(matches!(found[..], [Misfit::ZeroNorm { site: Q, feature: 0, .. }]), "{found:?}");

    let on_head = adapter(vec![(HEAD, pair(&base, HEAD, 2, 20))], vec![], BaseInit::Pissa);
    let found = refused(&base, on_head);
    assert!(matches!(found[..], [Misfit::InitElsewhere { site: HEAD, init: BaseInit::Pissa }]), "{found:?}");
    let high = adapter(vec![(Q, pair(&base, Q, 257, 20))], vec![], BaseInit::Pissa);
    let found = refused(&base, high);
    assert!(matches!(found[..], [Misfit::InitRank { site: Q, rank: 257, max: 512 }]), "{found:?}");
    let twice = base.weights[&Q].chunks_exact(12).flat_map(|row| [&[row[1]], &row[1..]].concat()).collect();
    let dependent = Base { weights: BTreeMap::from([(Q, twice)]), ..Base::new() };
    let found = refused(&dependent, adapter(vec![(Q, pair(&dependent, Q, 2, 20))], vec![], BaseInit::Olora));
    assert!(matches!(found[..], [Misfit::BadBase { site: Q, .. }]), "{found:?}");
    let no_time = PrepareOptions { max_decomposition: Duration::ZERO };
    let pissa = || adapter(vec![(Q, pair(&base, Q, 2, 20))], vec![], BaseInit::Pissa);
    let found = prepare_with(pissa(), &base, &no_time).unwrap_err();
    assert!(matches!(found.reasons[..], [Misfit::DecompositionTooLong { num_weights: 1, limit_seconds: 0, .. }]));
    assert!(found.to_string().contains("multilora convert"), "{found}");

    let rows = Matrix::from_f32(2, 12, &[1.0; 24]).unwrap();
    for (extra, feature) in
        [(Extra::TokenRows(EMBED), Feature::TrainableTokens), (Extra::Weight(HEAD), Feature::ReplacedModule)]
    {
        let found = refused(&base, adapter(vec![], vec![(extra, rows.clone())], BaseInit::Kept));
        assert_eq!(found, [Misfit::NotServed { feature }]);
    }
    for settings in [
        Settings { invocation_tokens: vec![1], ..Settings::default() },
        Settings { layer_replication: vec![(0, 1)], ..Settings::default() },
    ] {
        let plain = || adapter(vec![(Q, pair(&base, Q, 2, 20))], vec![], BaseInit::Kept);
        let found = refused(&base, plain().carrying(BTreeMap::new(), settings.clone()));
        assert!(matches!(found[..], [Misfit::NotServed { .. }]), "{found:?}");
        assert!(prepare(plain().carrying(BTreeMap::new(), settings), &base.shape).is_err());
    }
}

/// Without the base's weights nothing of all this is left out in silence.
#[test]
fn what_needs_the_base_is_refused_without_it() {
    let base = Base::new();
    for (extra, matrix) in [
        (Extra::LoraBias(Q), row(&[1.0; 12])),
        (Extra::Magnitude(Q), row(&[1.0; 12])),
        (Extra::Bias(Q), row(&[1.0; 12])),
        (Extra::Norm(NormSite::Final), row(&[1.0; 12])),
    ] {
        let adapter = adapter(vec![(Q, pair(&base, Q, 2, 20))], vec![(extra, matrix)], BaseInit::Kept);
        let found = prepare(adapter, &base.shape).unwrap_err().reasons;
        assert!(matches!(&found[..], [Misfit::NeedsBase { extra: found, .. }] if *found == extra), "{found:?}");
    }
    for init in [BaseInit::Pissa, BaseInit::Olora, BaseInit::Kasa] {
        let found = prepare(adapter(vec![(Q, pair(&base, Q, 2, 20))], vec![], init), &base.shape).unwrap_err();
        assert_eq!(found.reasons, [Misfit::NeedsInit { init }]);
    }
}

#[test]
fn an_adapter_without_any_of_it_is_prepared_as_without_weights() {
    let base = Base::new();
    let plain = || adapter(vec![(Q, pair(&base, Q, 2, 20)), (HEAD, pair(&base, HEAD, 1, 30))], vec![], BaseInit::Kept);
    assert_eq!(prepared(&base, plain()), prepare(plain(), &base.shape).unwrap());
    assert!(Arc::strong_count(prepared(&base, plain()).vectors()) == 1);
}

/// PEFT takes the norm of the weight that the initialisation left, plus the delta.
#[test]
fn dora_on_a_changed_base_scales_what_the_change_left() {
    let base = Base::new();
    for (init, site) in [(BaseInit::Pissa, UP), (BaseInit::Pissa, DOWN), (BaseInit::Olora, UP), (BaseInit::Olora, DOWN)]
    {
        let Features { in_features, out_features } = base.shape.features(site).unwrap();
        let pair = pair(&base, site, 3, 20);
        let plain = prepared(&base, adapter(vec![(site, pair.clone())], vec![], init));
        let (whole, _) = effect(&base, &plain, site);
        let magnitude = numbers(30, out_features);
        let extras = vec![(Extra::Magnitude(site), row(&magnitude))];
        let (found, _) = effect(&base, &prepared(&base, adapter(vec![(site, pair)], extras, init)), site);
        let expected = whole.chunks_exact(in_features).zip(&magnitude).flat_map(|(row, magnitude)| {
            let norm = row.iter().map(|value| value * value).sum::<f64>().sqrt();
            row.iter().map(move |value| f64::from(*magnitude) / norm * value)
        });
        assert_near(&found, &expected.collect::<Vec<_>>());
    }
}

#[test]
fn vectors_beyond_f32_are_refused() {
    let base = Base::new();
    let wide = |extra| {
        let bytes: Vec<u8> = [1.0, 1e300].iter().cycle().take(12).flat_map(|value: &f64| value.to_le_bytes()).collect();
        let matrix = Matrix::from_bytes("wide".into(), [1, 12], FileDtype::F64, Arc::new(bytes), 0..96).unwrap();
        refused(&base, adapter(vec![(Q, pair(&base, Q, 2, 20))], vec![(extra, matrix)], BaseInit::Kept))
    };
    for extra in [Extra::Norm(NormSite::Final), Extra::Bias(Q), Extra::LoraBias(Q)] {
        assert_eq!(wide(extra), [Misfit::ExtraOutOfRange { extra, index: 1, tensor: "wide".into() }]);
    }
    assert_eq!(wide(Extra::Magnitude(Q)), [Misfit::VectorOutOfRange { site: Q, feature: 1 }]);
    // Each finite, and their product not.
    let bias = vec![(Extra::LoraBias(Q), row(&[3e38; 12]))];
    let found = refused(&base, adapter(vec![(Q, pair(&base, Q, 2, 20))], bias, BaseInit::Kept));
    assert_eq!(found, [Misfit::VectorOutOfRange { site: Q, feature: 0 }]);
}

/// A large weight alone gains nothing from threads: 2.5e-9 s · 6144³ is 580 s.
#[test]
fn the_largest_decomposition_bounds_the_estimate() {
    let layer = LayerShape::new().with_mlp(MlpSize { hidden_size: 6144, intermediate_size: 6144 });
    let shape = ModelShape::uniform(6144, 8, 1, layer).unwrap();
    let base = Base { is_tied: false, shape, weights: BTreeMap::new() };
    let found = refused(&base, adapter(vec![(UP, pair(&base, UP, 1, 20))], vec![], BaseInit::Pissa));
    let [Misfit::DecompositionTooLong { estimate_seconds, .. }] = found[..] else { panic!("{found:?}") };
    assert!((estimate_seconds - 579.8).abs() < 1.0, "{estimate_seconds}");
}

/// mlx-lm computes the logits of a tied model with the adapted embedding; PEFT leaves the head as it is.
#[test]
fn an_embedding_pair_that_serves_a_tied_head_becomes_two() {
    let serving = || Settings { embedding_serves_head: true, ..Settings::default() };
    let embedding = |base: &Base| adapter(vec![(EMBED, pair(base, EMBED, 2, 20))], vec![], BaseInit::Kept);
    let untied = Base::new();
    let mut tied = Base { is_tied: true, ..Base::new() };
    tied.weights.insert(HEAD, tied.weights[&EMBED].clone());
    assert!(prepared(&tied, embedding(&tied)).pair(HEAD).is_none(), "PEFT's");
    assert!(prepared(&untied, embedding(&untied).carrying(BTreeMap::new(), serving())).pair(HEAD).is_none());
    let both = prepared(&tied, embedding(&tied).carrying(BTreeMap::new(), serving()));
    let width = 12;
    let (embed, head) = (effect(&tied, &both, EMBED).0, effect(&tied, &both, HEAD).0);
    // One weight, seen from both sides: [hidden_size, vocab_size] here and [vocab_size, hidden_size] there.
    let turned: Vec<f64> = (0..head.len()).map(|index| embed[index % width * 30 + index / width]).collect();
    assert_near(&head, &turned);
    assert_ne!(both.content(), both.adapter().content());
    // Without the base nothing says whether it is tied; a head with a pair of its own keeps it.
    let alone = prepare(embedding(&tied).carrying(BTreeMap::new(), serving()), &tied.shape).unwrap_err();
    assert_eq!(alone.reasons, [Misfit::NeedsTying]);
    let own = pair(&tied, HEAD, 1, 40);
    let pairs = vec![(EMBED, pair(&tied, EMBED, 2, 20)), (HEAD, own.clone())];
    let kept = prepared(&tied, adapter(pairs, vec![], BaseInit::Kept).carrying(BTreeMap::new(), serving()));
    assert_eq!(kept.pair(HEAD), Some(&own));
    let dora = BTreeMap::from([(Extra::Magnitude(EMBED), row(&[1.0; 12]))]);
    assert_eq!(refused(&tied, embedding(&tied).carrying(dora, serving())), [Misfit::TiedDora]);
}

/// A name must not keep gains of another base because the files are the same.
#[test]
fn what_comes_from_the_base_is_in_the_digest() {
    let (base, mut other) = (Base::new(), Base::new());
    other.weights.get_mut(&Q).unwrap()[0] += 1.0;
    let plain = |base: &Base| adapter(vec![(Q, pair(base, Q, 2, 20))], vec![], BaseInit::Kept);
    assert_eq!(prepared(&base, plain(&base)).content(), prepared(&other, plain(&other)).content());
    assert_eq!(prepared(&base, plain(&base)).content(), plain(&base).content());
    for (init, extras) in [(BaseInit::Kept, vec![(Extra::Magnitude(Q), row(&[1.0; 12]))]), (BaseInit::Pissa, vec![])] {
        let on = |base: &Base| prepared(base, adapter(vec![(Q, pair(base, Q, 2, 20))], extras.clone(), init)).content();
        assert_eq!(on(&base), on(&base));
        assert_ne!(on(&base), on(&other), "{init:?}");
    }
}
