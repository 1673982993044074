//! What an adapter can hold beside its pairs: vectors, whole weights and rows, and what its config says about them.
//!
//! These are the tensors as the file gives them. What they do to a model is worked out by `prepare_with`, which has the
//! base weights.
//!

use std::collections::BTreeMap;
use std::fmt;

use lora_math::{Module, NormSite, Site};

/// A tensor beside the pairs: what it is, and where. A vector is a matrix of one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Extra {
    /// The bias of B, `[1, out_features]`: added to the output, multiplied by the pair's scaling (`lora_B.bias`).
    LoraBias(Site),
    /// The magnitudes of DoRA, `[1, out_features]`; of an embedding `[1, hidden_size]`.
    Magnitude(Site),
    /// The diagonal between A and B, `[1, rank]` (KaSA).
    Diagonal(Site),
    /// A bias of the base model as trained, `[1, out_features]`: it stands in place of the base's.
    Bias(Site),
    /// The weights of a norm as trained, in place of the base's.
    Norm(NormSite),
    /// A whole weight, `[out_features, in_features]`, of an embedding `[vocab_size, hidden_size]`: in place of the base's,
    /// which may have fewer rows.
    Weight(Site),
    /// A copy of the base model's weight that PEFT saves with LoRA on embedding or head; the same unless the vocabulary was
    /// resized.
    BaseCopy(Site),
    /// Rows of the embedding or of the head, `[num_tokens, hidden_size]`, in place of the base's. Which rows: see
    /// [`Settings::token_ids`].
    TokenRows(Site),
}

impl Extra {
    /// What it is, as part of a sentence.
    pub fn describe(self) -> &'static str {
        match self {
            Extra::LoraBias(_) => "bias of lora_B",
            Extra::Magnitude(_) => "DoRA magnitudes",
            Extra::Diagonal(_) => "KaSA diagonal",
            Extra::Bias(_) => "trained bias",
            Extra::Norm(_) => "trained norm",
            Extra::Weight(_) => "whole weight",
            Extra::BaseCopy(_) => "copy of the base weight",
            Extra::TokenRows(_) => "token rows",
        }
    }

    /// The site; none for a norm.
    pub fn site(self) -> Option<Site> {
        match self {
            Extra::LoraBias(site)
            | Extra::Magnitude(site)
            | Extra::Diagonal(site)
            | Extra::Bias(site)
            | Extra::Weight(site)
            | Extra::BaseCopy(site)
            | Extra::TokenRows(site) => Some(site),
            Extra::Norm(_) => None,
        }
    }

    /// Where it is: the site or the norm, in words.
    pub fn place(self) -> String {
        match self {
            Extra::Norm(norm) => norm.to_string(),
            other => other.site().map(|site| site.to_string()).unwrap_or_default(),
        }
    }
}

impl fmt::Display for Extra {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.place(), self.describe())
    }
}

/// How training changed the base weights before its first step. The file holds none of that: it has to be done again on
/// the base.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BaseInit {
    /// Not at all.
    #[default]
    Kept,
    /// The largest singular components were taken out (`init_lora_weights` "pissa").
    Pissa,
    /// The first columns of a QR decomposition were taken out (`init_lora_weights` "olora").
    Olora,
    /// The smallest singular components were taken out (`kasa_config`).
    Kasa,
}

/// What the config says beyond ranks and scalings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Settings {
    /// What was done to the base weights of every module with a pair.
    pub base_init: BaseInit,
    /// For [`Module::EmbedTokens`] and [`Module::LmHead`], the tokens of their [`Extra::TokenRows`], in the order of rows.
    pub token_ids: BTreeMap<Module, Vec<u32>>,
    /// The base layers `first..end`, one range after the other, that make up the model's layers; empty where they are as
    /// they are.
    pub layer_replication: Vec<(usize, usize)>,
    /// The tokens from whose last occurrence on the adapter acts; empty where it always does.
    pub invocation_tokens: Vec<u32>,
    /// The pair of the embedding acts on the head too where the base model ties both, as in mlx-lm; in PEFT it does not.
    pub embedding_serves_head: bool,
}
