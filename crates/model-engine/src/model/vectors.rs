//! Rows whose adapter changes more than it adds: gains and shifts of outputs, and norms of its own.
//!
//! A sequence looks the vectors of its adapter up once, into a table of the model's places. A step lists the rows that
//! have such a table, one range for each sequence, so rows without any are not touched and a step without any does
//! nothing here.

use std::ops::Range;
use std::sync::Arc;

use lora_adapter::{AdapterVectors, SiteVectors};
use lora_kernels::RowsMut;
use lora_math::{LayerNorm, Module, NormSite, Site};

use super::{TransformerModel, ops};

/// Weights of a norm; none where the base's stand.
type Norm = Option<Arc<[f32]>>;

/// The vectors of an adapter by the places of a model; shared with the adapter, not copied.
#[derive(Debug, Default)]
pub(crate) struct PlacedVectors {
    pub(crate) embed_tokens: SiteVectors,
    pub(crate) layers: Vec<LayerVectors>,
    pub(crate) final_norm: Norm,
    pub(crate) lm_head: SiteVectors,
}

/// The vectors of one layer.
#[derive(Debug, Default)]
pub(crate) struct LayerVectors {
    pub(crate) input_norm: Norm,
    pub(crate) q: SiteVectors,
    pub(crate) k: SiteVectors,
    pub(crate) v: SiteVectors,
    pub(crate) q_norm: Norm,
    pub(crate) k_norm: Norm,
    pub(crate) o: SiteVectors,
    pub(crate) post_attention_norm: Norm,
    pub(crate) gate: SiteVectors,
    pub(crate) up: SiteVectors,
    pub(crate) down: SiteVectors,
}

/// A vector that has no place in the model, or another length there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ForeignVector {
    /// The site or the norm, in words.
    pub(crate) place: String,
    /// Length in the model; none where it has no such place.
    pub(crate) expected: Option<usize>,
    pub(crate) found: usize,
}

impl PlacedVectors {
    /// Puts every vector where `model` has its place.
    pub(crate) fn new(model: &TransformerModel, vectors: &AdapterVectors) -> Result<Self, ForeignVector> {
        let mut placed = PlacedVectors::default();
        placed.layers.resize_with(model.shape().num_layers(), LayerVectors::default);
        for (&site, vectors) in &vectors.sites {
            let expected = model.shape().features(site).map(|features| features.out_features);
            let place = placed.site_mut(site);
            for vector in [&vectors.gain, &vectors.shift].into_iter().flatten() {
                if expected != Some(vector.len()) || place.is_none() {
                    let expected = expected.filter(|_| place.is_some());
                    return Err(ForeignVector { place: site.to_string(), expected, found: vector.len() });
                }
            }
            place.into_iter().for_each(|place| place.clone_from(vectors));
        }
        for (&site, norm) in &vectors.norms {
            let expected = model.norm_weights(site).map(<[f32]>::len);
            match placed.norm_mut(site).filter(|_| expected == Some(norm.len())) {
                Some(place) => *place = Some(norm.clone()),
                None => return Err(ForeignVector { place: site.to_string(), expected, found: norm.len() }),
            }
        }
        Ok(placed)
    }

    fn site_mut(&mut self, site: Site) -> Option<&mut SiteVectors> {
        let (layer, module) = match site {
            Site::Vocabulary { module: Module::EmbedTokens } => return Some(&mut self.embed_tokens),
            Site::Vocabulary { module: Module::LmHead } => return Some(&mut self.lm_head),
            Site::Layer { layer, module } => (self.layers.get_mut(layer)?, module),
            _ => return None,
        };
        Some(match module {
            Module::QProj => &mut layer.q,
            Module::KProj => &mut layer.k,
            Module::VProj => &mut layer.v,
            Module::OProj => &mut layer.o,
            Module::GateProj => &mut layer.gate,
            Module::UpProj => &mut layer.up,
            Module::DownProj => &mut layer.down,
            _ => return None,
        })
    }

    fn norm_mut(&mut self, site: NormSite) -> Option<&mut Norm> {
        let (layer, norm) = match site {
            NormSite::Final => return Some(&mut self.final_norm),
            NormSite::Layer { layer, norm } => (self.layers.get_mut(layer)?, norm),
            _ => return None,
        };
        Some(match norm {
            LayerNorm::Input => &mut layer.input_norm,
            LayerNorm::PostAttention => &mut layer.post_attention_norm,
            LayerNorm::Query => &mut layer.q_norm,
            LayerNorm::Key => &mut layer.k_norm,
            _ => return None,
        })
    }
}

/// Rows of a step that share vectors.
#[derive(Debug, Clone)]
pub(crate) struct RowVectors {
    pub(crate) rows: Range<usize>,
    pub(crate) vectors: Arc<PlacedVectors>,
}

/// The vectors of every row of a step that has some: ranges ascending, apart from each other.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepVectors<'a>(pub(crate) &'a [RowVectors]);

impl<'a> StepVectors<'a> {
    /// The base's output at a site as each row's adapter wants it: `y' = gain ⊙ y + shift`.
    pub(crate) fn adjust(self, site: impl Fn(&PlacedVectors) -> &SiteVectors, y: &mut RowsMut<'_>) {
        for RowVectors { rows, vectors } in self.0 {
            let vectors = site(vectors);
            rows.clone().for_each(|row| adjust_row(vectors, y.row_mut(row)));
        }
    }

    /// The vectors of a row.
    pub(crate) fn of_row(self, row: usize) -> Option<&'a PlacedVectors> {
        let index = self.0.partition_point(|vectors| vectors.rows.end <= row);
        self.0.get(index).filter(|vectors| vectors.rows.contains(&row)).map(|vectors| &*vectors.vectors)
    }

    /// The norm weights that a row's adapter brings for a norm.
    pub(crate) fn norm(self, row: usize, norm: impl Fn(&PlacedVectors) -> &Norm) -> Option<&'a [f32]> {
        norm(self.of_row(row)?).as_deref()
    }
}

/// One row of [`StepVectors::adjust`].
pub(crate) fn adjust_row(SiteVectors { gain, shift }: &SiteVectors, y: &mut [f32]) {
    if let Some(gain) = gain {
        y.iter_mut().zip(gain.iter()).for_each(|(y, gain)| *y *= gain);
    }
    if let Some(shift) = shift {
        ops::add(y, shift);
    }
}
