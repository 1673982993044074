//! How a row meets the expert deltas of its adapter.

/// What a step does with the expert deltas of one row's adapter. The order is the order of a join: worst wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum MoeRoute {
    /// Nothing: a base row, or an adapter without expert deltas.
    #[default]
    Skip,
    /// The adapter's expert deltas are applied to the row.
    Fold,
    /// This back end cannot apply this row's expert deltas: the step must fail before any kernel.
    Refuse,
}

impl MoeRoute {
    /// The route of two parts of a batch together: the worse of the two.
    #[must_use]
    pub fn join(self, other: MoeRoute) -> MoeRoute {
        self.max(other)
    }

    /// The route of a whole batch: `Skip` when it is empty.
    pub fn join_all<I: IntoIterator<Item = MoeRoute>>(routes: I) -> MoeRoute {
        routes.into_iter().fold(MoeRoute::Skip, MoeRoute::join)
    }
}
