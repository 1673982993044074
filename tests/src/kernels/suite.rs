//! Bodies of the suite. They panic with the case and the first bad element.

use lora_math::SlotDtype;

use super::case::Case;
use super::check::check;
use super::problem::Problem;

/// What the suite asks of a back end.
pub trait Backend {
    /// Type of the activations that go with slots of a type; none where the back end does not take such slots.
    fn activations(&self, slots: SlotDtype) -> Option<SlotDtype>;

    /// Adds the adapters of the problem's step to a copy of its outputs, and gives that.
    fn apply(&self, problem: &Problem) -> Vec<Vec<f32>>;
}

fn problems(backend: &dyn Backend, cases: &[Case], mut body: impl FnMut(Problem, SlotDtype)) {
    for (number, &case) in cases.iter().enumerate() {
        if let Some(activations) = backend.activations(case.dtype) {
            body(Problem::new(case, number as u64), activations);
        }
    }
}

/// Every case against the oracle; what nothing is added to keeps its bits.
pub fn matches_the_oracle(backend: &dyn Backend, cases: &[Case]) {
    problems(backend, cases, |problem, activations| {
        let found = backend.apply(&problem);
        check(&problem, activations, &found).unwrap_or_else(|error| panic!("{:?}: {error}", problem.case));
    });
}

/// What a step leaves in scratch reaches no later one, numbers that are none included: every case runs behind one of the
/// largest rank whose input is not a number.
pub fn garbage_of_a_step_reaches_no_other(backend: &dyn Backend, cases: &[Case]) {
    problems(backend, cases, |problem, activations| {
        let rank = super::MAX_RANK;
        let mut before = Problem::new(Case { rank, ..problem.case }, 0);
        before.x.fill(f32::NAN);
        backend.apply(&before);
        let found = backend.apply(&problem);
        check(&problem, activations, &found).unwrap_or_else(|error| panic!("{:?}: {error}", problem.case));
    });
}

/// A row has the same bits in a batch and alone.
pub fn rows_do_not_depend_on_company(backend: &dyn Backend, cases: &[Case]) {
    problems(backend, cases, |problem, _| {
        let batch = backend.apply(&problem);
        // Every row of a short step, some of a long one.
        for row in (0..problem.rows.len()).step_by(1 + problem.rows.len() / 7) {
            let alone = backend.apply(&problem.alone(row));
            for (site, (batch, alone)) in batch.iter().zip(&alone).enumerate() {
                let width = problem.sites[site].features.out_features;
                let batch = &batch[row * width..][..width];
                let differs = batch.iter().zip(alone).position(|(a, b)| a.to_bits() != b.to_bits());
                if let Some(n) = differs {
                    let (batch, alone) = (batch[n], alone[n]);
                    panic!(
                        "{:?}: site {site}, row {row}, column {n}: {batch} in the batch, {alone} alone",
                        problem.case
                    );
                }
            }
        }
    });
}

/// A step has the same bits with tiles for its long runs and without.
pub fn tiles_give_the_bits_of_groups(backend: &dyn Backend, cases: &[Case]) {
    problems(backend, cases, |problem, _| {
        let with = |tiled| {
            let mut problem = problem.clone();
            problem.case.tiled = tiled;
            backend.apply(&problem)
        };
        let bits = |outputs: Vec<Vec<f32>>| -> Vec<Vec<u32>> {
            outputs.into_iter().map(|y| y.into_iter().map(f32::to_bits).collect()).collect()
        };
        assert_eq!(bits(with(true)), bits(with(false)), "{:?}", problem.case);
    });
}
