//! The model's weights as adapters are prepared with them: what the engine computes with, widened to f32.

use lora_adapter::BaseWeights;
use lora_math::{LayerNorm, ModelShape, Module, NormSite, Site};

use super::forward::widen_row;
use super::{Attention, FeedForward, Mixer, Mlp, TransformerModel};
use crate::checkpoint::weights::{Linear, WeightMatrix};

impl TransformerModel {
    fn linear(&self, site: Site) -> Option<&Linear> {
        let Site::Layer { layer, module } = site else { return None };
        let layer = self.layers.get(layer)?;
        let Mixer::Attention(Attention { q, k, v, o, .. }) = &layer.mixer;
        let FeedForward::Dense(Mlp { gate, up, down, .. }) = &layer.feed_forward;
        Some(match module {
            Module::QProj => q,
            Module::KProj => k,
            Module::VProj => v,
            Module::OProj => o,
            Module::GateProj => gate,
            Module::UpProj => up,
            Module::DownProj => down,
            _ => return None,
        })
    }

    fn weight(&self, site: Site) -> Option<&WeightMatrix> {
        match site {
            Site::Vocabulary { module: Module::EmbedTokens } => Some(&self.embed_tokens),
            Site::Vocabulary { module: Module::LmHead } => Some(self.output_head()),
            site => self.linear(site).map(|linear| &linear.weight),
        }
    }

    /// The weights of a norm; none where the model has no such norm.
    pub(super) fn norm_weights(&self, site: NormSite) -> Option<&[f32]> {
        let (layer, norm) = match site {
            NormSite::Final => return Some(&self.final_norm),
            NormSite::Layer { layer, norm } => (self.layers.get(layer)?, norm),
            _ => return None,
        };
        let Mixer::Attention(attention) = &layer.mixer;
        match norm {
            LayerNorm::Input => Some(&layer.input_norm),
            LayerNorm::PostAttention => Some(&layer.post_attention_norm),
            LayerNorm::Query => attention.q_norm.as_deref(),
            LayerNorm::Key => attention.k_norm.as_deref(),
            _ => None,
        }
    }
}

impl BaseWeights for TransformerModel {
    fn shape(&self) -> &ModelShape {
        TransformerModel::shape(self)
    }

    fn is_tied(&self) -> bool {
        self.lm_head.is_none()
    }

    fn read_rows(&self, site: Site, first_row: usize, rows: &mut [f32]) -> bool {
        let Some(weight) = self.weight(site) else { return false };
        let width = weight.in_features();
        let num_rows = rows.len() / width;
        let fits = rows.len().is_multiple_of(width)
            && first_row.checked_add(num_rows).is_some_and(|end| end <= weight.out_features());
        if fits {
            rows.chunks_exact_mut(width).zip(first_row..).for_each(|(out, row)| widen_row(weight, row, out));
        }
        fits
    }

    fn bias(&self, site: Site) -> Option<Vec<f32>> {
        self.linear(site)?.bias.clone()
    }

    fn norm(&self, site: NormSite) -> Option<Vec<f32>> {
        self.norm_weights(site).map(<[f32]>::to_vec)
    }
}
