//! What a pool is opened with.

use lora_adapter::PreparedAdapter;
use lora_math::{ModuleSet, SlotDtype};

/// Size and element type of a pool's slots. Write `..PoolOptions::default()` behind the fields you set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolOptions {
    /// Number of slots: how many generations can be resident at once.
    pub num_slots: usize,
    /// The largest rank that a site may have.
    pub max_rank: usize,
    /// The modules that a slot covers, as far as the model carries them: projections of layers, embedding and head, no
    /// experts. Every slot has room for all of them at the largest rank, so embedding and head are worth naming only
    /// where adapters have pairs for them; see [`covering`](Self::covering).
    pub modules: ModuleSet,
    /// Element type of every A and B in the pool.
    pub dtype: SlotDtype,
    /// Bytes of packed images that stay in host memory when their generation leaves its slot, so that a load of the same
    /// contents neither packs nor, by [`stage_kept`](crate::LoraPool::stage_kept), reads files. 0: none.
    pub host_bytes: usize,
}

impl Default for PoolOptions {
    /// 4 slots of rank 16 over attention and dense MLP, in bf16; nothing stays on the host.
    fn default() -> Self {
        PoolOptions { num_slots: 4, max_rank: 16, modules: ModuleSet::DENSE, dtype: SlotDtype::Bf16, host_bytes: 0 }
    }
}

impl PoolOptions {
    /// These options, with every module and rank added that `adapters` have pairs of.
    #[must_use]
    pub fn covering<'a>(mut self, adapters: impl IntoIterator<Item = &'a PreparedAdapter>) -> Self {
        for (site, pair) in adapters.into_iter().flat_map(PreparedAdapter::pairs) {
            self.modules = self.modules.with(site.module());
            self.max_rank = self.max_rank.max(pair.rank());
        }
        self
    }
}
