//! What the pool's tests share: a small hybrid model, adapters made in memory, a memory that can fail and tells
//! what was asked of it, and reads that go the way kernels go: through the slot table's addresses.
#![allow(dead_code, reason = "every test file uses its own part")]

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use lora_adapter::{Adapter, LoraPair, Matrix, PreparedAdapter, prepare};
use lora_math::scaling::ScalingRule;
use lora_math::shape::{AttentionSize, MlpSize};
use lora_math::{AdapterSelection, Features, LayerShape, ModelShape, Module, Site, SiteEntry, SlotDtype, SlotLayout};
use lora_pool::{CopyRun, DeviceMemory, HostMemory, HostStream, Lease, LoraPool, MemoryError, PoolError, PoolOptions};

pub(crate) const MAX_RANK: usize = 16;

/// Two full layers and one with an MLP only; every width differs from the others.
pub(crate) fn shape() -> ModelShape {
    let attention = AttentionSize { hidden_size: 8, q_features: 12, kv_features: 4, o_features: 12 };
    let mlp = MlpSize { hidden_size: 8, intermediate_size: 20 };
    let full = LayerShape::new().with_attention(attention).with_mlp(mlp);
    ModelShape::new(8, 32, vec![full.clone(), LayerShape::new().with_mlp(mlp), full]).unwrap()
}

pub(crate) fn options(num_slots: usize) -> PoolOptions {
    PoolOptions { num_slots, max_rank: MAX_RANK, dtype: SlotDtype::F32, ..PoolOptions::default() }
}

/// Numbers in (-1, 1) that depend on nothing but the seed.
pub(crate) fn values(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// An adapter with these ranks, alpha twice the rank.
pub(crate) fn adapter(seed: u64, ranks: &[(Site, usize)]) -> PreparedAdapter {
    let shape = shape();
    let pairs = ranks.iter().zip(1..).map(|(&(site, rank), index)| {
        let Features { in_features, out_features } = shape.features(site).unwrap();
        let seed = seed * 1000 + index * 2;
        let a = Matrix::from_f32(rank, in_features, &values(seed, rank * in_features)).unwrap();
        let b = Matrix::from_f32(out_features, rank, &values(seed + 1, rank * out_features)).unwrap();
        (site, LoraPair::new(a, b, 2.0 * rank as f64, ScalingRule::Standard).unwrap())
    });
    prepare(Adapter::from_pairs(pairs).unwrap(), &shape).unwrap()
}

/// Every dense site of the model.
pub(crate) fn all_sites() -> Vec<Site> {
    let shape = shape();
    let layers = shape.layers().iter().enumerate();
    layers
        .flat_map(|(index, layer)| layer.modules().iter().map(move |&(module, _)| Site::layer(index, module)))
        .collect()
}

/// An adapter of one rank at every site.
pub(crate) fn full_adapter(seed: u64, rank: usize) -> PreparedAdapter {
    let ranks: Vec<_> = all_sites().into_iter().map(|site| (site, rank)).collect();
    adapter(seed, &ranks)
}

/// An adapter of rank 4 at one site.
pub(crate) fn small_adapter(seed: u64) -> PreparedAdapter {
    adapter(seed, &[(Site::layer(0, Module::QProj), 4)])
}

pub(crate) fn named(name: &str) -> AdapterSelection {
    AdapterSelection::Named(name.to_owned())
}

pub(crate) fn lease<M: DeviceMemory>(pool: &Arc<LoraPool<M>>, name: &str) -> Lease {
    pool.acquire(&named(name)).unwrap().unwrap()
}

/// The leased row of the slot table as a kernel reads it.
pub(crate) fn device_entries<M: DeviceMemory>(pool: &Arc<LoraPool<M>>, lease: &Lease) -> Vec<SiteEntry> {
    let table = pool.table();
    let row = std::ptr::with_exposed_provenance::<SiteEntry>(table.address as usize);
    let first = lease.slot().index() * table.num_sites;
    // SAFETY: host memory; the row belongs to a leased slot.
    (first..first + table.num_sites).map(|index| unsafe { row.add(index).read() }).collect()
}

/// f32 numbers at an address of the pool's memory.
fn numbers_at(address: u64, count: usize) -> Vec<f32> {
    let first = std::ptr::with_exposed_provenance::<f32>(address as usize);
    // SAFETY: the callers pass addresses and sizes of entries of a leased slot in host memory.
    (0..count).map(|index| unsafe { first.add(index).read() }).collect()
}

/// Scaling, A and B of one site.
pub(crate) type Pair = (f32, Vec<f32>, Vec<f32>);

/// Every site of the leased slot, read through the table; none where the rank is 0.
pub(crate) fn device_pairs<M: DeviceMemory>(pool: &Arc<LoraPool<M>>, lease: &Lease) -> Vec<Option<Pair>> {
    let entries = device_entries(pool, lease);
    let spans = pool.layout().spans().iter();
    entries
        .iter()
        .zip(spans)
        .map(|(entry, span)| {
            let (rank, Features { in_features, out_features }) = (entry.rank as usize, span.features);
            (rank > 0).then(|| {
                (entry.scaling, numbers_at(entry.a, rank * in_features), numbers_at(entry.b, out_features * rank))
            })
        })
        .collect()
}

/// What [`device_pairs`] must give for an adapter in an f32 pool.
pub(crate) fn adapter_pairs(layout: &SlotLayout, prepared: &PreparedAdapter) -> Vec<Option<Pair>> {
    let pair = |site| prepared.pair(site).map(|pair| (pair.scaling(), pair.a().to_f32(), pair.b().to_f32()));
    layout.spans().iter().map(|span| pair(span.site)).collect()
}

/// What was asked of a [`TestMemory`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    HostBuffer,
    Copy { token: u64, first_target: usize, num_runs: usize, after: Option<u64> },
    Publish { token: u64, target_offset: usize, num_bytes: usize },
    Fence { fence: u64 },
}

/// The test's end of a [`TestMemory`].
#[derive(Debug, Default)]
pub(crate) struct Control {
    events: Mutex<Vec<Event>>,
    /// Operations until one fails; 0 = none will.
    fail_in: AtomicI64,
    next: AtomicU64,
    /// Whether the next fence takes its time after it has been made.
    slow_fence: AtomicBool,
}

impl Control {
    /// Makes the `nth` operation from now fail (1 = the next one), after half of its work.
    pub(crate) fn fail_in(&self, nth: i64) {
        self.fail_in.store(nth, Ordering::SeqCst);
    }

    /// Makes the next fence come back late.
    pub(crate) fn slow_down_a_fence(&self) {
        self.slow_fence.store(true, Ordering::SeqCst);
    }

    /// Whether a fence has been made since the events were taken.
    pub(crate) fn has_made_a_fence(&self) -> bool {
        self.events.lock().unwrap().iter().any(|event| matches!(event, Event::Fence { .. }))
    }

    /// Takes back a failure that has not happened. Whether there was one.
    pub(crate) fn cancel_failure(&self) -> bool {
        self.fail_in.swap(0, Ordering::SeqCst) > 0
    }

    pub(crate) fn take_events(&self) -> Vec<Event> {
        std::mem::take(&mut self.events.lock().unwrap())
    }

    fn fails(&self) -> bool {
        self.fail_in.load(Ordering::SeqCst) > 0 && self.fail_in.fetch_sub(1, Ordering::SeqCst) == 1
    }

    fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::SeqCst)
    }

    fn tell(&self, event: Event) {
        self.events.lock().unwrap().push(event);
    }
}

pub(crate) const INJECTED: MemoryError = MemoryError::Device { operation: "injected", code: 700 };

/// Host memory that starts as NaN everywhere, tells what is asked of it, and fails when told to.
#[derive(Debug)]
pub(crate) struct TestMemory {
    host: HostMemory,
    control: Arc<Control>,
}

/// A pool in such memory.
pub(crate) fn test_pool(options: PoolOptions) -> (Arc<LoraPool<TestMemory>>, Arc<Control>) {
    let control = Arc::new(Control::default());
    let allocate = |num_bytes| {
        let host = HostMemory::allocate(num_bytes)?;
        let run = CopyRun { source_offset: 0, target_offset: 0, num_bytes };
        // SAFETY: nobody else knows the memory yet.
        unsafe { host.copy(Arc::new(vec![0xFF; num_bytes]), &[run], None) }?;
        Ok(TestMemory { host, control: control.clone() })
    };
    let pool = LoraPool::open_in(&shape(), options, allocate).unwrap();
    (pool, control)
}

// SAFETY: all of it is `HostMemory`'s.
unsafe impl DeviceMemory for TestMemory {
    type Stream = HostStream;
    type CopyToken = u64;
    type StepFence = u64;
    type HostBuffer = Vec<u8>;

    fn address(&self) -> u64 {
        self.host.address()
    }

    fn len_bytes(&self) -> usize {
        self.host.len_bytes()
    }

    fn host_buffer(&self, num_bytes: usize) -> Result<Vec<u8>, MemoryError> {
        self.control.tell(Event::HostBuffer);
        if self.control.fails() {
            return Err(MemoryError::Allocation { kind: "host", num_bytes });
        }
        self.host.host_buffer(num_bytes)
    }

    unsafe fn copy(&self, source: Arc<Vec<u8>>, runs: &[CopyRun], after: Option<&u64>) -> Result<u64, MemoryError> {
        let token = self.control.number();
        let first_target = runs[0].target_offset;
        self.control.tell(Event::Copy { token, first_target, num_runs: runs.len(), after: after.copied() });
        let fails = self.control.fails();
        let runs = if fails { &runs[..runs.len().div_ceil(2)] } else { runs };
        // SAFETY: the caller's promise.
        unsafe { self.host.copy(source, runs, None) }?;
        if fails { Err(INJECTED) } else { Ok(token) }
    }

    fn has_arrived(&self, _token: &u64) -> Result<bool, MemoryError> {
        Ok(true)
    }

    unsafe fn publish(
        &self,
        stream: &HostStream,
        token: &u64,
        target_offset: usize,
        rows: &[u8],
    ) -> Result<(), MemoryError> {
        self.control.tell(Event::Publish { token: *token, target_offset, num_bytes: rows.len() });
        let fails = self.control.fails();
        let rows = if fails { &rows[..rows.len() / 2] } else { rows };
        // SAFETY: the caller's promise.
        unsafe { self.host.publish(stream, &lora_pool::Arrived, target_offset, rows) }?;
        if fails { Err(INJECTED) } else { Ok(()) }
    }

    fn fence(&self, _stream: &HostStream) -> Result<u64, MemoryError> {
        let fence = self.control.number();
        self.control.tell(Event::Fence { fence });
        if self.control.slow_fence.swap(false, Ordering::SeqCst) {
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        if self.control.fails() { Err(INJECTED) } else { Ok(fence) }
    }

    unsafe fn read(&self, source_offset: usize, into: &mut [u8]) -> Result<(), MemoryError> {
        // SAFETY: the caller's promise.
        unsafe { self.host.read(source_offset, into) }
    }
}

/// Asserts the error without its payload, and whether it is worth a retry.
#[track_caller]
pub(crate) fn assert_refused<T: std::fmt::Debug>(result: Result<T, PoolError>, retryable: bool, expected: &str) {
    let error = result.unwrap_err();
    assert_eq!(error.is_retryable(), retryable, "{error}");
    assert_eq!(error.to_string(), expected);
}
