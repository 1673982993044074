//! The suite of the LoRA operations, with the kernels of `kernels/` on the stand-in device.

use conformance::kernels::{
    Case, cases, garbage_of_a_step_reaches_no_other, matches_the_oracle, real_shapes, rows_do_not_depend_on_company,
    sanitized, tiles_give_the_bits_of_groups,
};
use conformance_cuda::{OnDevice, SLOW_MODES, on_kernels};
use cuda_standin::Mode;
use lora_math::rows::RowsCapacity;

/// A device whose workspace takes all of the cases.
fn device(cases: &[Case]) -> OnDevice {
    let most = |of: fn(&Case) -> usize| cases.iter().map(of).max().unwrap_or(0);
    let max_rows = most(|case| case.num_rows + case.padding);
    let rows = RowsCapacity { max_rows, max_entries: 3 * max_rows, num_slots: conformance::kernels::NUM_SLOTS };
    OnDevice::new(rows, most(|case| case.in_features))
}

#[test]
fn operations_match_the_oracle() {
    on_kernels("operations_match_the_oracle", &[Mode::PLAIN], || {
        let cases = cases();
        matches_the_oracle(&device(&cases), &cases);
    });
}

#[test]
fn real_shapes_match_the_oracle() {
    on_kernels("real_shapes_match_the_oracle", &[Mode::PLAIN], || {
        let cases = real_shapes();
        matches_the_oracle(&device(&cases), &cases);
    });
}

#[test]
fn operations_match_the_oracle_in_slow_modes() {
    on_kernels("operations_match_the_oracle_in_slow_modes", &SLOW_MODES, || {
        let cases = sanitized();
        matches_the_oracle(&device(&cases), &cases);
    });
}

#[test]
fn bits_depend_on_the_row_alone() {
    on_kernels("bits_depend_on_the_row_alone", &[Mode::PLAIN, Mode::shuffled(2)], || {
        let cases = sanitized();
        rows_do_not_depend_on_company(&device(&cases), &cases);
        tiles_give_the_bits_of_groups(&device(&cases), &cases);
    });
}

#[test]
fn scratch_keeps_nothing_for_a_later_step() {
    on_kernels("scratch_keeps_nothing_for_a_later_step", &[Mode::PLAIN], || {
        let cases = sanitized();
        garbage_of_a_step_reaches_no_other(&device(&cases), &cases);
    });
}
