//! An adapter and a model together: every site checked against the model's shape.
//!
//! [`PreparedAdapter`] is the only thing a pool installs, so a pool never meets a pair that has no place in its model.

mod base;
mod init;
mod misfit;
mod tied;
mod vectors;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use lora_math::{ContentDigest, Features, ModelShape, NormSite, Site};

pub use base::{BaseWeights, SiteVectors};
pub use misfit::{Misfit, Refusal};

use crate::adapter::Adapter;
use crate::extras::{BaseInit, Extra};
use crate::feature::Feature;
use crate::matrix::FileDtype;
use crate::pair::LoraPair;

/// An adapter that fits one model shape, site by site.
#[derive(Clone, Debug, PartialEq)]
pub struct PreparedAdapter {
    adapter: Adapter,
    content: ContentDigest,
    pairs: BTreeMap<Site, LoraPair>,
    vectors: Arc<AdapterVectors>,
    shape: ModelShape,
}

/// Vectors that stand beside the pairs of a prepared adapter.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AdapterVectors {
    /// By site, what its output is changed to besides its pair.
    pub sites: BTreeMap<Site, SiteVectors>,
    /// Norm weights in place of the base's.
    pub norms: BTreeMap<NormSite, Arc<[f32]>>,
}

impl AdapterVectors {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.sites.is_empty() && self.norms.is_empty()
    }

    /// Bytes of all of them.
    pub fn num_bytes(&self) -> usize {
        let sites = self.sites.values().flat_map(|vectors| [&vectors.gain, &vectors.shift]).flatten();
        sites.chain(self.norms.values()).map(|vector| std::mem::size_of_val::<[f32]>(vector)).sum()
    }
}

/// How much a preparation may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrepareOptions {
    /// The most time that decompositions of base weights may take by estimate, before the first one begins.
    pub max_decomposition: Duration,
}

impl Default for PrepareOptions {
    /// 30 seconds.
    fn default() -> Self {
        PrepareOptions { max_decomposition: Duration::from_secs(30) }
    }
}

/// Checks every site of `adapter` against `shape`, for adapters that need no base weights.
///
/// # Errors
/// Every site that has no place in the model or another size there, and all that only [`prepare_with`] can prepare. Worth a
/// retry only with another model.
pub fn prepare(adapter: Adapter, shape: &ModelShape) -> Result<PreparedAdapter, Refusal> {
    let mut reasons: Vec<Misfit> = adapter.pairs().flat_map(|(site, pair)| misfits(site, pair, shape)).collect();
    reasons.extend(adapter.extras().map(|(extra, tensor)| {
        let tensor = tensor.tensor().to_owned();
        Misfit::NeedsBase { extra, tensor }
    }));
    if adapter.settings().base_init != BaseInit::Kept {
        reasons.push(Misfit::NeedsInit { init: adapter.settings().base_init });
    }
    if adapter.settings().embedding_serves_head {
        reasons.push(Misfit::NeedsTying);
    }
    reasons.extend(not_served(&adapter));
    if !reasons.is_empty() {
        return Err(Refusal { reasons });
    }
    let pairs = adapter.pairs().map(|(site, pair)| (site, pair.clone())).collect();
    let content = adapter.content();
    Ok(PreparedAdapter { adapter, content, pairs, vectors: Arc::default(), shape: shape.clone() })
}

/// Checks every site of `adapter` against the model of `base`, and works out all that needs the base weights: gains of
/// DoRA, differences of biases, and the pairs of initialisations that changed the base.
///
/// Takes a pass over the weight of every site with DoRA or a changed base; nothing is kept of them.
///
/// # Errors
/// Everything that has no place in the model or another size there, and what no engine can run. Worth a retry only with
/// another model, or with more time where a decomposition is refused for it.
pub fn prepare_with(
    adapter: Adapter,
    base: &dyn BaseWeights,
    options: &PrepareOptions,
) -> Result<PreparedAdapter, Refusal> {
    let shape = base.shape();
    let mut reasons: Vec<Misfit> = adapter.pairs().flat_map(|(site, pair)| misfits(site, pair, shape)).collect();
    reasons.extend(not_served(&adapter));
    // Without agreement on shapes no number below means anything.
    if !reasons.is_empty() {
        return Err(Refusal { reasons });
    }
    let mut pairs = init::pairs(&adapter, base, options, &mut reasons);
    if adapter.settings().embedding_serves_head && base.is_tied() {
        reasons.extend(tied::serve_head(&adapter, &mut pairs));
    }
    let vectors = vectors::of(&adapter, base, &mut pairs, &mut reasons);
    if !reasons.is_empty() {
        return Err(Refusal { reasons });
    }
    let shape = shape.clone();
    let content = content(&adapter, &pairs, &vectors);
    Ok(PreparedAdapter { adapter, content, pairs, vectors: Arc::new(vectors), shape })
}

/// The adapter's digest where it does the same on every base, else one over that and everything worked out from this base:
/// BLAKE3 in its key-derivation mode, context `multilora prepared content 1`, over the adapter's digest; for each pair
/// ascending its site as text, scaling, and the digests of A and B; then each vector with its place as text.
fn content(adapter: &Adapter, pairs: &BTreeMap<Site, LoraPair>, vectors: &AdapterVectors) -> ContentDigest {
    let own_pairs = adapter.settings().base_init == BaseInit::Kept && adapter.pairs().len() == pairs.len();
    if vectors.is_empty() && own_pairs {
        return adapter.content();
    }
    let mut hasher = blake3::Hasher::new_derive_key("multilora prepared content 1");
    hasher.update(adapter.content().bytes());
    for (site, pair) in pairs {
        hasher.update(format!("{site}\n").as_bytes()).update(&pair.scaling().to_bits().to_le_bytes());
        hasher.update(pair.a().digest()).update(pair.b().digest());
    }
    let mut vector = |place: String, values: Option<&Arc<[f32]>>| {
        hasher.update(format!("{place} {:?}\n", values.map(|values| values.len())).as_bytes());
        values.iter().flat_map(|values| values.iter()).for_each(|value| {
            hasher.update(&value.to_bits().to_le_bytes());
        });
    };
    for (site, SiteVectors { gain, shift }) in &vectors.sites {
        vector(format!("{site} gain"), gain.as_ref());
        vector(format!("{site} shift"), shift.as_ref());
    }
    vectors.norms.iter().for_each(|(norm, values)| vector(norm.to_string(), Some(values)));
    ContentDigest::new(*hasher.finalize().as_bytes())
}

/// What an adapter asks for and no engine of this workspace can run, or not as it stands.
fn not_served(adapter: &Adapter) -> impl Iterator<Item = Misfit> {
    let settings = adapter.settings();
    let holds = |wanted: fn(Extra) -> bool| adapter.extras().any(|(extra, _)| wanted(extra));
    let features = [
        (!settings.layer_replication.is_empty(), Feature::LayerReplication),
        (!settings.invocation_tokens.is_empty(), Feature::InvocationTokens),
        (holds(|extra| matches!(extra, Extra::Weight(_))), Feature::ReplacedModule),
        (holds(|extra| matches!(extra, Extra::TokenRows(_))), Feature::TrainableTokens),
    ];
    let features = features.into_iter().filter(|(asked, _)| *asked).map(|(_, feature)| Misfit::NotServed { feature });
    features.chain(adapter.awaits_heads().then_some(Misfit::NeedsHeads))
}

fn misfits(site: Site, pair: &LoraPair, shape: &ModelShape) -> Vec<Misfit> {
    let tensor = || pair.a().tensor().to_owned();
    let Some(Features { in_features, out_features }) = shape.features(site) else {
        let layer = site.layer_index().map(|layer| shape.layers().get(layer));
        let misfit = match layer {
            Some(None) => Misfit::UnknownLayer { site, num_layers: shape.num_layers(), tensor: tensor() },
            Some(Some(layer)) => {
                let carried = layer.modules().iter().map(|(module, _)| *module).collect();
                Misfit::UnknownModule { site, carried, tensor: tensor() }
            }
            None => Misfit::UnknownModule { site, carried: Vec::new(), tensor: tensor() },
        };
        return vec![misfit];
    };
    let mut found = Vec::new();
    if pair.in_features() != in_features {
        found.push(Misfit::InFeatures { site, expected: in_features, found: pair.in_features(), tensor: tensor() });
    }
    if pair.out_features() != out_features {
        let tensor = pair.b().tensor().to_owned();
        found.push(Misfit::OutFeatures { site, expected: out_features, found: pair.out_features(), tensor });
    }
    found
}

impl PreparedAdapter {
    /// The adapter itself, as its files give it.
    pub fn adapter(&self) -> &Adapter {
        &self.adapter
    }

    /// The shape that it fits.
    pub fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// Digest of what it does on its base: [`Adapter::content`] where that is the same on every base, and another one where
    /// gains, shifts or pairs come from the base's weights.
    pub fn content(&self) -> ContentDigest {
        self.content
    }

    /// The pair at a site; none where the adapter leaves the base model as it is.
    pub fn pair(&self, site: Site) -> Option<&LoraPair> {
        self.pairs.get(&site)
    }

    /// The pairs by site, ascending.
    pub fn pairs(&self) -> impl ExactSizeIterator<Item = (Site, &LoraPair)> {
        self.pairs.iter().map(|(site, pair)| (*site, pair))
    }

    /// The vectors beside the pairs.
    pub fn vectors(&self) -> &Arc<AdapterVectors> {
        &self.vectors
    }

    /// The largest rank of any site.
    pub fn max_rank(&self) -> usize {
        self.pairs.values().map(LoraPair::rank).max().unwrap_or_default()
    }

    /// Every dtype that its matrices have in the file.
    pub fn dtypes(&self) -> BTreeSet<FileDtype> {
        self.pairs().flat_map(|(_, pair)| [pair.a().dtype(), pair.b().dtype()]).collect()
    }
}

#[cfg(test)]
mod tests;
