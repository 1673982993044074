//! An adapter packed for a pool.

/// What an adapter takes, for reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct ImageSize {
    /// Bytes of A and B at their real ranks, alignment included.
    pub(crate) image_bytes: usize,
    /// Largest rank.
    pub(crate) max_rank: usize,
    /// Number of sites that it adapts.
    pub(crate) num_sites: usize,
}
