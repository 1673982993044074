//! How a row meets the expert deltas of its adapter.
//!
//! Every kind of step (one row, a batch, prefill and decode together, several rows of a sequence) stamps its rows with
//! [`MoeRoute::stamp`] and joins them; a step whose join is [`MoeRoute::Refuse`] fails on the host before any kernel.

use crate::selection::Route;
use crate::site::SlotId;

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

/// Which expert deltas a back end can apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ExpertAbility {
    /// Those of any adapter, row by row.
    PerRow,
    /// Those of one adapter only: the one in `active`, if any.
    ActiveOnly {
        /// The slot of the adapter that the back end folds.
        active: Option<SlotId>,
    },
    /// None at all.
    Nothing,
}

impl MoeRoute {
    /// The route of one row, or of one of its adapters where a request names several (then join them).
    /// `has_expert_deltas` says whether the adapter in the row's slot carries any; a base row does not ask.
    ///
    /// A row is never served half adapted: what cannot be folded is refused, whatever else the batch holds.
    pub fn stamp(route: Route, has_expert_deltas: bool, ability: ExpertAbility) -> MoeRoute {
        match (route, ability) {
            (Route::Base, _) => MoeRoute::Skip,
            (Route::Slot(_), _) if !has_expert_deltas => MoeRoute::Skip,
            (Route::Slot(_), ExpertAbility::PerRow) => MoeRoute::Fold,
            (Route::Slot(slot), ExpertAbility::ActiveOnly { active }) if active == Some(slot) => MoeRoute::Fold,
            (Route::Slot(_), ExpertAbility::ActiveOnly { .. } | ExpertAbility::Nothing) => MoeRoute::Refuse,
        }
    }

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
