//! Where the slot table is, for those who launch kernels on it.

use lora_math::SlotDtype;

/// The slot table of a pool: `SiteEntry[num_slots][num_sites]` at an address that is fixed for the pool's life.
///
/// # Who may read it, and when
/// A step may read the rows of the slots on which it holds leases, and the A and B that they point to, as long as it
/// holds them. All other rows may be stale, or be written at this moment: no reference may be made over the
/// whole table. The addresses are good as long as the pool lives, and a lease keeps its pool alive.
///
/// Where a step may still run after the call that launched it has returned, its launcher owes the pool a
/// [`step_launched`](crate::LoraPool::step_launched) on the step's stream, behind the launch and before it drops any lease
/// of the step, also when launching failed half way. From there on the leases may go: a slot is written anew only behind
/// that step. Without the call, a dropped lease says that nobody reads the slot any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableRef {
    /// Device address of the entry of slot 0 and site 0.
    pub address: u64,
    /// Rows of the table.
    pub num_slots: usize,
    /// Entries of a row: sites in layout order.
    pub num_sites: usize,
    /// Element type of every A and B.
    pub dtype: SlotDtype,
}
