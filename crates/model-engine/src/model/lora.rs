//! Where adapters meet the layers: the slot table's columns for every group of projections that read one input, and the
//! delta of a step on such a group.
//!
//! The pool's layout decides which sites exist; a projection that it does not cover is left out of its group, and a
//! group without sites costs nothing.

use lora_kernels::{KernelError, LoraKernels, Rows, RowsMut, ShrinkBuffer, SiteRef, SlotTable};
use lora_math::{Features, ModelShape, Module, Site, SlotLayout, StepRows};

/// Projections that read one input, at most: q, k and v.
pub(crate) const MAX_GROUP_SITES: usize = 3;

/// A site of the pool's layout whose features are not the model's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ForeignSite {
    pub(crate) site: Site,
    /// The model's features; none where it has no such site.
    pub(crate) expected: Option<Features>,
    pub(crate) found: Features,
}

/// The sites of all layers.
#[derive(Debug)]
pub(crate) struct LoraPlan {
    pub(crate) layers: Vec<LayerSites>,
    embed: Option<SiteRef>,
    head: Option<SiteRef>,
}

/// The groups of one layer.
#[derive(Debug)]
pub(crate) struct LayerSites {
    pub(crate) qkv: SiteGroup<3>,
    pub(crate) o: SiteGroup<1>,
    pub(crate) gate_up: SiteGroup<2>,
    pub(crate) down: SiteGroup<1>,
}

/// `N` projections that read one input, with the columns of those that the pool covers.
#[derive(Debug)]
pub(crate) struct SiteGroup<const N: usize> {
    covered: [bool; N],
    sites: Vec<SiteRef>,
}

impl LoraPlan {
    /// Looks up every site of `layout`, which must be of a model of this `shape`.
    pub(crate) fn new(shape: &ModelShape, layout: &SlotLayout) -> Result<Self, ForeignSite> {
        for span in layout.spans() {
            let expected = shape.features(span.site);
            if expected != Some(span.features) {
                return Err(ForeignSite { site: span.site, expected, found: span.features });
            }
        }
        let layers = (0..shape.num_layers()).map(|layer| LayerSites {
            qkv: SiteGroup::new(layout, layer, [Module::QProj, Module::KProj, Module::VProj]),
            o: SiteGroup::new(layout, layer, [Module::OProj]),
            gate_up: SiteGroup::new(layout, layer, [Module::GateProj, Module::UpProj]),
            down: SiteGroup::new(layout, layer, [Module::DownProj]),
        });
        let vocabulary = |module| site_ref(layout, Site::Vocabulary { module });
        let (embed, head) = (vocabulary(Module::EmbedTokens), vocabulary(Module::LmHead));
        Ok(LoraPlan { layers: layers.collect(), embed, head })
    }

    /// Whether the pool covers the output head.
    pub(crate) fn covers_head(&self) -> bool {
        self.head.is_some()
    }
}

impl<const N: usize> SiteGroup<N> {
    fn new(layout: &SlotLayout, layer: usize, modules: [Module; N]) -> Self {
        const { assert!(N <= MAX_GROUP_SITES) };
        let sites = modules.map(|module| site_ref(layout, Site::layer(layer, module)));
        SiteGroup { covered: sites.map(|site| site.is_some()), sites: sites.into_iter().flatten().collect() }
    }
}

/// A site as the kernels name it; none where the layout lacks it.
fn site_ref(layout: &SlotLayout, site: Site) -> Option<SiteRef> {
    let index = layout.site_index(site)?;
    Some(SiteRef { index, features: layout.spans()[index].features })
}

/// The adapters of one step: the rows' metadata and the table that they index.
pub(crate) struct LoraStep<'a> {
    pub(crate) kernels: &'a dyn LoraKernels,
    pub(crate) table: SlotTable<'a>,
    pub(crate) rows: &'a StepRows,
    /// The rows whose logits are wanted, in the order of the logits; none where the pool does not cover the head.
    pub(crate) head_rows: Option<&'a StepRows>,
    pub(crate) plan: &'a LoraPlan,
    pub(crate) h: &'a mut ShrinkBuffer,
}

impl LoraStep<'_> {
    /// `x += scaling · B·A[token]` on every row whose adapter has a pair for the embedding.
    pub(crate) fn embed(&mut self, token_ids: &[u32], x: RowsMut<'_>) -> Result<(), KernelError> {
        let Some(site) = self.plan.embed.filter(|_| !self.rows.entries().is_empty()) else { return Ok(()) };
        self.kernels.gather(&self.table, self.rows, &site, token_ids, self.h)?;
        self.kernels.expand(&self.table, self.rows, &[site], self.h, &mut [x])
    }

    /// `logits += scaling · B·A·x` on every row whose adapter has a pair for the head.
    pub(crate) fn head(&mut self, x: Rows<'_>, logits: RowsMut<'_>) -> Result<(), KernelError> {
        let rows = self.head_rows.filter(|rows| !rows.entries().is_empty());
        let (Some(site), Some(rows)) = (self.plan.head, rows) else { return Ok(()) };
        self.kernels.shrink(&self.table, rows, &[site], x, self.h)?;
        self.kernels.expand(&self.table, rows, &[site], self.h, &mut [logits])
    }

    /// `y[i] += scaling · B·A·x` on every row that has an adapter, for each covered projection of the group.
    pub(crate) fn add<const N: usize>(
        &mut self,
        group: fn(&LayerSites) -> &SiteGroup<N>,
        layer: usize,
        x: Rows<'_>,
        y: [RowsMut<'_>; N],
    ) -> Result<(), KernelError> {
        let SiteGroup { covered, sites } = group(&self.plan.layers[layer]);
        if sites.is_empty() || self.rows.entries().is_empty() {
            return Ok(());
        }
        self.kernels.shrink(&self.table, self.rows, sites, x, self.h)?;
        let mut y = y;
        if sites.len() < N {
            // Covered outputs to the front, in order.
            let covered = covered.iter().enumerate().filter(|(_, covered)| **covered);
            for (place, (index, _)) in covered.enumerate() {
                y.swap(place, index);
            }
        }
        self.kernels.expand(&self.table, self.rows, sites, self.h, &mut y[..sites.len()])
    }
}
