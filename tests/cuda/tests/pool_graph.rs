//! Pool and kernels together: the launches of a step are captured once, and stay right through loads, replacements, evictions
//! and unloads.

use std::sync::Arc;

use conformance::kernels::{Case, NUM_SLOTS, Pair, Problem, Routing, check};
use conformance_cuda::{OnDevice, on_kernels};
use cuda_standin::Mode;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaGraph, CudaSlice};
use half::bf16;
use lora_adapter::{Adapter, LoraPair, Matrix, PreparedAdapter, prepare};
use lora_kernels::SiteRef;
use lora_kernels::cuda::{CudaStep, DeviceRows, DeviceRowsMut, DeviceTable, StepBounds, Workspace, WorkspaceCapacity};
use lora_math::rows::RowsCapacity;
use lora_math::scaling::ScalingRule;
use lora_math::shape::MlpSize;
use lora_math::{Features, LayerShape, ModelShape, Module, RowAdapter, Site, SlotDtype, StepRows};
use lora_pool::{CudaMemory, Lease, LoraPool, PoolOptions, Staged};

const MAX_ROWS: usize = 6;
const CAPACITY: RowsCapacity = RowsCapacity { max_rows: MAX_ROWS, max_entries: 2 * MAX_ROWS, num_slots: NUM_SLOTS };
const LAYERS: usize = 2;
const HIDDEN: usize = 24;
const INTERMEDIATE: usize = 40;

fn shape() -> ModelShape {
    let mlp = MlpSize { hidden_size: HIDDEN, intermediate_size: INTERMEDIATE };
    ModelShape::uniform(HIDDEN, 32, LAYERS, LayerShape::new().with_mlp(mlp)).expect("a shape")
}

/// Sites that read one input, for each layer.
fn products() -> Vec<Vec<Site>> {
    let layer = |layer| {
        [vec![Module::GateProj, Module::UpProj], vec![Module::DownProj]]
            .map(|modules| modules.into_iter().map(|module| Site::layer(layer, module)).collect())
    };
    (0..LAYERS).flat_map(layer).collect()
}

/// Values that are exact in bf16 and depend on the seed.
fn values(seed: usize, count: usize) -> Vec<f32> {
    (0..count).map(|i| ((seed * 37 + i * 11) % 61) as f32 / 64.0 - 0.5).collect()
}

/// A and B of an adapter at a site.
fn matrices(seed: usize, site: usize, rank: usize, features: Features) -> (Vec<f32>, Vec<f32>) {
    let seed = seed * 10 + site;
    (values(seed, rank * features.in_features), values(seed + 5, features.out_features * rank))
}

/// An adapter of the model and what it is made of. The second product of the last layer has no pair.
#[derive(Clone)]
struct Known {
    seed: usize,
    rank: usize,
}

impl Known {
    fn pair(&self, site: usize, features: Features) -> Pair {
        if site == 3 * LAYERS - 1 {
            return Pair { rank: 0, scaling: 0.0, a: vec![], b: vec![] };
        }
        let (a, b) = matrices(self.seed, site, self.rank, features);
        Pair { rank: self.rank, scaling: 0.5, a, b }
    }

    fn prepared(&self) -> PreparedAdapter {
        let shape = shape();
        let sites = products().into_iter().flatten().enumerate().take(3 * LAYERS - 1);
        let pairs = sites.map(|(index, site)| {
            let features = shape.features(site).expect("a site of the model");
            let (a, b) = matrices(self.seed, index, self.rank, features);
            let a = Matrix::from_f32(self.rank, features.in_features, &a).expect("a matrix");
            let b = Matrix::from_f32(features.out_features, self.rank, &b).expect("a matrix");
            let alpha = 0.5 * self.rank as f64;
            (site, LoraPair::new(a, b, alpha, ScalingRule::Standard).expect("a pair"))
        });
        prepare(Adapter::from_pairs(pairs).expect("an adapter"), &shape).expect("an adapter of the model")
    }
}

/// A product's buffers: input, output, and what the base product gives.
struct Product {
    sites: Vec<SiteRef>,
    x: Vec<f32>,
    base: Vec<Vec<f32>>,
    device_x: CudaSlice<bf16>,
    device_base: Vec<CudaSlice<bf16>>,
    device_y: Vec<CudaSlice<bf16>>,
}

struct Engine {
    device: OnDevice,
    pool: Arc<LoraPool<CudaMemory>>,
    step: CudaStep,
    workspace: Workspace,
    products: Vec<Product>,
}

impl Engine {
    fn new() -> Self {
        let none = RowsCapacity { max_rows: 0, max_entries: 0, num_slots: NUM_SLOTS };
        let device = OnDevice::new(none, 1);
        let options = PoolOptions { num_slots: NUM_SLOTS, max_rank: 8, ..PoolOptions::default() };
        let allocate = |num_bytes| CudaMemory::allocate(device.stream.context(), num_bytes, 1 << 20);
        let pool = LoraPool::open_in(&shape(), options, allocate).expect("a pool");
        let bounds = StepBounds::grouped(CAPACITY);
        let step = CudaStep::new(&device.stream, bounds).expect("a step");
        let capacity = WorkspaceCapacity { bounds, max_sites: 2, max_rank: 8, max_in_features: INTERMEDIATE };
        let workspace = Workspace::new(&device.stream, capacity).expect("a workspace");
        let layout = pool.layout();
        let products = products()
            .into_iter()
            .enumerate()
            .map(|(number, sites)| {
                let sites: Vec<SiteRef> = sites
                    .into_iter()
                    .map(|site| {
                        let index = layout.site_index(site).expect("a site of the pool");
                        SiteRef { index, features: layout.spans()[index].features }
                    })
                    .collect();
                let x = values(number, MAX_ROWS * sites[0].features.in_features);
                let base: Vec<Vec<f32>> = sites
                    .iter()
                    .enumerate()
                    .map(|(site, SiteRef { features, .. })| values(number + site, MAX_ROWS * features.out_features))
                    .collect();
                let upload = |values: &[f32], width| device.upload::<bf16>(values, width, 0);
                let all = || -> Vec<CudaSlice<bf16>> {
                    let widths = sites.iter().map(|site| site.features.out_features);
                    base.iter().zip(widths).map(|(base, width)| upload(base, width)).collect()
                };
                let device_x = upload(&x, sites[0].features.in_features);
                Product { device_x, device_base: all(), device_y: all(), sites, x, base }
            })
            .collect();
        Engine { device, pool, step, workspace, products }
    }

    fn capture(&mut self) -> CudaGraph {
        let (stream, table) = (self.device.stream.clone(), self.pool.table());
        let max_rank = self.pool.layout().max_rank();
        // SAFETY: the pool outlives the graph, and steps name slots of leases that are held until `step_launched`.
        let table =
            unsafe { DeviceTable::from_raw(table.address, table.num_slots, table.num_sites, table.dtype, max_rank) };
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).expect("a capture");
        for product in &mut self.products {
            for (y, base) in product.device_y.iter_mut().zip(&product.device_base) {
                stream.memcpy_dtod(base, y).expect("a copy");
            }
            let Product { sites, device_x, device_y, .. } = product;
            let x = DeviceRows::new(device_x, sites[0].features.in_features).expect("rows");
            let kernels = &self.device.kernels;
            kernels.shrink(&table, &self.step, sites, x, &mut self.workspace).expect("a shrink");
            let mut y: Vec<DeviceRowsMut<'_, bf16>> = device_y
                .iter_mut()
                .zip(sites.iter())
                .map(|(y, site)| DeviceRowsMut::new(y, site.features.out_features).expect("rows"))
                .collect();
            kernels.expand(&table, &self.step, sites, &self.workspace, &mut y).expect("an expand");
        }
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        stream.end_capture(flags).expect("a capture that ends").expect("a graph")
    }

    /// Launches a step whose rows use these leases, and tells the pool of it.
    fn launch(&mut self, graph: &CudaGraph, rows: &[Vec<&Lease>]) {
        let uses = |leases: &Vec<&Lease>| -> Vec<RowAdapter> {
            leases.iter().map(|lease| RowAdapter { slot: lease.slot(), scale: 1.0 }).collect()
        };
        let uses: Vec<_> = rows.iter().map(uses).collect();
        let mut step = StepRows::with_capacity(CAPACITY);
        step.stamp(&uses, MAX_ROWS).expect("a step that fits");
        self.step.upload(&step, None).expect("an upload");
        graph.launch().expect("a replay");
        self.pool.step_launched(&self.device.stream).expect("a fence");
    }

    /// The outputs of the last step, in the order of the products.
    fn outputs(&self) -> Vec<Vec<Vec<f32>>> {
        let of = |product: &Product| product.device_y.iter().map(|y| self.device.download(y)).collect();
        self.products.iter().map(of).collect()
    }

    /// Checks outputs of a step whose rows used these adapters.
    fn check(&self, outputs: &[Vec<Vec<f32>>], rows: &[Vec<&Known>]) {
        let mut site = 0;
        for (product, outputs) in self.products.iter().zip(outputs) {
            // Each use has a slot of its own here: what counts is which adapter a row used, not where it stood.
            let mut known: Vec<&Known> = Vec::new();
            for &used in rows.iter().flatten() {
                if !known.iter().any(|other| other.seed == used.seed) {
                    known.push(used);
                }
            }
            let slot_of = |used: &Known| {
                let slot = known.iter().position(|other| other.seed == used.seed).expect("one of them");
                RowAdapter { slot: lora_math::SlotId::new(slot as u32), scale: 1.0 }
            };
            let rows: Vec<Vec<RowAdapter>> =
                rows.iter().map(|uses| uses.iter().map(|used| slot_of(used)).collect()).collect();
            let pairs = |used: &&Known| -> Vec<Pair> {
                let sites = product.sites.iter().enumerate();
                sites.map(|(i, SiteRef { features, .. })| used.pair(site + i, *features)).collect()
            };
            let problem = Problem {
                case: Case {
                    dtype: SlotDtype::Bf16,
                    rank: 8,
                    in_features: product.sites[0].features.in_features,
                    out_features: product.sites[0].features.out_features,
                    num_sites: product.sites.len(),
                    num_rows: rows.len(),
                    padding: MAX_ROWS - rows.len(),
                    routing: Routing::Base,
                    packed: false,
                    side_by_side: false,
                    tiled: false,
                },
                sites: product.sites.clone(),
                pairs: known.iter().map(pairs).collect(),
                rows,
                x: product.x.clone(),
                y: product.base.clone(),
            };
            check(&problem, SlotDtype::Bf16, outputs).unwrap_or_else(|error| panic!("{error}"));
            site += product.sites.len();
        }
    }
}

#[test]
fn a_captured_step_outlives_loads_replacements_and_evictions() {
    let modes = [Mode::PLAIN, Mode::shuffled(5), Mode::ADDRESS];
    on_kernels("a_captured_step_outlives_loads_replacements_and_evictions", &modes, || {
        let mut engine = Engine::new();
        let stream = engine.device.stream.clone();
        let graph = engine.capture();
        let pool = engine.pool.clone();
        let known = |seed, rank| Known { seed, rank };
        let load =
            |name: &str, adapter: &Known| pool.load_leased_on(name, &adapter.prepared(), &stream).expect("a load");
        let (a, b, c, d) = (known(1, 8), known(2, 3), known(3, 1), known(4, 8));

        let (lease_a, lease_b) = (load("a", &a), load("b", &b));
        engine.launch(&graph, &[vec![&lease_a], vec![], vec![&lease_b], vec![&lease_b, &lease_a]]);
        engine.check(&engine.outputs(), &[vec![&a], vec![], vec![&b], vec![&b, &a]]);

        // A third is staged by another thread while a step has not run yet, and published behind it.
        engine.launch(&graph, &[vec![&lease_a], vec![&lease_b]]);
        let staged = std::thread::scope(|scope| {
            scope.spawn(|| pool.stage("c", &c.prepared()).expect("a landing")).join().expect("a loader")
        });
        let Staged::Landing(landing) = staged else { panic!("resident") };
        let lease_c = landing.publish_leased(&stream).expect("a publication");
        engine.check(&engine.outputs(), &[vec![&a], vec![&b]]);
        engine.launch(&graph, &[vec![&lease_c], vec![&lease_a], vec![&lease_c, &lease_b]]);
        engine.check(&engine.outputs(), &[vec![&c], vec![&a], vec![&c, &b]]);

        // A replacement: the running request keeps what it holds, the next one gets the successor, both in one step.
        pool.replace_on("b", &d.prepared(), None, &stream).expect("a replacement");
        let lease_d =
            pool.acquire(&lora_math::AdapterSelection::Named("b".into())).expect("resident").expect("a lease");
        engine.launch(&graph, &[vec![&lease_b], vec![&lease_d], vec![], vec![&lease_d, &lease_b]]);
        engine.check(&engine.outputs(), &[vec![&b], vec![&d], vec![], vec![&d, &b]]);

        // Leases go while their step has not run; others take the slots. The step still reads what it named.
        engine.launch(&graph, &[vec![&lease_a], vec![&lease_b], vec![&lease_c]]);
        drop((lease_a, lease_b, lease_c));
        pool.evict("a").expect("an eviction");
        assert!(pool.unload("c").expect("an unload").is_done());
        let newer: Vec<Known> = (10..14).map(|seed| known(seed, 8)).collect();
        let leases: Vec<Lease> = newer.iter().map(|adapter| load(&format!("n{}", adapter.seed), adapter)).collect();
        engine.check(&engine.outputs(), &[vec![&a], vec![&b], vec![&c]]);
        let rows: Vec<Vec<&Lease>> = leases.iter().map(|lease| vec![lease]).collect();
        engine.launch(&graph, &rows);
        let rows: Vec<Vec<&Known>> = newer.iter().map(|adapter| vec![adapter]).collect();
        engine.check(&engine.outputs(), &rows);

        // And with nothing but base rows.
        engine.launch(&graph, &[vec![], vec![]]);
        engine.check(&engine.outputs(), &[vec![], vec![]]);
    });
}
