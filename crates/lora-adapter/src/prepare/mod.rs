//! An adapter and a model together: every site checked against the model's shape.
//!
//! [`PreparedAdapter`] is the only thing a pool installs, so a pool never meets a pair that has no place in its model.

mod base;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use lora_math::{ContentDigest, Features, ModelShape, Module, NormSite, Site};
use thiserror::Error;

pub use base::{BaseWeights, SiteVectors};

use crate::adapter::Adapter;
use crate::extras::{BaseInit, Extra};
use crate::feature::Feature;
use crate::matrix::FileDtype;
use crate::pair::LoraPair;

/// An adapter that fits one model shape, site by site.
#[derive(Clone, Debug, PartialEq)]
pub struct PreparedAdapter {
    adapter: Adapter,
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
    pub norms: BTreeMap<NormSite, Box<[f32]>>,
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

/// Why an adapter does not fit a model: every reason, in the order of sites. Its text has one line for each.
#[derive(Clone, Debug, PartialEq, Error)]
#[error("the adapter does not fit the model, {} reasons:{}", .reasons.len(), lines(.reasons))]
pub struct Refusal {
    /// At least one.
    pub reasons: Vec<Misfit>,
}

/// One site of an adapter that does not fit the model.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Misfit {
    /// The model has fewer layers.
    #[error("{site}: the model has layers 0 to {} (tensor {tensor})", .num_layers.saturating_sub(1))]
    UnknownLayer {
        /// The site.
        site: Site,
        /// Layers of the model.
        num_layers: usize,
        /// A of the pair.
        tensor: String,
    },
    /// The layer, or the model, has no such module.
    #[error("{site}: the model has no such module there, only {} (tensor {tensor})", names(.carried))]
    UnknownModule {
        /// The site.
        site: Site,
        /// What the layer carries.
        carried: Vec<Module>,
        /// A of the pair.
        tensor: String,
    },
    /// A has another width than the model's module.
    #[error("{site}: in_features is {found}, the model has {expected} (tensor {tensor})")]
    InFeatures {
        /// The site.
        site: Site,
        /// Of the model.
        expected: usize,
        /// Of the adapter.
        found: usize,
        /// A of the pair.
        tensor: String,
    },
    /// B has another height than the model's module.
    #[error("{site}: out_features is {found}, the model has {expected} (tensor {tensor})")]
    OutFeatures {
        /// The site.
        site: Site,
        /// Of the model.
        expected: usize,
        /// Of the adapter.
        found: usize,
        /// B of the pair.
        tensor: String,
    },
    /// A tensor that means something only beside the base weights.
    #[error("{extra}: needs the base weights (tensor {tensor})")]
    NeedsBase {
        /// What it is, and where.
        extra: Extra,
        /// Its name.
        tensor: String,
    },
    /// The adapter is read, and cannot be run.
    #[error("{feature}: read, and not run yet")]
    NotServed {
        /// What it asks for.
        feature: Feature,
    },
    /// An initialisation that has to be done again on the base weights.
    #[error("needs the base weights: training began by changing them ({init:?})")]
    NeedsInit {
        /// Which.
        init: BaseInit,
    },
}

/// Checks every site of `adapter` against `shape`, for adapters that need no base weights.
///
/// # Errors
/// Every site that has no place in the model or another size there, and all that only `prepare_with` can prepare. Worth a
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
    reasons.extend(not_served(&adapter));
    if !reasons.is_empty() {
        return Err(Refusal { reasons });
    }
    let pairs = adapter.pairs().map(|(site, pair)| (site, pair.clone())).collect();
    Ok(PreparedAdapter { adapter, pairs, vectors: Arc::default(), shape: shape.clone() })
}

/// What an adapter asks for and no engine of this workspace can run.
fn not_served(adapter: &Adapter) -> impl Iterator<Item = Misfit> {
    let settings = adapter.settings();
    let replication = !settings.layer_replication.is_empty();
    let invocation = !settings.invocation_tokens.is_empty();
    let features = [(replication, Feature::LayerReplication), (invocation, Feature::InvocationTokens)];
    features.into_iter().filter(|(asked, _)| *asked).map(|(_, feature)| Misfit::NotServed { feature })
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

    /// Digest of what it does; see [`Adapter::content`].
    pub fn content(&self) -> ContentDigest {
        self.adapter.content()
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

fn lines(reasons: &[Misfit]) -> String {
    reasons.iter().map(|reason| format!("\n  {reason}")).collect()
}

fn names(modules: &[Module]) -> String {
    if modules.is_empty() {
        return "no modules".to_owned();
    }
    modules.iter().map(|module| module.name()).collect::<Vec<_>>().join(", ")
}
