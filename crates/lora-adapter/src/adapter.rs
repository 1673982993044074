//! An adapter: its pairs by site, their digest, and what a reader should know about it.
//!
//! Self-consistent and checked, but knows nothing of a base model: [`prepare`](crate::prepare()) brings the two together.

use std::collections::BTreeMap;
use std::path::Path;

use lora_math::module::Part;
use lora_math::{ContentDigest, Module, Site};

use crate::error::{LoadError, Reasons};
use crate::experts::GateUpOrder;
use crate::extras::{BaseInit, Extra, Settings};
use crate::gguf::{self, GgufError};
use crate::load;
use crate::matrix::Matrix;
use crate::notes::{Note, Origin};
use crate::pair::LoraPair;
use crate::reason::Reason;
use crate::source::AdapterSource;
use crate::unpack;

/// A checked adapter. Cloning shares the bytes of its matrices.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapter {
    pairs: BTreeMap<Site, LoraPair>,
    extras: BTreeMap<Extra, Matrix>,
    settings: Settings,
    content: ContentDigest,
    notes: Vec<Note>,
    origin: Origin,
    gate_up: Option<GateUpOrder>,
    awaits_heads: bool,
}

impl Adapter {
    /// Reads the adapter in a directory: `adapter_config.json` and `adapter_model.safetensors` as PEFT writes them, the files
    /// of mlx-lm, or one GGUF file, which may be given itself. Every other file is ignored. Opens nothing outside the directory; for stores of links see [`Adapter::read`].
    ///
    /// # Errors
    /// Every reason why the adapter cannot be served exactly as it was trained. Never worth a retry with the same files.
    pub fn open(directory: &Path) -> Result<Adapter, LoadError> {
        load::open(&AdapterSource::new(directory)?)
    }

    /// As [`Adapter::open`], from a source that says which directory its files may not leave.
    ///
    /// # Errors
    /// As [`Adapter::open`].
    pub fn read(source: &AdapterSource) -> Result<Adapter, LoadError> {
        load::open(source)
    }

    /// An adapter made in memory.
    ///
    /// # Errors
    /// No pair at all, a site given twice, or a module at a kind of site where it cannot stand.
    pub fn from_pairs(pairs: impl IntoIterator<Item = (Site, LoraPair)>) -> Result<Adapter, LoadError> {
        let mut reasons = Reasons::default();
        let mut by_site = BTreeMap::new();
        for (site, pair) in pairs {
            if !stands(site) {
                reasons.push(None, Reason::MisplacedSite { site });
            }
            if by_site.insert(site, pair.named_by(site)).is_some() {
                reasons.push(None, Reason::DuplicateSite { site });
            }
        }
        if by_site.is_empty() {
            reasons.push(None, Reason::NoPairs { num_tensors: 0 });
        }
        reasons.into_result(None)?;
        Ok(Adapter::new(by_site, Vec::new(), Origin::default()))
    }

    pub(crate) fn new(pairs: BTreeMap<Site, LoraPair>, notes: Vec<Note>, origin: Origin) -> Self {
        let (extras, settings) = (BTreeMap::new(), Settings::default());
        let content = digest(&pairs, &extras, &settings);
        Adapter { pairs, extras, settings, content, notes, origin, gate_up: None, awaits_heads: false }
    }

    /// The adapter with what its file holds beside the pairs.
    pub(crate) fn carrying(self, extras: BTreeMap<Extra, Matrix>, settings: Settings) -> Self {
        let content = digest(&self.pairs, &extras, &settings);
        Adapter { extras, settings, content, ..self }
    }

    /// Says in which order gate and up of experts were taken out of one matrix, where any were.
    pub(crate) fn fused_as(self, order: Option<GateUpOrder>) -> Self {
        Adapter { gate_up: order, ..self }
    }

    /// Says whether B of q and k have their rows in llama.cpp's order.
    pub(crate) fn awaiting_heads(self, awaits_heads: bool) -> Self {
        Adapter { awaits_heads, ..self }
    }

    /// Whether B of q and k have their rows in the order of llama.cpp's `llama` models, which only the base model's head
    /// counts resolve: see [`Adapter::with_gguf_heads`]. Until then the adapter fits no model.
    pub fn awaits_heads(&self) -> bool {
        self.awaits_heads
    }

    /// The adapter for a base model with this many query and key-value heads. Converters to GGUF put the rows of q and k
    /// of `llama` models (Llama, Mistral, Mixtral) in another order in each head, and the files do not hold the head counts.
    /// Nothing changes where [`Adapter::awaits_heads`] is false.
    ///
    /// # Errors
    /// Rows of a B that are not that many heads of an even size.
    pub fn with_gguf_heads(self, num_heads: usize, num_kv_heads: usize) -> Result<Self, LoadError> {
        if !self.awaits_heads {
            return Ok(self);
        }
        let mut pairs = self.pairs;
        let mut reasons = Reasons::default();
        for (site, pair) in &mut pairs {
            let num_heads = match site.module() {
                Module::QProj => num_heads,
                Module::KProj => num_kv_heads,
                _ => continue,
            };
            match gguf::half_rotation(pair.b(), num_heads) {
                Some(Ok(b)) => *pair = pair.clone().with_b(b),
                Some(Err(error)) => reasons.push(gguf::FILE, Reason::Matrix(error)),
                None => {
                    let (site, out_features) = (*site, pair.out_features());
                    reasons.push(gguf::FILE, GgufError::Heads { site, out_features, num_heads }.into());
                }
            }
        }
        reasons.into_result(None)?;
        let notes = self.notes.into_iter().filter(|note| *note != Note::HeadsAwaited).collect();
        Ok(Adapter::new(pairs, notes, self.origin).carrying(self.extras, self.settings).fused_as(self.gate_up))
    }

    /// The adapter for a base model that has gate and up of its experts in this order. Files with both in one matrix seldom
    /// say the order; the base model always does. Nothing changes where they were read in this order, or do not come from
    /// one matrix.
    pub fn with_gate_up_order(self, order: GateUpOrder) -> Self {
        let Some(from) = self.gate_up.filter(|from| *from != order) else { return self };
        let mut pairs = self.pairs;
        let gates: Vec<(usize, usize)> = pairs
            .keys()
            .filter_map(|site| match *site {
                Site::Expert { layer, expert, module: Module::ExpertGateProj } => Some((layer, expert)),
                _ => None,
            })
            .collect();
        for (layer, expert) in gates {
            let [gate_site, up_site] =
                [Module::ExpertGateProj, Module::ExpertUpProj].map(|module| Site::Expert { layer, expert, module });
            let (Some(gate), Some(up)) = (pairs.get(&gate_site), pairs.get(&up_site)) else { continue };
            // Out of one matrix they share A; pairs of their own have an order already.
            if !gate.a().shares_bytes(up.a()) {
                continue;
            }
            if let Ok([gate_b, up_b]) = unpack::reordered(gate.b(), up.b(), from) {
                let (gate, up) = (gate.clone().with_b(gate_b), up.clone().with_b(up_b));
                pairs.insert(gate_site, gate);
                pairs.insert(up_site, up);
            }
        }
        let notes = self.notes.into_iter().filter(|note| *note != Note::GateUpOrderAssumed).collect();
        Adapter::new(pairs, notes, self.origin)
            .carrying(self.extras, self.settings)
            .fused_as(Some(order))
            .awaiting_heads(self.awaits_heads)
    }

    /// Digest of everything that decides what the adapter does: equal for equal contents, whatever the order of keys in
    /// its files.
    ///
    /// BLAKE3 in its key-derivation mode, context `multilora adapter content 1`, over: the number of sites (u64); for
    /// each site ascending its kind (u8: 0 a layer's, 1 an expert's, 2 embedding or head), layer (u64), expert (u64),
    /// module name (length as u8, then UTF-8), scaling (bits of the f32); for A then B the dtype name (length as u8, then
    /// UTF-8), rows (u64), columns (u64), and the 32-byte BLAKE3 digest of its bytes; then the number of extras and each of
    /// them ascending: its name in messages (length as u8, then UTF-8) and its matrix as above; then the settings: the kind of
    /// `base_init` (u8: 0 kept, 1 pissa, 2 olora, 3 KaSA); the number of modules with token rows (u64), and for each its name, the
    /// number of its tokens (u64) and they themselves (u64); number and ends of the ranges of layers; number of invocation
    /// tokens, and they; whether the
    /// embedding's pair serves the head (u8).
    /// Integers are little-endian, absent ones 0. Alpha and ranks of the config count only through the scaling; notes and origin do not count.
    pub fn content(&self) -> ContentDigest {
        self.content
    }

    /// The pairs by site, ascending.
    pub fn pairs(&self) -> impl ExactSizeIterator<Item = (Site, &LoraPair)> {
        self.pairs.iter().map(|(site, pair)| (*site, pair))
    }

    /// The pair at a site; none where the adapter leaves the base model as it is.
    pub fn pair(&self, site: Site) -> Option<&LoraPair> {
        self.pairs.get(&site)
    }

    /// The tensors beside the pairs, ascending.
    pub fn extras(&self) -> impl ExactSizeIterator<Item = (Extra, &Matrix)> {
        self.extras.iter().map(|(extra, matrix)| (*extra, matrix))
    }

    /// One tensor beside the pairs.
    pub fn extra(&self, extra: Extra) -> Option<&Matrix> {
        self.extras.get(&extra)
    }

    /// What the config says beyond ranks and scalings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The largest rank of any site.
    pub fn max_rank(&self) -> usize {
        self.pairs.values().map(LoraPair::rank).max().unwrap_or_default()
    }

    /// What was accepted and is worth knowing.
    pub fn notes(&self) -> &[Note] {
        &self.notes
    }

    /// What the files say about where they come from.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }
}

/// Whether a module may stand at this kind of site.
fn stands(site: Site) -> bool {
    match site {
        Site::Layer { module, .. } => module.part() == Part::Layer,
        Site::Expert { module, .. } => module.part() == Part::Expert,
        Site::Vocabulary { module } => module.part() == Part::Vocabulary,
        _ => false,
    }
}

fn digest(pairs: &BTreeMap<Site, LoraPair>, extras: &BTreeMap<Extra, Matrix>, settings: &Settings) -> ContentDigest {
    let mut hasher = blake3::Hasher::new_derive_key("multilora adapter content 1");
    let number = |hasher: &mut blake3::Hasher, value: usize| {
        hasher.update(&(value as u64).to_le_bytes());
    };
    let text = |hasher: &mut blake3::Hasher, text: &str| {
        hasher.update(&[text.len() as u8]).update(text.as_bytes());
    };
    let matrix = |hasher: &mut blake3::Hasher, matrix: &Matrix| {
        text(hasher, matrix.dtype().name());
        number(hasher, matrix.rows());
        number(hasher, matrix.cols());
        hasher.update(matrix.digest());
    };
    number(&mut hasher, pairs.len());
    for (&site, pair) in pairs {
        let (kind, expert) = match site {
            Site::Expert { expert, .. } => (1, expert),
            Site::Vocabulary { .. } => (2, 0),
            _ => (0, 0),
        };
        hasher.update(&[kind]);
        number(&mut hasher, site.layer_index().unwrap_or_default());
        number(&mut hasher, expert);
        text(&mut hasher, site.module().name());
        hasher.update(&pair.scaling().to_bits().to_le_bytes());
        matrix(&mut hasher, pair.a());
        matrix(&mut hasher, pair.b());
    }
    number(&mut hasher, extras.len());
    for (extra, tensor) in extras {
        text(&mut hasher, &extra.to_string());
        matrix(&mut hasher, tensor);
    }
    let Settings { base_init, token_ids, layer_replication, invocation_tokens, embedding_serves_head } = settings;
    hasher.update(&[match base_init {
        BaseInit::Kept => 0,
        BaseInit::Pissa => 1,
        BaseInit::Olora => 2,
        BaseInit::Kasa => 3,
    }]);
    number(&mut hasher, token_ids.len());
    for (module, token_ids) in token_ids {
        text(&mut hasher, module.name());
        number(&mut hasher, token_ids.len());
        token_ids.iter().for_each(|token| number(&mut hasher, *token as usize));
    }
    number(&mut hasher, layer_replication.len());
    for (first, end) in layer_replication {
        number(&mut hasher, *first);
        number(&mut hasher, *end);
    }
    number(&mut hasher, invocation_tokens.len());
    invocation_tokens.iter().for_each(|token| number(&mut hasher, *token as usize));
    hasher.update(&[u8::from(*embedding_serves_head)]);
    ContentDigest::new(*hasher.finalize().as_bytes())
}
