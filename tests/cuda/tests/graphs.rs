//! All LoRA launches of a decode step, captured once in a graph that then serves every step.

use conformance::kernels::{Case, NUM_SLOTS, Problem, Routing, check};
use conformance_cuda::{OnDevice, Operands, num_nodes, on_kernels};
use cuda_standin::Mode;
use cudarc::driver::CudaGraph;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use half::bf16;
use lora_kernels::cuda::{CudaError, CudaStep, StepBounds, Workspace, WorkspaceCapacity};
use lora_math::rows::RowsCapacity;
use lora_math::{RowAdapter, SlotDtype, SlotId, StepRows, StepTiles};

const LAYERS: usize = 2;
const MAX_ROWS: usize = 24;
const MAX_RANK: usize = conformance::kernels::MAX_RANK;
const CAPACITY: RowsCapacity = RowsCapacity { max_rows: MAX_ROWS, max_entries: 2 * MAX_ROWS, num_slots: NUM_SLOTS };

/// The LoRA work of a model's decode step: for each layer q, k and v; o; gate and up; down. In place of each base product
/// stands a copy of what it gives.
struct LoraStep {
    device: OnDevice,
    products: Vec<Operands<bf16>>,
    step: CudaStep,
    workspace: Workspace,
}

/// Widths, sites and ranks of a layer's products.
const PRODUCTS: [(usize, usize, usize, usize); 4] =
    [(64, 72, 3, 8), (72, 64, 1, 16), (64, 136, 2, 3), (136, 64, 1, 20)];

fn problem(product: usize, seed: u64) -> Problem {
    let (in_features, out_features, num_sites, rank) = PRODUCTS[product % PRODUCTS.len()];
    let case = Case {
        dtype: SlotDtype::Bf16,
        rank,
        in_features,
        out_features,
        num_sites,
        num_rows: MAX_ROWS,
        padding: 0,
        routing: Routing::Base,
        packed: false,
        side_by_side: num_sites > 1,
        tiled: false,
    };
    Problem::new(case, seed)
}

impl LoraStep {
    fn new(bounds: StepBounds) -> Self {
        let device = OnDevice::new(RowsCapacity { max_rows: 0, max_entries: 0, num_slots: NUM_SLOTS }, 64);
        let products = (0..LAYERS * PRODUCTS.len()).map(|i| Operands::new(&device, &problem(i, i as u64))).collect();
        let step = CudaStep::new(&device.stream, bounds).expect("a step");
        let capacity = WorkspaceCapacity { bounds, max_sites: 3, max_rank: MAX_RANK, max_in_features: 136 };
        let workspace = Workspace::new(&device.stream, capacity).expect("a workspace");
        LoraStep { device, products, step, workspace }
    }

    /// Names the rows of the next step: in groups, or with tiles for long runs.
    fn upload(&mut self, rows: &[Vec<RowAdapter>], padded_rows: usize, tiled: bool) {
        let mut groups = StepRows::with_capacity(CAPACITY);
        if tiled {
            let mut tiles = StepTiles::with_capacity(CAPACITY);
            tiles.stamp(rows).expect("tiles");
            groups.stamp_beside(rows, padded_rows, &tiles).expect("groups");
            self.step.upload(&groups, Some(&tiles)).expect("an upload");
        } else {
            groups.stamp(rows, padded_rows).expect("groups");
            self.step.upload(&groups, None).expect("an upload");
        }
    }

    fn run(&mut self) {
        for product in &mut self.products {
            product.reset(&self.device);
            product.apply(&self.device, &self.step, &mut self.workspace);
        }
    }

    fn capture(&mut self) -> CudaGraph {
        let stream = self.device.stream.clone();
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).expect("a capture");
        self.run();
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        stream.end_capture(flags).expect("a capture that ends").expect("a graph")
    }

    fn outputs(&self) -> Vec<Vec<Vec<f32>>> {
        self.products.iter().map(|product| product.outputs(&self.device)).collect()
    }

    /// Every product of the step against the oracle.
    fn check(&self, rows: &[Vec<RowAdapter>]) {
        for (product, found) in self.products.iter().zip(self.outputs()) {
            let mut problem = product.problem().clone();
            problem.rows = rows.to_vec();
            problem.case.padding = MAX_ROWS - rows.len();
            check(&problem, SlotDtype::Bf16, &found).unwrap_or_else(|error| panic!("{error}"));
        }
    }
}

fn uses(slots: &[u32]) -> Vec<RowAdapter> {
    slots.iter().map(|&slot| RowAdapter { slot: SlotId::new(slot), scale: 1.0 }).collect()
}

/// Steps of all kinds, each with its padded rows.
fn steps() -> Vec<(Vec<Vec<RowAdapter>>, usize)> {
    let turns = (0..MAX_ROWS).map(|row| if row % 7 == 3 { vec![] } else { uses(&[row as u32 % 5]) }).collect();
    let several = (0..12).map(|row| uses(&[row % 5, (row + 2) % 5][..row as usize % 3])).collect();
    vec![
        (turns, MAX_ROWS),
        (several, 16),
        (vec![vec![]; 5], 8),
        (vec![uses(&[4])], 1),
        (vec![], 0),
        (vec![uses(&[2]); MAX_ROWS], MAX_ROWS),
        (vec![vec![], uses(&[3]), vec![]], 3),
    ]
}

#[test]
fn one_capture_serves_every_step() {
    let modes = [Mode::PLAIN, Mode::shuffled(3), Mode::ADDRESS];
    on_kernels("one_capture_serves_every_step", &modes, || {
        let mut lora = LoraStep::new(StepBounds::grouped(CAPACITY));
        lora.upload(&[uses(&[1])], 1, false);
        let graph = lora.capture();
        // One copy for each product beside the launches.
        let launches = num_nodes(&graph) - LAYERS * PRODUCTS.len();
        assert!(launches <= 8 * LAYERS, "{launches} launches in {LAYERS} layers");
        for (rows, padded_rows) in steps() {
            lora.upload(&rows, padded_rows, false);
            graph.launch().expect("a replay");
            lora.check(&rows);
            let replayed = lora.outputs();
            lora.run();
            assert!(lora.outputs() == replayed, "eager launches give other bits");
        }

        // Other adapters in the same slots, and steps that wait on the stream behind one another.
        let (rows, padded_rows) = steps().swap_remove(0);
        for (index, product) in lora.products.iter_mut().enumerate() {
            product.load(&lora.device, &problem(index, 1000 + index as u64));
        }
        for step in [vec![uses(&[0])], vec![], vec![uses(&[3]); 9], rows.clone()] {
            let padded_rows = if step.len() == rows.len() { padded_rows } else { step.len() };
            lora.upload(&step, padded_rows, false);
            graph.launch().expect("a replay");
        }
        lora.check(&rows);
    });
}

#[test]
fn one_capture_serves_long_runs_too() {
    on_kernels("one_capture_serves_long_runs_too", &[Mode::PLAIN, Mode::shuffled(4)], || {
        let mut lora = LoraStep::new(StepBounds::tiled(CAPACITY));
        lora.upload(&[], 0, false);
        let graph = lora.capture();
        for (rows, padded_rows) in steps() {
            let mut found = Vec::new();
            for tiled in [true, false] {
                lora.upload(&rows, padded_rows, tiled);
                graph.launch().expect("a replay");
                lora.check(&rows);
                found.push(lora.outputs());
            }
            assert!(found[0] == found[1], "tiles give other bits than groups");
        }
    });
}

#[test]
fn what_does_not_belong_in_a_graph_is_refused() {
    on_kernels("what_does_not_belong_in_a_graph_is_refused", &[Mode::PLAIN], || {
        let mut lora = LoraStep::new(StepBounds::grouped(CAPACITY));
        let mut groups = StepRows::with_capacity(CAPACITY);
        groups.stamp(&[uses(&[1])], 1).expect("groups");
        let stream = lora.device.stream.clone();
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).expect("a capture");
        let refused = |result: Result<(), CudaError>| matches!(result, Err(CudaError::Capturing { .. }));
        assert!(refused(lora.step.upload(&groups, None)));
        assert!(refused(CudaStep::new(&stream, lora.step.bounds()).map(drop)));
        assert!(refused(Workspace::new(&stream, lora.workspace.capacity()).map(drop)));
        // The capture goes on.
        lora.run();
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = stream.end_capture(flags).expect("a capture that ends").expect("a graph");
        lora.step.upload(&groups, None).expect("an upload");
        graph.launch().expect("a replay");
        lora.check(&[uses(&[1])]);

        // Past the bounds: refused, and the step before stays.
        let rows = vec![uses(&[0, 1, 2]); MAX_ROWS];
        let large = RowsCapacity { max_entries: 3 * MAX_ROWS, ..CAPACITY };
        let mut groups = StepRows::with_capacity(large);
        groups.stamp(&rows, MAX_ROWS).expect("groups");
        let error = lora.step.upload(&groups, None).expect_err("too many uses");
        assert_eq!(error.to_string(), "a step with 72 adapter uses in groups does not fit: the buffers hold 48");
        graph.launch().expect("a replay");
        lora.check(&[uses(&[1])]);
    });
}
