//! One suite for the LoRA operations of every back end: cases, operands, a double-precision oracle, and bodies that each
//! test program mounts for what it can run.

mod case;
mod check;
mod cover;
mod problem;
mod suite;

pub use case::{Case, Routing, cases, real_shapes, sanitized};
pub use check::{check, round_to};
pub use problem::{Image, MAX_RANK, NUM_SLOTS, Pair, Problem};
pub use suite::{
    Backend, garbage_of_a_step_reaches_no_other, matches_the_oracle, rows_do_not_depend_on_company,
    tiles_give_the_bits_of_groups,
};
