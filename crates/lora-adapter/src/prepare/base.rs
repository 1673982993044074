//! The base weights as a preparation reads them.

use std::sync::Arc;

use lora_math::{ModelShape, NormSite, Site};

/// The weights of a base model, for what an adapter needs of them: norms of DoRA, inits that change the base, biases and
/// norms that an adapter replaces.
///
/// A model whose weights are quantised gives them as it computes with them.
pub trait BaseWeights: Sync {
    /// The shape of the model.
    fn shape(&self) -> &ModelShape;

    /// Whether the head is the embedding's weight.
    fn is_tied(&self) -> bool;

    /// Writes rows of the weight at `site` from `first_row` on into `rows`, which holds a whole number of them. Row-major as
    /// f32: `[out_features, in_features]` of a projection and of the head, `[vocab_size, hidden_size]` of the embedding.
    /// Where head and embedding are tied, both are the same weight. False where the model has no such weight, or too few
    /// rows; then nothing is written.
    fn read_rows(&self, site: Site, first_row: usize, rows: &mut [f32]) -> bool;

    /// The bias at `site`, `[out_features]`; none where the model has none.
    fn bias(&self, site: Site) -> Option<Vec<f32>>;

    /// The weights of a norm; none where the model has no such norm.
    fn norm(&self, site: NormSite) -> Option<Vec<f32>>;
}

/// What a site's output is changed to besides its pair: `y' = gain ⊙ y + shift`, with y the base's output, its bias
/// included, before the pair's delta is added.
///
/// The pair of the same site has its B multiplied by the gain already. So with W, b of the base, m and n magnitudes and
/// norms of DoRA, s the scaling, c the bias of B and b' a trained bias, the whole is
/// `(m / n) ⊙ (W·x + s·B·A·x) + b' + s·c`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SiteVectors {
    /// A factor for each output feature; none where all are 1.
    pub gain: Option<Arc<[f32]>>,
    /// A summand for each output feature; none where all are 0.
    pub shift: Option<Arc<[f32]>>,
}
