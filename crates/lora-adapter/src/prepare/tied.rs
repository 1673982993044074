//! Pairs of an embedding that is the head as well.

use std::collections::BTreeMap;

use lora_math::{Module, Site};

use super::Misfit;
use crate::adapter::Adapter;
use crate::extras::Extra;
use crate::pair::LoraPair;

/// Gives the head the embedding's pair: `E + s·(B·A)ᵀ` as a head is a pair of A `Bᵀ` and B `Aᵀ` with the same scaling. A head
/// that has a pair of its own was not tied when it was trained, and keeps it.
pub(super) fn serve_head(adapter: &Adapter, pairs: &mut BTreeMap<Site, LoraPair>) -> Option<Misfit> {
    let [embedding, head] = [Module::EmbedTokens, Module::LmHead].map(|module| Site::Vocabulary { module });
    if pairs.contains_key(&head) {
        return None;
    }
    if adapter.extra(Extra::Magnitude(embedding)).is_some() {
        return Some(Misfit::TiedDora);
    }
    let pair = pairs.get(&embedding)?;
    let (a, b) = (pair.b().transposed(), pair.a().transposed());
    let pair = pair.clone().with_matrices(a, b);
    pairs.insert(head, pair);
    None
}
