//! An adapter packed for a pool: its A and B in the pool's dtype, one after the other at their real ranks.
//!
//! The bytes are packed on the host with no slot in mind, so a failure here touches nothing and an image can be
//! placed in any slot, any number of times. Nothing of the adapter is altered: scalings go to the slot table,
//! not into B.

use std::sync::Arc;

use lora_adapter::{LoraPair, PreparedAdapter};
use lora_math::{Features, Module, PackedLayout, Site, SiteEntry, SlotDtype, SlotLayout};

use crate::error::PoolError;
use crate::memory::{CopyRun, DeviceMemory};

/// What an adapter takes, for reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ImageSize {
    /// Bytes of A and B at their real ranks, alignment included.
    pub(crate) image_bytes: usize,
    /// Largest rank.
    pub(crate) max_rank: usize,
    /// Number of sites that it adapts.
    pub(crate) num_sites: usize,
}

/// A packed image in a host buffer of some memory.
pub(crate) struct PackedImage<B> {
    bytes: Arc<B>,
    packed: PackedLayout,
    /// Scaling of each site, in layout order; 0 where the adapter lacks it.
    scalings: Vec<f32>,
}

/// Where A and B of an adapter stand in its image, at their real ranks: what a pool with slots of `layout` packs.
///
/// # Errors
/// The adapter does not fit such a slot: [`PoolError::UncoveredSites`], [`PoolError::TooLarge`],
/// [`PoolError::FeatureMismatch`].
pub fn packed_layout(prepared: &PreparedAdapter, layout: &SlotLayout) -> Result<PackedLayout, PoolError> {
    check(prepared, layout)?;
    let rank = |site| prepared.pair(site).map_or(0, LoraPair::rank);
    let ranks: Vec<usize> = layout.spans().iter().map(|span| rank(span.site)).collect();
    Ok(layout.packed(&ranks)?)
}

/// Checks that every site of the adapter has its place in a slot of `layout`.
fn check(prepared: &PreparedAdapter, layout: &SlotLayout) -> Result<(), PoolError> {
    let covered = |site| layout.site_index(site).map(|index| &layout.spans()[index]);
    let uncovered: Vec<_> = prepared.pairs().map(|(site, _)| site).filter(|&site| covered(site).is_none()).collect();
    if !uncovered.is_empty() {
        return Err(PoolError::UncoveredSites { sites: uncovered });
    }
    let max_rank = layout.max_rank();
    let too_large = || prepared.pairs().filter(|(_, pair)| pair.rank() > max_rank);
    if let Some((site, pair)) = too_large().max_by_key(|(_, pair)| pair.rank()) {
        return Err(PoolError::TooLarge { site, rank: pair.rank(), max_rank, num_sites: too_large().count() });
    }
    for (site, pair) in prepared.pairs() {
        let found = Features { in_features: pair.in_features(), out_features: pair.out_features() };
        if let Some(expected) = covered(site).map(|span| span.features).filter(|&expected| expected != found) {
            return Err(PoolError::FeatureMismatch { site, expected, found });
        }
    }
    Ok(())
}

impl<B: AsRef<[u8]> + AsMut<[u8]>> PackedImage<B> {
    /// Packs an adapter as its [`packed_layout`] says, in elements of `dtype`.
    pub(crate) fn pack<M>(
        prepared: &PreparedAdapter,
        packed: PackedLayout,
        dtype: SlotDtype,
        memory: &M,
    ) -> Result<Self, PoolError>
    where
        M: DeviceMemory<HostBuffer = B>,
    {
        let mut buffer = memory.host_buffer(packed.image_bytes())?;
        let bytes = buffer.as_mut();
        for span in packed.spans() {
            let Some(pair) = prepared.pair(span.site) else { continue };
            let narrowed = |source| PoolError::Narrowing { site: span.site, source };
            let a = &mut bytes[span.a_offset..span.a_offset + span.a_bytes];
            if span.site == (Site::Vocabulary { module: Module::EmbedTokens }) {
                // Read by token: one row a token.
                pair.a().transposed().write_as(dtype, a).map_err(narrowed)?;
            } else {
                pair.a().write_as(dtype, a).map_err(narrowed)?;
            }
            let b = &mut bytes[span.b_offset..span.b_offset + span.b_bytes];
            pair.b().write_as(dtype, b).map_err(narrowed)?;
        }
        let scaling = |site| prepared.pair(site).map_or(0.0, LoraPair::scaling);
        let scalings = packed.spans().iter().map(|span| scaling(span.site)).collect();
        Ok(PackedImage { bytes: Arc::new(buffer), packed, scalings })
    }

    /// The packed bytes.
    pub(crate) fn bytes(&self) -> &Arc<B> {
        &self.bytes
    }

    /// What the adapter takes.
    pub(crate) fn size(&self) -> ImageSize {
        let ranks = || self.packed.spans().iter().map(|span| span.rank).filter(|&rank| rank > 0);
        ImageSize {
            image_bytes: self.packed.image_bytes(),
            max_rank: ranks().max().unwrap_or_default(),
            num_sites: ranks().count(),
        }
    }

    /// The copies that put the image into a slot of `layout` at `slot_offset`: A and B each at its padded offset.
    /// Neighbours that keep their distance become one run, so an image at full rank is one copy.
    pub(crate) fn copy_runs(&self, layout: &SlotLayout, slot_offset: usize) -> Vec<CopyRun> {
        let mut runs: Vec<CopyRun> = Vec::new();
        for (source, target) in self.packed.spans().iter().zip(layout.spans()).filter(|(source, _)| source.rank > 0) {
            for (source_offset, target_offset, num_bytes) in [
                (source.a_offset, slot_offset + target.a_offset, source.a_bytes),
                (source.b_offset, slot_offset + target.b_offset, source.b_bytes),
            ] {
                match runs.last_mut() {
                    Some(run) if source_offset - run.source_offset == target_offset - run.target_offset => {
                        run.num_bytes = source_offset + num_bytes - run.source_offset;
                    }
                    _ => runs.push(CopyRun { source_offset, target_offset, num_bytes }),
                }
            }
        }
        runs
    }

    /// The row of the slot table for the image in a slot of `layout` that starts at `slot_address`.
    pub(crate) fn table_row(&self, layout: &SlotLayout, slot_address: u64) -> Vec<SiteEntry> {
        let spans = self.packed.spans().iter().zip(layout.spans());
        spans
            .zip(&self.scalings)
            .map(|((source, target), &scaling)| match source.rank {
                0 => SiteEntry::EMPTY,
                rank => SiteEntry {
                    a: slot_address + target.a_offset as u64,
                    b: slot_address + target.b_offset as u64,
                    // At most `lora_adapter::MAX_RANK`.
                    rank: rank as u32,
                    scaling,
                },
            })
            .collect()
    }
}
