//! The suite of the LoRA operations on the back ends of this processor; one that it lacks is reported and not counted.

use conformance::kernels::{self, Backend, Image, Problem};
use lora_kernels::cpu::Isa;
use lora_kernels::{Cpu, DeltaRun, LoraKernels, Reference, Rows, RowsMut, ShrinkBuffer, ShrinkCapacity, SlotTable};
use lora_math::{RowRun, SlotDtype, SlotId};

/// Operands in this process's memory.
struct OnHost<'a>(&'a dyn LoraKernels);

impl Backend for OnHost<'_> {
    fn activations(&self, _: SlotDtype) -> Option<SlotDtype> {
        Some(SlotDtype::F32)
    }

    fn apply(&self, problem: &Problem) -> Vec<Vec<f32>> {
        let image = Image::new(problem);
        let entries = image.entries(image.values.as_ptr() as u64);
        let mut y = problem.y.clone();
        if problem.num_rows() == 0 {
            return y;
        }
        let (step, tiles) = problem.step();
        // SAFETY: entries and image outlive the table and are not written.
        let table =
            unsafe { SlotTable::from_raw(entries.as_ptr(), kernels::NUM_SLOTS, image.num_sites, problem.case.dtype) };
        let x = Rows::new(&problem.x, problem.case.in_features).expect("whole rows");
        let capacity = ShrinkCapacity {
            max_entries: step.entries().len().max(1),
            max_sites: problem.sites.len(),
            max_rank: kernels::MAX_RANK,
        };
        let mut h = ShrinkBuffer::new(capacity).expect("a buffer");
        let mut outputs: Vec<RowsMut<'_>> = y
            .iter_mut()
            .zip(&problem.sites)
            .map(|(y, site)| RowsMut::new(y, site.features.out_features).expect("whole rows"))
            .collect();
        self.0.shrink(&table, &step, &problem.sites, x, &mut h).expect("a shrink");
        self.0.expand(&table, &step, &problem.sites, &h, &mut outputs).expect("an expand");
        for tile in tiles.iter().flat_map(|tiles| tiles.tiles()) {
            let first = tile.first_row as usize;
            let uses = &tiles.as_ref().expect("tiles").uses()[tile.first_use as usize..][..tile.num_uses as usize];
            for tile_use in uses {
                let run = RowRun { slot: SlotId::new(tile_use.slot), rows: first..first + tile.num_rows as usize };
                let run = DeltaRun { table: &table, run: &run, scale: tile_use.scale, sites: &problem.sites };
                self.0.delta(run, x, &mut outputs, &mut h).expect("a delta");
            }
        }
        y
    }
}

fn each_backend(body: impl Fn(&dyn Backend)) {
    body(&OnHost(&Reference));
    for isa in Isa::ALL {
        match Cpu::with_isa(isa) {
            Ok(cpu) => body(&OnHost(&cpu)),
            Err(error) => eprintln!("skipped: {error}"),
        }
    }
}

#[test]
fn operations_match_the_oracle() {
    let cases = kernels::cases();
    each_backend(|backend| kernels::matches_the_oracle(backend, &cases));
}

#[test]
fn real_shapes_match_the_oracle() {
    kernels::matches_the_oracle(&OnHost(&Cpu::new()), &kernels::real_shapes());
}

#[test]
fn rows_do_not_depend_on_company() {
    each_backend(|backend| kernels::rows_do_not_depend_on_company(backend, &kernels::sanitized()));
}

#[test]
fn tiles_give_the_bits_of_groups() {
    each_backend(|backend| kernels::tiles_give_the_bits_of_groups(backend, &kernels::sanitized()));
}

#[test]
fn garbage_of_a_step_reaches_no_other() {
    each_backend(|backend| kernels::garbage_of_a_step_reaches_no_other(backend, &kernels::sanitized()));
}
