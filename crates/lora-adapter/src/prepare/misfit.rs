//! Why an adapter cannot be prepared for a model.

use lora_math::{Module, Site};
use thiserror::Error;

use crate::extras::{BaseInit, Extra};
use crate::feature::Feature;
use crate::matrix::MatrixError;

/// Why an adapter does not fit a model: every reason, in the order of sites. Its text has one line for each.
#[derive(Clone, Debug, PartialEq, Error)]
#[error("the adapter does not fit the model, {} reasons:{}", .reasons.len(), lines(.reasons))]
pub struct Refusal {
    /// At least one.
    pub reasons: Vec<Misfit>,
}

/// One site of an adapter that does not fit the model.
#[derive(Clone, Debug, PartialEq, Error)]
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
    /// The embedding's pair acts on the head too, if the base ties both.
    #[error("embed_tokens: its pair acts on a tied head too, and only the base weights tell whether it is tied")]
    NeedsTying,
    /// DoRA on an embedding that serves a tied head.
    #[error("embed_tokens: DoRA on an embedding that is the head too, which has no single meaning")]
    TiedDora,
    /// A tensor that stands in place of one that the model lacks.
    #[error("{extra}: the model has none there (tensor {tensor})")]
    NotInBase {
        /// What it is, and where.
        extra: Extra,
        /// Its name.
        tensor: String,
    },
    /// A tensor of another length than the model's.
    #[error("{extra}: {found} elements, the model has {expected} (tensor {tensor})")]
    ExtraLength {
        /// What it is, and where.
        extra: Extra,
        /// Of the model.
        expected: usize,
        /// Of the adapter.
        found: usize,
        /// Its name.
        tensor: String,
    },
    /// A copy of the base weight with another number of rows: the vocabulary was resized.
    #[error("{extra}: shape {found:?}, the model has {expected:?}: trained with another vocabulary (tensor {tensor})")]
    ResizedVocabulary {
        /// What it is, and where.
        extra: Extra,
        /// Of the model.
        expected: [usize; 2],
        /// Of the adapter.
        found: [usize; 2],
        /// Its name.
        tensor: String,
    },
    /// A copy of the base weight that is not equal to it: trained on another base, or trained itself.
    #[error("{extra}: row {row} is not the base model's (tensor {tensor})")]
    OtherBase {
        /// What it is, and where.
        extra: Extra,
        /// The first row that differs.
        row: usize,
        /// Its name.
        tensor: String,
    },
    /// DoRA on a weight with a row, or of an embedding a column, of zeros: there is no direction to scale.
    #[error("{site}: output feature {feature} has norm 0, which DoRA divides by (tensor {tensor})")]
    ZeroNorm {
        /// The site.
        site: Site,
        /// The first such output feature.
        feature: usize,
        /// The magnitudes.
        tensor: String,
    },
    /// DoRA with a bias of B, which PEFT refuses to train: which of them scales the other is not defined.
    #[error("{site}: DoRA magnitudes and a bias of lora_B at once, which no trainer defines")]
    DoraWithBias {
        /// The site.
        site: Site,
    },
    /// A changed base under a pair of the embedding, or of a weight that the base does not give.
    #[error("{site}: training began by changing the base weight ({init:?}), which cannot be done again there")]
    InitElsewhere {
        /// The site.
        site: Site,
        /// How.
        init: BaseInit,
    },
    /// A changed base needs more ranks than a site can have.
    #[error("{site}: rank {rank} and as many for the changed base are more than {max}")]
    InitRank {
        /// The site.
        site: Site,
        /// Rank of the pair.
        rank: usize,
        /// The largest rank.
        max: usize,
    },
    /// Doing an initialisation again would take too long.
    #[error(
        "decomposing {num_weights} base weights takes about {estimate_seconds:.0} s, at most {limit_seconds} s are allowed; `multilora convert` does it once and writes a plain adapter"
    )]
    DecompositionTooLong {
        /// How many.
        num_weights: usize,
        /// By estimate.
        estimate_seconds: f64,
        /// The limit.
        limit_seconds: u64,
    },
    /// The base gives no weight where its shape says there is one, or a decomposition finds no end on it.
    #[error("{site}: the base weight cannot be used: {message}")]
    BadBase {
        /// The site.
        site: Site,
        /// What is wrong.
        message: &'static str,
    },
    /// A pair whose numbers leave the range of f32 once the base is taken into account.
    #[error("{site}: {error}")]
    OutOfRange {
        /// The site.
        site: Site,
        /// Which element.
        error: MatrixError,
    },
    /// A gain or a shift that f32 cannot hold, or that the base's own numbers make no number.
    #[error("{site}: gain or shift of output feature {feature} is not a finite f32")]
    VectorOutOfRange {
        /// The site.
        site: Site,
        /// The first such output feature.
        feature: usize,
    },
    /// A vector of the file with an element beyond the range of f32.
    #[error("{extra}: element {index} is beyond the range of f32 (tensor {tensor})")]
    ExtraOutOfRange {
        /// What it is, and where.
        extra: Extra,
        /// The first such element.
        index: usize,
        /// Its name.
        tensor: String,
    },
    /// The adapter is read, and cannot be run.
    #[error("{feature}: read, and not run yet")]
    NotServed {
        /// What it asks for.
        feature: Feature,
    },
    /// A GGUF adapter whose rows of q and k wait for the head counts of the base model:
    /// [`Adapter::with_gguf_heads`](crate::Adapter::with_gguf_heads).
    #[error("rows of q and k are in llama.cpp's order, which only the head counts of the base model resolve")]
    NeedsHeads,
    /// An initialisation that has to be done again on the base weights.
    #[error("needs the base weights: training began by changing them ({init:?})")]
    NeedsInit {
        /// Which.
        init: BaseInit,
    },
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
