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
}

impl BaseWeights for TransformerModel {
    fn shape(&self) -> &ModelShape {
        TransformerModel::shape(self)
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
        let NormSite::Layer { layer, norm } = site else {
            return matches!(site, NormSite::Final).then(|| self.final_norm.clone());
        };
        let layer = self.layers.get(layer)?;
        let Mixer::Attention(attention) = &layer.mixer;
        match norm {
            LayerNorm::Input => Some(layer.input_norm.clone()),
            LayerNorm::PostAttention => Some(layer.post_attention_norm.clone()),
            LayerNorm::Query => attention.q_norm.clone(),
            LayerNorm::Key => attention.k_norm.clone(),
            _ => None,
        }
    }
}
