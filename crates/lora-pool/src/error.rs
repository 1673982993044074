//! Why the pool refused, with the numbers, and whether the same call may succeed later.

use lora_adapter::MatrixError;
use lora_math::layout::LayoutError;
use lora_math::selection::SelectionError;
use lora_math::site_table::SiteTableError;
use lora_math::victim::PoolFull;
use lora_math::{AdapterId, ContentDigest, Features, Site};
use thiserror::Error;

use crate::memory::MemoryError;

/// Why the pool refused. Whatever was resident before is still there, unless the variant says otherwise.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum PoolError {
    /// The empty name.
    #[error("an adapter's name must not be empty")]
    EmptyName,
    /// A name past the limit.
    #[error("an adapter's name has {num_bytes} bytes; at most {limit} are allowed")]
    NameTooLong {
        /// Bytes of the name.
        num_bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// The name points to other contents: replace them, or evict them first.
    #[error("{name:?} is taken: it holds {resident:?}, and {offered:?} was offered")]
    NameTaken {
        /// The name.
        name: String,
        /// What it points to.
        resident: AdapterId,
        /// Digest of what was to be loaded.
        offered: ContentDigest,
    },
    /// The name does not point to the generation that was to be replaced. Retry with the one that it points to, if that is
    /// what is meant.
    #[error("{name:?} points to {found:?}, expected {expected:?}")]
    WrongGeneration {
        /// The name.
        name: String,
        /// The generation to be replaced.
        expected: AdapterId,
        /// What the name points to; none where it points to nothing.
        found: Option<AdapterId>,
    },
    /// Another load of the name has begun and not ended. Retry.
    #[error("a load of {name:?} is under way")]
    LoadUnderWay {
        /// The name.
        name: String,
    },
    /// No adapter has this name.
    #[error("no adapter named {name:?} is resident")]
    NotFound {
        /// The name.
        name: String,
    },
    /// The selection names nothing resident.
    #[error(transparent)]
    Selection(#[from] SelectionError),
    /// Requests hold leases on the adapter. Retry when they are done.
    #[error("{name:?} is in use: {num_leases} leases")]
    InUse {
        /// The name.
        name: String,
        /// Leases on it.
        num_leases: usize,
    },
    /// The adapter is the active one: without it, requests for the active adapter would silently get the base model.
    #[error("{name:?} is the active adapter: make another active, or none, before it is evicted")]
    IsActive {
        /// The name.
        name: String,
    },
    /// No slot is free and none may be taken. Retry, unless every slot is pinned.
    #[error(transparent)]
    Full(#[from] PoolFull),
    /// A step was launched behind which the memory could make no fence, so no slot may be written. Retry after the engine's
    /// next [`step_launched`](crate::LoraPool::step_launched) has succeeded; it may be called without a new step.
    #[error("no fence stands behind the last step, so no slot can be written until step_launched succeeds")]
    StepUnfenced,
    /// The adapter adapts sites that the pool's slots do not cover.
    #[error("the adapter has {} sites that this pool's slots do not cover, the first is {}", sites.len(), first(sites))]
    UncoveredSites {
        /// The sites, ascending.
        sites: Vec<Site>,
    },
    /// The adapter's rank is larger than the pool admits.
    #[error("rank {rank} at {site} is larger than the pool's max_rank {max_rank} ({num_sites} sites are too large)")]
    TooLarge {
        /// The site with the largest rank.
        site: Site,
        /// Its rank.
        rank: usize,
        /// The pool's largest rank.
        max_rank: usize,
        /// Number of sites above `max_rank`.
        num_sites: usize,
    },
    /// The adapter was prepared for another model than the pool's.
    #[error("{site}: the adapter has features {found:?}, the pool's model has {expected:?}")]
    FeatureMismatch {
        /// The site.
        site: Site,
        /// Features of the pool's model.
        expected: Features,
        /// Features of the adapter.
        found: Features,
    },
    /// An element is too large for the pool's dtype.
    #[error("{site}: {source}")]
    Narrowing {
        /// The site.
        site: Site,
        /// The element.
        source: MatrixError,
    },
    /// A pool needs a slot.
    #[error("a pool needs at least one slot")]
    NoSlots,
    /// More slots than a kernel's row slot can name, or than the address space holds.
    #[error("{num_slots} slots of {slot_bytes} bytes are too many")]
    TooManySlots {
        /// Slots asked for.
        num_slots: usize,
        /// Bytes of one.
        slot_bytes: usize,
    },
    /// The slots cannot be laid out.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The slot table cannot be made, or a row of it cannot be filled.
    #[error(transparent)]
    Table(#[from] SiteTableError),
    /// The memory failed. If it failed while an adapter was copied in, the slot is free again; a victim that
    /// had to make room for it is gone.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The lease belongs to another pool.
    #[error("the lease on {name:?} belongs to another pool")]
    ForeignLease {
        /// Name under which it was acquired.
        name: String,
    },
}

impl PoolError {
    /// Whether the same call may succeed later, when other requests or loads are done.
    pub fn is_retryable(&self) -> bool {
        match self {
            PoolError::LoadUnderWay { .. } | PoolError::InUse { .. } | PoolError::StepUnfenced => true,
            PoolError::Full(full) => full.is_retryable(),
            PoolError::Memory(error) => error.is_retryable(),
            _ => false,
        }
    }
}

fn first(sites: &[Site]) -> String {
    sites.first().map_or_else(String::new, Site::to_string)
}
