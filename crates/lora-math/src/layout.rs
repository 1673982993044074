//! Where A and B of every projection of a layer stand in a slot image: the one walk.
//!
//! The walk is frozen: layers ascending; in a layer, modules in the order of [`Module`]; behind the layers embedding
//! and head; at a site first A, then B; each at the next multiple of [`ALIGNMENT`]. A of the embedding lies transposed,
//! `[vocab_size, rank]`, since it is read by token. [`SlotLayout::new`] is the only place that walks; a packed layout
//! re-places the same sites at other ranks.
//!
//! Experts have no place in a slot at fixed stride, where every adapter would pay for all of them at the largest rank;
//! a set of modules that names one of them is refused. Embedding and head are laid out where the set names them; every
//! slot then pays for them.

use thiserror::Error;

use crate::module::{Module, ModuleSet, Part};
use crate::shape::{Features, ModelShape};
use crate::site::{Site, SlotId};

/// Every A and B, and every slot, starts at a multiple of this many bytes: what the widest vector load of any back end
/// wants (a cache line on the CPU; 16 bytes would do on CUDA).
pub const ALIGNMENT: usize = 64;

/// Version of the walk. A change to the order, the alignment or the fingerprint's input makes a new version.
pub const LAYOUT_VERSION: u32 = 1;

/// Element type of every A and B in a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SlotDtype {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
}

impl SlotDtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            SlotDtype::F32 => 4,
            SlotDtype::F16 | SlotDtype::Bf16 => 2,
        }
    }

    /// The name in reports and fingerprints.
    pub const fn name(self) -> &'static str {
        match self {
            SlotDtype::F32 => "f32",
            SlotDtype::F16 => "f16",
            SlotDtype::Bf16 => "bf16",
        }
    }
}

/// What a layout is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayoutOptions {
    /// The modules that a slot covers, none of [`Part::Expert`].
    pub modules: ModuleSet,
    /// The largest rank that a site may have.
    pub max_rank: usize,
    /// Element type of A and B.
    pub dtype: SlotDtype,
}

/// A layout that cannot be made, or an index outside of it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// `max_rank` is 0.
    #[error("max_rank is 0; a slot needs at least rank 1")]
    ZeroRank,
    /// A module of [`Part::Expert`].
    #[error("{module} has no place in a slot: slots cover the projections that a model has once, not those of experts")]
    PartNotPlaced {
        /// The first such module, in layout order.
        module: Module,
    },
    /// The model carries none of the modules asked for.
    #[error("the model carries none of the modules {modules:?}")]
    NoSites {
        /// The modules asked for.
        modules: ModuleSet,
    },
    /// A size does not fit in the address space.
    #[error("sizes overflow at {site} with rank {rank}")]
    Overflow {
        /// The site at which it happened.
        site: Site,
        /// The rank there.
        rank: usize,
    },
    /// A slot's offset does not fit in the address space.
    #[error("{slot} of {slot_bytes} bytes each lies past the address space")]
    SlotOverflow {
        /// The slot.
        slot: SlotId,
        /// Bytes of one slot.
        slot_bytes: usize,
    },
    /// One rank for each site is needed.
    #[error("{given} ranks given for {expected} sites")]
    RankCount {
        /// Sites of the layout.
        expected: usize,
        /// Ranks given.
        given: usize,
    },
    /// A site's rank is larger than the layout admits.
    #[error("{site}: rank {rank} is larger than max_rank {max_rank}")]
    RankTooLarge {
        /// The site.
        site: Site,
        /// Its rank.
        rank: usize,
        /// The layout's largest rank.
        max_rank: usize,
    },
}

/// Where A and B of one site stand, relative to the start of the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SiteSpan {
    /// The site.
    pub site: Site,
    /// Its features.
    pub features: Features,
    /// The rank that the span has room for; 0 where a packed image lacks the site.
    pub rank: usize,
    /// Byte offset of A `[rank, in_features]`, of the embedding `[vocab_size, rank]`.
    pub a_offset: usize,
    /// Bytes of A.
    pub a_bytes: usize,
    /// Byte offset of B `[out_features, rank]`.
    pub b_offset: usize,
    /// Bytes of B.
    pub b_bytes: usize,
}

/// A digest of all that two sides must agree on before a slot image may move between them.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct LayoutFingerprint([u8; 32]);

impl LayoutFingerprint {
    /// The digest.
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl std::fmt::Display for LayoutFingerprint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl std::fmt::Debug for LayoutFingerprint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LayoutFingerprint({self})")
    }
}

/// The layout of a slot image at fixed stride: every site has room for `max_rank`.
///
/// A site whose adapter has a smaller rank keeps its padded offsets and uses the first bytes of A and of B: both stand
/// there tightly at the real rank, so only the real bytes are ever read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotLayout {
    options: LayoutOptions,
    spans: Vec<SiteSpan>,
    /// First span of each layer; one more than layers, the last is the end of the layers.
    layer_starts: Vec<usize>,
    slot_bytes: usize,
    fingerprint: LayoutFingerprint,
}

impl SlotLayout {
    /// Walks `shape` and places every site that `options.modules` covers.
    ///
    /// # Errors
    /// [`LayoutError::PartNotPlaced`], [`LayoutError::ZeroRank`], [`LayoutError::NoSites`], [`LayoutError::Overflow`].
    pub fn new(shape: &ModelShape, options: LayoutOptions) -> Result<Self, LayoutError> {
        if options.max_rank == 0 {
            return Err(LayoutError::ZeroRank);
        }
        if let Some(module) = options.modules.iter().find(|module| module.part() == Part::Expert) {
            return Err(LayoutError::PartNotPlaced { module });
        }
        let mut placer = Placer::new(options.dtype);
        let mut layer_starts = Vec::with_capacity(shape.num_layers() + 1);
        for (layer, layer_shape) in shape.layers().iter().enumerate() {
            layer_starts.push(placer.spans.len());
            for &(module, features) in layer_shape.modules() {
                if options.modules.contains(module) {
                    placer.place(Site::Layer { layer, module }, features, options.max_rank)?;
                }
            }
        }
        layer_starts.push(placer.spans.len());
        for module in options.modules.iter().filter(|module| module.part() == Part::Vocabulary) {
            let site = Site::Vocabulary { module };
            if let Some(features) = shape.features(site) {
                placer.place(site, features, options.max_rank)?;
            }
        }
        if placer.spans.is_empty() {
            return Err(LayoutError::NoSites { modules: options.modules });
        }
        let fingerprint = fingerprint(&options, &placer.spans, placer.end);
        Ok(SlotLayout { options, spans: placer.spans, layer_starts, slot_bytes: placer.end, fingerprint })
    }

    /// What the layout was made for.
    pub fn options(&self) -> LayoutOptions {
        self.options
    }

    /// Element type of A and B.
    pub fn dtype(&self) -> SlotDtype {
        self.options.dtype
    }

    /// The largest rank that a site may have.
    pub fn max_rank(&self) -> usize {
        self.options.max_rank
    }

    /// Number of sites: the width of a row of the slot table.
    pub fn num_sites(&self) -> usize {
        self.spans.len()
    }

    /// Every site with its offsets at `max_rank`, in layout order. The position is the site's index in the slot table.
    pub fn spans(&self) -> &[SiteSpan] {
        &self.spans
    }

    /// Index of `site` in the slot table, or none where the layout lacks it.
    pub fn site_index(&self, site: Site) -> Option<usize> {
        let range = match site.layer_index() {
            Some(layer) => *self.layer_starts.get(layer)?..*self.layer_starts.get(layer + 1)?,
            None => *self.layer_starts.last()?..self.spans.len(),
        };
        let start = range.start;
        self.spans[range].iter().position(|span| span.site == site).map(|index| start + index)
    }

    /// Bytes of a slot at `max_rank`: the fixed stride.
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Byte offset of `slot` in the pool's memory at fixed stride; slot 0 stands at 0.
    pub fn slot_base_offset(&self, slot: SlotId) -> Result<usize, LayoutError> {
        slot.index()
            .checked_mul(self.slot_bytes)
            .filter(|offset| offset.checked_add(self.slot_bytes).is_some())
            .ok_or(LayoutError::SlotOverflow { slot, slot_bytes: self.slot_bytes })
    }

    /// The same sites, placed tightly at real ranks: `ranks[i]` is the rank of site `i`, 0 where the adapter lacks it.
    pub fn packed(&self, ranks: &[usize]) -> Result<PackedLayout, LayoutError> {
        if ranks.len() != self.spans.len() {
            return Err(LayoutError::RankCount { expected: self.spans.len(), given: ranks.len() });
        }
        let mut placer = Placer::new(self.options.dtype);
        for (span, &rank) in self.spans.iter().zip(ranks) {
            if rank > self.options.max_rank {
                let max_rank = self.options.max_rank;
                return Err(LayoutError::RankTooLarge { site: span.site, rank, max_rank });
            }
            placer.place(span.site, span.features, rank)?;
        }
        Ok(PackedLayout { spans: placer.spans, image_bytes: placer.end })
    }

    /// The digest that two sides compare before an image moves between them.
    pub fn fingerprint(&self) -> LayoutFingerprint {
        self.fingerprint
    }
}

/// A slot image at its real ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedLayout {
    spans: Vec<SiteSpan>,
    image_bytes: usize,
}

impl PackedLayout {
    /// Every site of the layout, in the same order and number as [`SlotLayout::spans`]; rank 0 takes no bytes.
    pub fn spans(&self) -> &[SiteSpan] {
        &self.spans
    }

    /// Bytes of the image.
    pub fn image_bytes(&self) -> usize {
        self.image_bytes
    }
}

/// Places one span after the other.
struct Placer {
    dtype: SlotDtype,
    spans: Vec<SiteSpan>,
    end: usize,
}

impl Placer {
    fn new(dtype: SlotDtype) -> Self {
        Placer { dtype, spans: Vec::new(), end: 0 }
    }

    fn place(&mut self, site: Site, features: Features, rank: usize) -> Result<(), LayoutError> {
        let overflow = LayoutError::Overflow { site, rank };
        let span = self.span(site, features, rank).ok_or(overflow)?;
        self.spans.push(span);
        Ok(())
    }

    fn span(&mut self, site: Site, features: Features, rank: usize) -> Option<SiteSpan> {
        let bytes = |width: usize| rank.checked_mul(width)?.checked_mul(self.dtype.bytes());
        let a_bytes = bytes(features.in_features)?;
        let b_bytes = bytes(features.out_features)?;
        let a_offset = self.end;
        let b_offset = a_offset.checked_add(a_bytes)?.checked_next_multiple_of(ALIGNMENT)?;
        self.end = b_offset.checked_add(b_bytes)?.checked_next_multiple_of(ALIGNMENT)?;
        Some(SiteSpan { site, features, rank, a_offset, a_bytes, b_offset, b_bytes })
    }
}

/// Hashes the version, the options and every span as text lines: text has one reading, whatever the word size.
fn fingerprint(options: &LayoutOptions, spans: &[SiteSpan], slot_bytes: usize) -> LayoutFingerprint {
    let mut hasher = blake3::Hasher::new();
    let mut line = |text: String| {
        hasher.update(text.as_bytes());
        hasher.update(b"\n");
    };
    line(format!(
        "slot-layout v{LAYOUT_VERSION} {} max_rank {} bytes {slot_bytes}",
        options.dtype.name(),
        options.max_rank
    ));
    for span in spans {
        let Features { in_features, out_features } = span.features;
        line(format!("{} in {in_features} out {out_features} a {} b {}", span.site, span.a_offset, span.b_offset));
    }
    LayoutFingerprint(*hasher.finalize().as_bytes())
}
