//! What `inspect` tells: an adapter as plain data, for people and for tools.

use std::collections::BTreeMap;
use std::fmt;

use lora_math::Site;
use serde::Serialize;

use crate::adapter::Adapter;
use crate::extras::{BaseInit, Extra, Settings};
use crate::matrix::{FileDtype, Matrix};
use crate::notes::{Note, Origin};
use crate::pair::LoraPair;

/// An adapter as plain data.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct AdapterReport {
    /// Digest of what it does, in hexadecimal.
    pub content: String,
    /// The largest rank of any site.
    pub max_rank: usize,
    /// Elements of all A and B.
    pub num_parameters: usize,
    /// Bytes of all A and B in the dtypes of the file.
    pub file_bytes: usize,
    /// Every site, ascending.
    pub sites: Vec<SiteReport>,
    /// Every tensor beside the pairs, ascending.
    pub extras: Vec<ExtraReport>,
    /// What the config says beyond ranks and scalings.
    pub settings: SettingsReport,
    /// What was accepted and is worth knowing.
    pub notes: Vec<Note>,
    /// What the files say about where they come from.
    pub origin: Origin,
}

/// One site of an adapter.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct SiteReport {
    /// Layer; none for the embedding and the head.
    pub layer: Option<usize>,
    /// Routed expert of the layer; none for everything else.
    pub expert: Option<usize>,
    /// Name of the module.
    pub module: &'static str,
    /// Rank.
    pub rank: usize,
    /// Alpha.
    pub alpha: f64,
    /// What B·A·x is multiplied by.
    pub scaling: f32,
    /// Columns of A.
    pub in_features: usize,
    /// Rows of B.
    pub out_features: usize,
    /// Dtype of A in the file.
    pub a_dtype: FileDtype,
    /// Dtype of B in the file.
    pub b_dtype: FileDtype,
    /// Bytes of A and B in the file.
    pub file_bytes: usize,
}

/// One tensor beside the pairs.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ExtraReport {
    /// What it is: [`Extra::describe`].
    pub kind: &'static str,
    /// The site or the norm, in words.
    pub place: String,
    /// Rows and columns; a vector has one row.
    pub shape: [usize; 2],
    /// Dtype in the file.
    pub dtype: FileDtype,
    /// Bytes in the file.
    pub file_bytes: usize,
}

/// What the config says beyond ranks and scalings.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct SettingsReport {
    /// What was done to the base weights before training: `kept`, `pissa`, `olora` or `kasa`.
    pub base_init: &'static str,
    /// The tokens of the rows beside the pairs, by module.
    pub token_ids: BTreeMap<&'static str, Vec<u32>>,
    /// The base layers `first..end` that make up the model's layers; empty where they are as they are.
    pub layer_replication: Vec<(usize, usize)>,
    /// The tokens from whose last occurrence on the adapter acts; empty where it always does.
    pub invocation_tokens: Vec<u32>,
    /// Whether the embedding's pair acts on a tied head too.
    pub embedding_serves_head: bool,
}

impl Adapter {
    /// The adapter as plain data.
    pub fn report(&self) -> AdapterReport {
        let sites: Vec<SiteReport> = self.pairs().map(|(site, pair)| site_report(site, pair)).collect();
        let elements = |(_, pair): (Site, &LoraPair)| pair.a().num_elements() + pair.b().num_elements();
        AdapterReport {
            content: self.content().to_string(),
            max_rank: self.max_rank(),
            num_parameters: self.pairs().map(elements).sum(),
            file_bytes: sites.iter().map(|site| site.file_bytes).sum(),
            sites,
            extras: self.extras().map(|(extra, matrix)| extra_report(extra, matrix)).collect(),
            settings: settings_report(self.settings()),
            notes: self.notes().to_vec(),
            origin: self.origin().clone(),
        }
    }
}

fn site_report(site: Site, pair: &LoraPair) -> SiteReport {
    let expert = match site {
        Site::Expert { expert, .. } => Some(expert),
        _ => None,
    };
    SiteReport {
        layer: site.layer_index(),
        expert,
        module: site.module().name(),
        rank: pair.rank(),
        alpha: pair.alpha(),
        scaling: pair.scaling(),
        in_features: pair.in_features(),
        out_features: pair.out_features(),
        a_dtype: pair.a().dtype(),
        b_dtype: pair.b().dtype(),
        file_bytes: pair.file_bytes(),
    }
}

fn extra_report(extra: Extra, matrix: &Matrix) -> ExtraReport {
    ExtraReport {
        kind: extra.describe(),
        place: extra.place(),
        shape: [matrix.rows(), matrix.cols()],
        dtype: matrix.dtype(),
        file_bytes: matrix.bytes().len(),
    }
}

fn settings_report(settings: &Settings) -> SettingsReport {
    SettingsReport {
        base_init: match settings.base_init {
            BaseInit::Kept => "kept",
            BaseInit::Pissa => "pissa",
            BaseInit::Olora => "olora",
            BaseInit::Kasa => "kasa",
        },
        token_ids: settings.token_ids.iter().map(|(module, tokens)| (module.name(), tokens.clone())).collect(),
        layer_replication: settings.layer_replication.clone(),
        invocation_tokens: settings.invocation_tokens.clone(),
        embedding_serves_head: settings.embedding_serves_head,
    }
}

/// One line for each kind of tensor beside the pairs: how many, where the first one is, and their bytes.
fn write_extras(f: &mut fmt::Formatter<'_>, extras: &[ExtraReport]) -> fmt::Result {
    let mut kinds: BTreeMap<&str, Vec<&ExtraReport>> = BTreeMap::new();
    extras.iter().for_each(|extra| kinds.entry(extra.kind).or_default().push(extra));
    for (kind, extras) in kinds {
        let (first, bytes) = (extras[0], extras.iter().map(|extra| extra.file_bytes).sum::<usize>());
        let [rows, cols] = first.shape;
        let place = match extras.len() {
            1 => format!("{} [{rows}, {cols}]", first.place),
            _ => format!("first {} [{rows}, {cols}]", first.place),
        };
        writeln!(f, "beside      {kind} × {}, {place}, {bytes} bytes", extras.len())?;
    }
    Ok(())
}

/// One line for each setting that is not as usual.
fn write_settings(f: &mut fmt::Formatter<'_>, settings: &SettingsReport) -> fmt::Result {
    /// Tokens that a line shows.
    const SHOWN: usize = 8;
    let list = |tokens: &[u32]| {
        let shown: Vec<String> = tokens.iter().take(SHOWN).map(u32::to_string).collect();
        let more = if tokens.len() > SHOWN { format!(" and {} more", tokens.len() - SHOWN) } else { String::new() };
        format!("{}{more}", shown.join(", "))
    };
    let SettingsReport { base_init, token_ids, layer_replication, invocation_tokens, embedding_serves_head } = settings;
    if *base_init != "kept" {
        writeln!(f, "base        altered before training ({base_init})")?;
    }
    for (module, tokens) in token_ids {
        writeln!(f, "tokens      rows of {module}: {}", list(tokens))?;
    }
    if !layer_replication.is_empty() {
        let ranges: Vec<String> = layer_replication.iter().map(|(first, end)| format!("{first}..{end}")).collect();
        writeln!(f, "layers      base layers {}", ranges.join(", "))?;
    }
    if !invocation_tokens.is_empty() {
        writeln!(f, "invocation  acts from the last {} on", list(invocation_tokens))?;
    }
    if *embedding_serves_head {
        writeln!(f, "embedding   its pair acts on the head too, where the base ties both")?;
    }
    Ok(())
}

/// Experts of a layer that differ in nothing but their number as one row, where the first of them stands.
fn folded(sites: &[SiteReport]) -> Vec<(&SiteReport, usize)> {
    let mut rows: Vec<(&SiteReport, usize)> = Vec::new();
    // Sites ascend, so the rows of a layer stand together at the end.
    let mut first_of_layer = 0;
    for site in sites {
        if rows.last().is_some_and(|(last, _)| last.layer != site.layer) {
            first_of_layer = rows.len();
        }
        let alike = |row: &&mut (&SiteReport, usize)| {
            let as_first = SiteReport { expert: row.0.expert, ..site.clone() };
            site.expert.is_some() && row.0.expert.is_some() && *row.0 == as_first
        };
        match rows[first_of_layer..].iter_mut().find(alike) {
            Some((_, num_experts)) => *num_experts += 1,
            None => rows.push((site, 1)),
        }
    }
    rows
}

impl fmt::Display for AdapterReport {
    /// A summary, a table by site with equal experts in one row, and the notes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Origin { peft_version, base_model, producer } = &self.origin;
        writeln!(f, "content     {}", self.content)?;
        writeln!(f, "sites       {}, largest rank {}", self.sites.len(), self.max_rank)?;
        writeln!(f, "size        {} parameters, {} bytes", self.num_parameters, self.file_bytes)?;
        let named = [("base model", base_model.as_deref()), ("PEFT", peft_version.as_deref()), ("producer", *producer)];
        for (name, value) in named {
            if let Some(value) = value {
                writeln!(f, "{name:<11} {value}")?;
            }
        }
        write_extras(f, &self.extras)?;
        write_settings(f, &self.settings)?;
        if self.sites.is_empty() {
            return self.notes.iter().try_for_each(|note| writeln!(f, "note: {note}"));
        }
        writeln!(
            f,
            "\n{:>5}  {:<24} {:>4}  {:>9}  {:>15}  {:<9} {:>10}",
            "layer", "module", "rank", "scaling", "in → out", "A, B", "bytes"
        )?;
        for (site, num_experts) in folded(&self.sites) {
            let layer = site.layer.map(|layer| layer.to_string()).unwrap_or_default();
            let module = match (site.expert, num_experts) {
                (Some(expert), 1) => format!("{} {expert}", site.module),
                (Some(_), _) => format!("{} × {num_experts}", site.module),
                (None, _) => site.module.to_owned(),
            };
            let features = format!("{} → {}", site.in_features, site.out_features);
            let dtypes = format!("{}, {}", site.a_dtype, site.b_dtype);
            writeln!(
                f,
                "{layer:>5}  {module:<24} {:>4}  {:>9.4}  {features:>15}  {dtypes:<9} {:>10}",
                site.rank,
                site.scaling,
                site.file_bytes * num_experts
            )?;
        }
        self.notes.iter().try_for_each(|note| writeln!(f, "note: {note}"))
    }
}
