//! A pool in CUDA memory: what it holds, compared with a pool in host memory, and the order of copies, publications and
//! steps, which the stand-in's late streams show.

use std::sync::Arc;

use conformance_cuda::{context, on_kernels};
use cuda_standin::Mode;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, result};
use lora_adapter::{Adapter, LoraPair, Matrix, PreparedAdapter, prepare};
use lora_math::scaling::ScalingRule;
use lora_math::shape::MlpSize;
use lora_math::{AdapterSelection, Features, LayerShape, ModelShape, Module, ModuleSet, Site, SiteEntry, SlotDtype};
use lora_pool::{
    AdapterSource, CopyRun, CudaMemory, DeviceMemory, Lease, LoadedFrom, Loader, LoaderOptions, LoraPool, MemoryError,
    PoolError, PoolOptions, SourceError, Staged,
};

type CudaPool = LoraPool<CudaMemory>;

const OPTIONS: PoolOptions =
    PoolOptions { num_slots: 2, max_rank: 8, modules: ModuleSet::DENSE, dtype: SlotDtype::Bf16, host_bytes: 0 };

fn shape() -> ModelShape {
    let mlp = MlpSize { hidden_size: 8, intermediate_size: 20 };
    ModelShape::uniform(8, 32, 2, LayerShape::new().with_mlp(mlp)).expect("a shape")
}

/// An adapter of a rank at all sites but the last; its values depend on the seed.
fn adapter(seed: usize, rank: usize) -> PreparedAdapter {
    let shape = shape();
    let sites = (0..2).flat_map(|layer| {
        [Module::GateProj, Module::UpProj, Module::DownProj].map(|module| Site::layer(layer, module))
    });
    let pairs = sites.take(5).map(|site| {
        let Features { in_features, out_features } = shape.features(site).expect("a site of the model");
        let values = |count: usize| -> Vec<f32> { (0..count).map(|i| ((seed * 31 + i) % 97) as f32 / 64.0).collect() };
        let a = Matrix::from_f32(rank, in_features, &values(rank * in_features)).expect("a matrix");
        let b = Matrix::from_f32(out_features, rank, &values(out_features * rank)).expect("a matrix");
        (site, LoraPair::new(a, b, seed as f64, ScalingRule::Standard).expect("a pair"))
    });
    prepare(Adapter::from_pairs(pairs).expect("an adapter"), &shape).expect("an adapter of the model")
}

fn open(context: &Arc<CudaContext>, options: PoolOptions) -> Arc<CudaPool> {
    let allocate = |num_bytes| CudaMemory::allocate(context, num_bytes, 1 << 20);
    LoraPool::open_in(&shape(), options, allocate).expect("a pool")
}

fn lease<M: DeviceMemory>(pool: &Arc<LoraPool<M>>, name: &str) -> Lease {
    pool.acquire(&AdapterSelection::Named(name.into())).expect("a resident adapter").expect("not the base")
}

/// Device memory as it is when the stream comes to this point.
fn copy_on(stream: &Arc<CudaStream>, address: u64, num_bytes: usize) -> CudaSlice<u8> {
    let seen = stream.alloc_zeros::<u8>(num_bytes).expect("memory");
    let target = seen.device_ptr(stream).0;
    // SAFETY: both ranges are device memory of this many bytes.
    unsafe { result::memcpy_dtod_async(target, address, num_bytes, stream.cu_stream()) }.expect("a copy");
    seen
}

fn bytes_of(stream: &Arc<CudaStream>, seen: &CudaSlice<u8>) -> Vec<u8> {
    let mut bytes = vec![0; seen.len()];
    stream.memcpy_dtoh(seen, &mut bytes).expect("a download");
    stream.synchronize().expect("work that runs");
    bytes
}

/// Of each site the rank, the scaling, and the bytes of A and B, read through the entries.
fn contents<M: DeviceMemory>(pool: &Arc<LoraPool<M>>, lease: &Lease) -> Vec<(u32, f32, Vec<u8>, Vec<u8>)> {
    let (entries, bytes) = (pool.entries(lease).expect("entries"), pool.read_slot(lease).expect("a slot"));
    let layout = pool.layout();
    let table = pool.table().address;
    let slot = table - (layout.slot_bytes() * (pool.num_slots() - lease.slot().index())) as u64;
    let part = |address: u64, count: usize| bytes[(address - slot) as usize..][..2 * count].to_vec();
    let site = |(entry, features): (&SiteEntry, Features)| match entry.rank as usize {
        0 => (0, 0.0, vec![], vec![]),
        rank => {
            let (a, b) = (part(entry.a, rank * features.in_features), part(entry.b, rank * features.out_features));
            (entry.rank, entry.scaling, a, b)
        }
    };
    entries.iter().zip(layout.spans().iter().map(|span| span.features)).map(site).collect()
}

/// The leased row of the table in device memory.
fn table_row(pool: &Arc<CudaPool>, stream: &Arc<CudaStream>, lease: &Lease) -> Vec<u8> {
    let table = pool.table();
    let row_bytes = table.num_sites * SiteEntry::BYTES;
    let address = table.address + (lease.slot().index() * row_bytes) as u64;
    let seen = copy_on(stream, address, row_bytes);
    bytes_of(stream, &seen)
}

#[test]
fn it_holds_what_a_pool_in_host_memory_holds() {
    on_kernels("it_holds_what_a_pool_in_host_memory_holds", &[Mode::PLAIN, Mode::ADDRESS], || {
        let context = context();
        let stream = context.new_stream().expect("a stream");
        let (cuda, host) = (open(&context, OPTIONS), LoraPool::open(&shape(), OPTIONS).expect("a pool"));
        let address = cuda.table().address;
        let same = |name: &str| {
            let (cuda_lease, host_lease) = (lease(&cuda, name), lease(&host, name));
            assert_eq!(cuda_lease.slot(), host_lease.slot());
            assert!(contents(&cuda, &cuda_lease) == contents(&host, &host_lease), "{name}");
            let row: Vec<u8> =
                cuda.entries(&cuda_lease).expect("entries").into_iter().flat_map(SiteEntry::to_bytes).collect();
            assert_eq!(table_row(&cuda, &stream, &cuda_lease), row, "{name}");
        };
        // Full rank, a smaller one, a third that takes the place of the first, a replacement, and after an unload.
        for (name, seed, rank) in [("a", 1, 8), ("b", 2, 3), ("c", 3, 1)] {
            cuda.load_on(name, &adapter(seed, rank), &stream).expect("a load");
            host.load(name, &adapter(seed, rank)).expect("a load");
            same(name);
        }
        same("b");
        cuda.replace_on("c", &adapter(4, 8), None, &stream).expect("a replacement");
        host.replace("c", &adapter(4, 8), None).expect("a replacement");
        same("c");
        assert!(cuda.unload("c").expect("an unload").is_done() && host.unload("c").expect("an unload").is_done());
        cuda.load_on("d", &adapter(5, 2), &stream).expect("a load");
        host.load("d", &adapter(5, 2)).expect("a load");
        same("d");
        assert_eq!(cuda.table().address, address);
        assert_eq!(address % 64, 0);
    });
}

#[test]
fn a_slot_is_written_behind_the_last_step_that_reads_it() {
    on_kernels("a_slot_is_written_behind_the_last_step_that_reads_it", &[Mode::PLAIN, Mode::ADDRESS], || {
        let context = context();
        let stream = context.new_stream().expect("a stream");
        let pool = open(&context, PoolOptions { num_slots: 1, ..OPTIONS });
        pool.load_on("a", &adapter(1, 8), &stream).expect("a load");
        let held = lease(&pool, "a");
        let before = pool.read_slot(&held).expect("a slot");
        stream.synchronize().expect("work that runs");

        // A step that reads the slot, and has not run when the slot is given to another adapter and that one's copy is
        // waited for.
        let slot = pool.table().address - before.len() as u64;
        let seen = copy_on(&stream, slot, before.len());
        pool.step_launched(&stream).expect("a fence");
        drop(held);
        let Staged::Landing(landing) = pool.stage("b", &adapter(2, 8)).expect("a landing") else { panic!("resident") };
        while !landing.has_arrived().expect("a copy") {}
        landing.publish(&stream).expect("a publication");
        assert!(bytes_of(&stream, &seen) == before, "the step saw the next adapter's bytes");
        assert!(pool.read_slot(&lease(&pool, "b")).expect("a slot") != before);
    });
}

#[test]
fn a_step_behind_a_publication_sees_bytes_and_row() {
    on_kernels("a_step_behind_a_publication_sees_bytes_and_row", &[Mode::PLAIN, Mode::ADDRESS], || {
        let context = context();
        let stream = context.new_stream().expect("a stream");
        let pool = open(&context, OPTIONS);
        let lease = pool.load_leased_on("a", &adapter(1, 8), &stream).expect("a load");
        // The load has waited for nothing; the step does, on the device.
        let slot_bytes = pool.layout().slot_bytes();
        let slot = pool.table().address - (2 - lease.slot().index()) as u64 * slot_bytes as u64;
        let seen = copy_on(&stream, slot, slot_bytes);
        let seen = bytes_of(&stream, &seen);
        assert!(seen == pool.read_slot(&lease).expect("a slot") && seen.iter().any(|&byte| byte != 0));
        let row: Vec<u8> = pool.entries(&lease).expect("entries").into_iter().flat_map(SiteEntry::to_bytes).collect();
        assert_eq!(table_row(&pool, &stream, &lease), row);
    });
}

#[test]
fn a_capture_is_left_alone() {
    on_kernels("a_capture_is_left_alone", &[Mode::PLAIN], || {
        let context = context();
        let stream = context.new_stream().expect("a stream");
        let pool = open(&context, OPTIONS);
        let empty = pool.snapshot();
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).expect("a capture");
        let capturing = |error: PoolError| {
            assert!(error.is_retryable());
            assert_eq!(error, PoolError::Memory(MemoryError::Capturing));
        };
        // A loader works on another thread, of which a capture of this mode takes no notice.
        let staged = std::thread::scope(|scope| {
            scope.spawn(|| pool.stage("a", &adapter(1, 8)).expect("a landing")).join().expect("a loader")
        });
        let Staged::Landing(landing) = staged else { panic!("resident") };
        capturing(landing.publish(&stream).expect_err("a publication in a graph"));
        capturing(pool.step_launched(&stream).expect_err("a fence in a graph"));
        assert_eq!(pool.snapshot(), empty, "nothing is half installed");
        // Nothing but what the engine put there is in the graph.
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        stream.end_capture(flags).expect("a capture that ends");
        pool.step_launched(&stream).expect("a fence");
        pool.load_on("a", &adapter(1, 8), &stream).expect("a load");
        let lease = lease(&pool, "a");
        let row: Vec<u8> = pool.entries(&lease).expect("entries").into_iter().flat_map(SiteEntry::to_bytes).collect();
        assert_eq!(table_row(&pool, &stream, &lease), row);
    });
}

#[test]
fn host_buffers_live_until_their_copy_and_are_used_again() {
    on_kernels("host_buffers_live_until_their_copy_and_are_used_again", &[Mode::PLAIN, Mode::ADDRESS], || {
        let context = context();
        let memory = CudaMemory::allocate(&context, 256, 128).expect("memory");
        let buffer = |byte: u8| {
            let mut buffer = memory.host_buffer(100).expect("a buffer");
            assert!(buffer.as_ref().iter().all(|&byte| byte == 0), "a buffer of zeros");
            buffer.as_mut().fill(byte);
            Arc::new(buffer)
        };
        let run = |target_offset| [CopyRun { source_offset: 0, target_offset, num_bytes: 100 }];
        // Nobody holds the first buffer but the memory, when the second is made and filled.
        // SAFETY: the test has the memory to itself.
        unsafe { memory.copy(buffer(1), &run(0), None) }.expect("a copy");
        // SAFETY: as above.
        unsafe { memory.copy(buffer(2), &run(128), None) }.expect("a copy");
        let mut bytes = vec![9; 256];
        // SAFETY: as above.
        unsafe { memory.read(0, &mut bytes) }.expect("bytes");
        assert!(bytes[..100] == [1; 100] && bytes[100..128] == [0; 28]);
        assert!(bytes[128..228] == [2; 100] && bytes[228..] == [0; 28]);

        // Of two that are free again, 128 bytes hold one.
        let address = |buffer: &Arc<_>| AsRef::<[u8]>::as_ref(&**buffer).as_ptr();
        let (first, second) = (buffer(3), buffer(4));
        let known = [address(&first), address(&second)];
        drop((first, second));
        assert!(known.contains(&address(&buffer(5))));

        for bad in [
            CopyRun { source_offset: 1, target_offset: 0, num_bytes: 100 },
            CopyRun { source_offset: 0, target_offset: 157, num_bytes: 100 },
            CopyRun { source_offset: usize::MAX, target_offset: 0, num_bytes: 100 },
        ] {
            // SAFETY: as above.
            let result = unsafe { memory.copy(buffer(7), &[run(0)[0], bad], None) };
            assert!(matches!(result, Err(MemoryError::OutOfBounds { num_bytes: 100, .. })));
        }
        // SAFETY: as above.
        unsafe { memory.read(0, &mut bytes) }.expect("bytes");
        assert!(bytes[..100] == [1; 100], "a copy that is refused writes nothing");
    });
}

/// Adapters whose name is their seed.
struct Seeds;

impl AdapterSource for Seeds {
    fn load(&self, name: &str) -> Result<PreparedAdapter, SourceError> {
        Ok(adapter(name.parse()?, 8))
    }

    fn num_bytes(&self, _name: &str) -> usize {
        1 << 10
    }
}

#[test]
fn a_loader_brings_adapters_while_steps_run() {
    on_kernels("a_loader_brings_adapters_while_steps_run", &[Mode::PLAIN, Mode::ADDRESS], || {
        let context = context();
        let stream = context.new_stream().expect("a stream");
        let pool = open(&context, PoolOptions { host_bytes: 1 << 20, ..OPTIONS });
        let host = LoraPool::open(&shape(), PoolOptions { num_slots: 6, ..OPTIONS }).expect("a pool");
        let loader = Loader::new(pool.clone(), Arc::new(Seeds), LoaderOptions::default()).expect("threads");
        // Six names over two slots, each twice: the second time from page-locked memory.
        for round in 0..2 {
            for name in ["1", "2", "3", "4", "5", "6"] {
                loader.prefetch(name);
                let loaded = loop {
                    // An engine would launch steps in between.
                    assert!(loader.wait(std::time::Duration::from_secs(20)));
                    if let Some(loaded) = loader.publish_arrived(&stream).pop() {
                        break loaded;
                    }
                };
                loaded.result.expect("a load");
                let from = if round == 0 { LoadedFrom::Source } else { LoadedFrom::Host };
                assert_eq!(loaded.from, Some(from));
                host.load(name, &adapter(name.parse().expect("a seed"), 8)).expect("a load");
                let held = lease(&pool, name);
                assert!(contents(&pool, &held) == contents(&host, &lease(&host, name)), "{name}");
                pool.step_launched(&stream).expect("a fence");
            }
        }
    });
}

#[test]
fn memory_that_is_not_there_is_an_error() {
    on_kernels("memory_that_is_not_there_is_an_error", &[Mode::PLAIN], || {
        let context = context();
        let error = CudaMemory::allocate(&context, 1 << 40, 0).expect_err("a terabyte");
        assert_eq!(error, MemoryError::Allocation { kind: "device", num_bytes: 1 << 40 });
        // The context is as good as before.
        let stream = context.new_stream().expect("a stream");
        open(&context, OPTIONS).load_on("a", &adapter(1, 8), &stream).expect("a load");
    });
}
