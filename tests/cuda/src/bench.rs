//! How long the LoRA launches of a decode step take on a device: one row for each adapter, all launches in one graph, timed by
//! events, with more adapter memory than caches hold.

use std::sync::Arc;

use cudarc::driver::sys::{CUdevice_attribute, CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaGraph, CudaSlice, CudaStream, DevicePtr, DriverError};
use half::bf16;
use lora_kernels::SiteRef;
use lora_kernels::cuda::{
    CudaError, CudaKernels, CudaStep, DeviceRows, DeviceRowsMut, DeviceTable, StepBounds, Workspace, WorkspaceCapacity,
};
use lora_math::rows::RowsCapacity;
use lora_math::{Features, RowAdapter, SiteEntry, SlotDtype, SlotId, StepRows};

/// Widths of a model's layer.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Name of the model.
    pub name: &'static str,
    /// Layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of q and of o's input.
    pub q: usize,
    /// Width of k and of v.
    pub kv: usize,
    /// Width between gate and down.
    pub intermediate: usize,
}

/// The shapes of the table.
pub const SHAPES: [Shape; 3] = [
    Shape { name: "SmolLM2-135M", layers: 30, hidden: 576, q: 576, kv: 192, intermediate: 1536 },
    Shape { name: "Llama-3-8B", layers: 32, hidden: 4096, q: 4096, kv: 1024, intermediate: 14336 },
    Shape { name: "Qwen3-32B", layers: 64, hidden: 5120, q: 8192, kv: 1024, intermediate: 25600 },
];

impl Shape {
    /// The products of a layer: input width, and output width of each site.
    fn products(&self) -> [(usize, Vec<usize>); 4] {
        [
            (self.hidden, vec![self.q, self.kv, self.kv]),
            (self.q, vec![self.hidden]),
            (self.hidden, vec![self.intermediate; 2]),
            (self.intermediate, vec![self.hidden]),
        ]
    }

    /// Values of A and B of one adapter in one layer, for each rank.
    fn values_per_rank(&self) -> usize {
        self.products().iter().map(|(input, outputs)| outputs.iter().map(|output| input + output).sum::<usize>()).sum()
    }
}

/// One line of the table.
#[derive(Clone, Debug)]
pub struct Line {
    /// The model.
    pub shape: &'static str,
    /// Rank of every adapter.
    pub rank: usize,
    /// Distinct adapters, one row each.
    pub adapters: usize,
    /// Layers that were run: all, or as many as fit in the memory.
    pub layers: usize,
    /// Kernel launches in a layer.
    pub launches_per_layer: usize,
    /// Median over the replays, in microseconds.
    pub layer_us: f64,
    /// Bytes of A and B that a layer reads.
    pub layer_bytes: usize,
    /// Those bytes over the time.
    pub gb_per_s: f64,
    /// And that over the bandwidth of a copy in the same run.
    pub share_of_copy: f64,
}

/// What a bench needs of a device.
pub struct Bench {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    kernels: CudaKernels,
    /// Bytes of adapters at most.
    budget: usize,
    /// Timed replays.
    replays: usize,
    /// Bytes moved per second by a copy on the device, read and write.
    copy_bandwidth: f64,
}

impl Bench {
    /// Measures the copy bandwidth with buffers of `copy_bytes`, and keeps adapters within `budget` bytes.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(budget: usize, replays: usize, copy_bytes: usize) -> Result<Self, CudaError> {
        let context = crate::context();
        let stream = context.new_stream().map_err(driver)?;
        let kernels = crate::kernels(&context);
        let mut bench = Bench { context, stream, kernels, budget, replays, copy_bandwidth: 0.0 };
        bench.copy_bandwidth = bench.measure_copy(copy_bytes)?;
        Ok(bench)
    }

    /// Name of the device, and the copy bandwidth in GB/s.
    ///
    /// # Errors
    /// The driver's.
    pub fn device(&self) -> Result<(String, f64), CudaError> {
        Ok((self.context.name().map_err(driver)?, self.copy_bandwidth / 1e9))
    }

    fn measure_copy(&self, num_bytes: usize) -> Result<f64, CudaError> {
        let source = self.stream.alloc_zeros::<u8>(num_bytes).map_err(driver)?;
        let mut target = self.stream.alloc_zeros::<u8>(num_bytes).map_err(driver)?;
        let seconds = self.median_seconds(|| self.stream.memcpy_dtod(&source, &mut target).map_err(driver))?;
        Ok(2.0 * num_bytes as f64 / seconds)
    }

    /// Median over the replays, after two that are not counted.
    fn median_seconds(&self, mut work: impl FnMut() -> Result<(), CudaError>) -> Result<f64, CudaError> {
        let mut times = Vec::new();
        for replay in 0..self.replays + 2 {
            let event = || self.stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).map_err(driver);
            let start = event()?;
            work()?;
            let end = event()?;
            self.stream.synchronize().map_err(driver)?;
            if replay >= 2 {
                times.push(f64::from(start.elapsed_ms(&end).map_err(driver)?) / 1e3);
            }
        }
        times.sort_by(f64::total_cmp);
        // A clock that is too coarse for a run on the stand-in shows no time at all.
        Ok(times[times.len() / 2].max(1e-9))
    }

    /// One line: all layers that fit, captured once and replayed.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Panics
    /// If a layer's adapters do not fit the budget.
    pub fn line(&self, shape: &Shape, rank: usize, adapters: usize) -> Result<Line, CudaError> {
        let layer_bytes = 2 * shape.values_per_rank() * rank * adapters;
        let layers = (self.budget / layer_bytes).min(shape.layers);
        assert!(layers > 0, "{}: a layer of {adapters} adapters has {layer_bytes} bytes", shape.name);
        let capacity = RowsCapacity { max_rows: adapters, max_entries: adapters, num_slots: adapters };
        let mut step = CudaStep::new(&self.stream, StepBounds::grouped(capacity))?;
        let mut model = Model::new(&self.stream, shape, rank, layers, step.bounds())?;
        let mut rows = StepRows::with_capacity(capacity);
        let uses: Vec<_> =
            (0..adapters).map(|slot| [RowAdapter { slot: SlotId::new(slot as u32), scale: 1.0 }]).collect();
        rows.stamp(&uses, adapters).expect("one row for each slot");
        step.upload(&rows, None)?;
        let (graph, nodes) = model.capture(self, &step)?;
        let seconds = self.median_seconds(|| graph.launch().map_err(driver))?;
        let layer_seconds = seconds / layers as f64;
        let bandwidth = layer_bytes as f64 / layer_seconds;
        Ok(Line {
            shape: shape.name,
            rank,
            adapters,
            layers,
            launches_per_layer: nodes / layers,
            layer_us: layer_seconds * 1e6,
            layer_bytes,
            gb_per_s: bandwidth / 1e9,
            share_of_copy: bandwidth / self.copy_bandwidth,
        })
    }

    /// Whether a line's adapters are more than the device's second-level cache holds: then every replay reads memory.
    ///
    /// # Errors
    /// The driver's.
    pub fn is_cold(&self, line: &Line) -> Result<bool, CudaError> {
        let cache = self.context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE).map_err(driver)?;
        Ok(line.layer_bytes * line.layers > 4 * cache as usize)
    }
}

/// Adapters and activations of some layers.
struct Model {
    products: Vec<Product>,
    num_sites: usize,
    rank: usize,
    adapters: usize,
    entries: CudaSlice<u8>,
    workspace: Workspace,
    _values: CudaSlice<u8>,
}

struct Product {
    sites: Vec<SiteRef>,
    in_features: usize,
    x: CudaSlice<bf16>,
    y: CudaSlice<bf16>,
}

impl Model {
    fn new(
        stream: &Arc<CudaStream>,
        shape: &Shape,
        rank: usize,
        layers: usize,
        bounds: StepBounds,
    ) -> Result<Self, CudaError> {
        let adapters = bounds.rows.num_slots;
        let num_sites = 7 * layers;
        let num_bytes = 2 * shape.values_per_rank() * rank * adapters * layers;
        let values = stream.alloc_zeros::<u8>(num_bytes).map_err(driver)?;
        let base = values.device_ptr(stream).0;
        let mut entries = vec![SiteEntry::EMPTY; adapters * num_sites];
        let mut products = Vec::new();
        let (mut next, mut column) = (0, 0);
        for _ in 0..layers {
            for (in_features, outputs) in shape.products() {
                let mut sites = Vec::new();
                for &out_features in &outputs {
                    let features = Features { in_features, out_features };
                    sites.push(SiteRef { index: column, features });
                    for slot in 0..adapters {
                        let a = base + next as u64;
                        let b = a + (2 * rank * in_features) as u64;
                        next += 2 * rank * (in_features + out_features);
                        entries[slot * num_sites + column] = SiteEntry { a, b, rank: rank as u32, scaling: 1.0 };
                    }
                    column += 1;
                }
                let zeros = |width: usize| stream.alloc_zeros::<bf16>(adapters * width).map_err(driver);
                let (x, y) = (zeros(in_features)?, zeros(outputs.iter().sum())?);
                products.push(Product { sites, in_features, x, y });
            }
        }
        let entries: Vec<u8> = entries.into_iter().flat_map(SiteEntry::to_bytes).collect();
        let entries = stream.clone_htod(&entries).map_err(driver)?;
        let max_in_features = products.iter().map(|product| product.in_features).max().unwrap_or(0);
        let capacity = WorkspaceCapacity { bounds, max_sites: 3, max_rank: rank, max_in_features };
        let workspace = Workspace::new(stream, capacity)?;
        Ok(Model { products, num_sites, rank, adapters, entries, workspace, _values: values })
    }

    /// The launches of all layers, and how many nodes they are.
    fn capture(&mut self, bench: &Bench, step: &CudaStep) -> Result<(CudaGraph, usize), CudaError> {
        let address = self.entries.device_ptr(&bench.stream).0;
        // SAFETY: the table and what it points to live as long as this model, which outlives the graph.
        let table =
            unsafe { DeviceTable::from_raw(address, self.adapters, self.num_sites, SlotDtype::Bf16, self.rank) };
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        bench.stream.begin_capture(mode).map_err(driver)?;
        let workspace = &mut self.workspace;
        for Product { sites, in_features, x, y } in &mut self.products {
            let width = sites.iter().map(|site| site.features.out_features).sum();
            bench.kernels.shrink(&table, step, sites, DeviceRows::new(x, *in_features)?, workspace)?;
            let out = DeviceRowsMut::new(y, width)?;
            bench.kernels.expand(&table, step, sites, workspace, &mut [out])?;
        }
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = bench.stream.end_capture(flags).map_err(driver)?.expect("launches");
        let nodes = crate::num_nodes(&graph);
        Ok((graph, nodes))
    }
}

fn driver(source: DriverError) -> CudaError {
    CudaError::Driver { what: "measuring", source }
}
