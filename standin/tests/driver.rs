//! The stand-in driver under the real cudarc: bounds, late streams, events, graphs, and errors that stay.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use cuda_standin::{Mode, on_device, outcome_on_device, sources_in};
use cudarc::driver::sys::{CUevent_flags, CUgraphInstantiate_flags_enum, CUresult, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, DriverError, LaunchConfig, PushKernelArg, result, sys};
use cudarc::nvrtc::Ptx;

fn sources() -> Vec<PathBuf> {
    sources_in(&Path::new(env!("CARGO_MANIFEST_DIR")).join("checks"), &["cu"])
}

const MODES: [Mode; 2] = [Mode::PLAIN, Mode::ADDRESS];
const LATE: [Mode; 1] = [Mode::PLAIN];

fn open(kernel: &str) -> (Arc<CudaContext>, Arc<CudaStream>, CudaFunction) {
    let context = CudaContext::new(0).unwrap();
    // SAFETY: every test here orders its work on one stream, or says with events what comes first.
    unsafe { context.disable_event_tracking() };
    let module = context.load_module(Ptx::from_binary(b"STANDIN\n".to_vec())).unwrap();
    let stream = context.new_stream().unwrap();
    (context, stream, module.load_function(kernel).unwrap())
}

const ONE_BLOCK: LaunchConfig = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (32, 1, 1), shared_mem_bytes: 0 };

fn code<T: std::fmt::Debug>(result: Result<T, DriverError>) -> CUresult {
    result.expect_err("an error").0
}

#[test]
fn a_device_is_there_with_what_it_can_do() {
    on_device("a_device_is_there_with_what_it_can_do", "checks", &sources(), &MODES, || {
        let (context, _, kernel) = open("add_scaled");
        assert_eq!(CudaContext::device_count().unwrap(), 1);
        assert_eq!(context.name().unwrap(), "stand-in device");
        assert_eq!(context.compute_capability().unwrap(), (8, 0));
        assert_eq!(kernel.max_threads_per_block().unwrap(), 1024);
        let (free, total) = context.mem_get_info().unwrap();
        assert!(free <= total && total == 1 << 30);
        let name = DriverError(CUresult::CUDA_ERROR_INVALID_VALUE);
        assert_eq!(name.error_name().unwrap().to_str().unwrap(), "CUDA_ERROR_INVALID_VALUE");
        assert_eq!(code(CudaContext::new(1)), CUresult::CUDA_ERROR_INVALID_DEVICE);
        let module = context.load_module(Ptx::from_binary(b"nothing known".to_vec()));
        assert_eq!(code(module.map(drop)), CUresult::CUDA_ERROR_INVALID_IMAGE);
        let module = context.load_module(Ptx::from_binary(b"STANDIN\n".to_vec())).unwrap();
        assert_eq!(code(module.load_function("no_such_kernel").map(drop)), CUresult::CUDA_ERROR_NOT_FOUND);
    });
}

#[test]
fn copies_are_checked_against_their_allocation() {
    on_device("copies_are_checked_against_their_allocation", "checks", &sources(), &MODES, || {
        let (context, stream, _) = open("add_scaled");
        let bytes = [1_u8; 100];
        // SAFETY: what leaves the allocation is refused, which is what is tested.
        unsafe {
            let pointer = result::malloc_async(stream.cu_stream(), 64).unwrap();
            result::memcpy_htod_async(pointer, &bytes[..64], stream.cu_stream()).unwrap();
            let too_long = result::memcpy_htod_async(pointer, &bytes[..65], stream.cu_stream());
            assert_eq!(code(too_long), CUresult::CUDA_ERROR_INVALID_VALUE);
            let behind = result::memcpy_htod_async(pointer + 60, &bytes[..8], stream.cu_stream());
            assert_eq!(code(behind), CUresult::CUDA_ERROR_INVALID_VALUE);
            let mut back = [0_u8; 65];
            assert_eq!(code(result::memcpy_dtoh_sync(&mut back, pointer)), CUresult::CUDA_ERROR_INVALID_VALUE);
            let fill = result::memset_d8_async(pointer, 0, 65, stream.cu_stream());
            assert_eq!(code(fill), CUresult::CUDA_ERROR_INVALID_VALUE);
            result::free_async(pointer, stream.cu_stream()).unwrap();
            context.synchronize().unwrap();
            let freed = result::memcpy_htod_async(pointer, &bytes[..1], stream.cu_stream());
            assert_eq!(code(freed), CUresult::CUDA_ERROR_INVALID_VALUE);
            let too_much = result::malloc_async(stream.cu_stream(), 2 << 30);
            assert_eq!(code(too_much), CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
    });
}

#[test]
fn fresh_memory_holds_no_numbers() {
    on_device("fresh_memory_holds_no_numbers", "checks", &sources(), &MODES, || {
        let (context, stream, _) = open("add_scaled");
        // SAFETY: any bits are an f32.
        let fresh = unsafe { stream.alloc::<f32>(50) }.unwrap();
        assert!(stream.clone_dtoh(&fresh).unwrap().iter().all(|value| value.is_nan()));
        // SAFETY: as above.
        let pinned = unsafe { context.alloc_pinned::<f32>(50) }.unwrap();
        assert!(pinned.as_slice().unwrap().iter().all(|value| value.is_nan()));
    });
}

#[test]
fn streams_run_when_something_waits() {
    on_device("streams_run_when_something_waits", "checks", &sources(), &LATE, || {
        let (context, stream, kernel) = open("add_scaled");
        let x = stream.clone_htod(&[1.0_f32; 40]).unwrap();
        let mut y = stream.clone_htod(&[10.0_f32; 40]).unwrap();
        let (scale, n) = (2.0_f32, 40_i32);
        // SAFETY: 40 values each.
        unsafe { stream.launch_builder(&kernel).arg(&x).arg(&mut y).arg(&scale).arg(&n).launch(ONE_BLOCK) }.unwrap();
        // SAFETY: any bits are an f32.
        let mut pinned = unsafe { context.alloc_pinned_with_flags::<f32>(40, 0) }.unwrap();
        stream.memcpy_dtoh(&y, &mut pinned).unwrap();
        // Nothing has waited: cudarc's own wait needs event tracking, which is off.
        assert!(pinned.as_slice().unwrap()[0].is_nan());
        stream.synchronize().unwrap();
        assert_eq!(pinned.as_slice().unwrap(), [12.0; 40]);

        // Pinned memory is read when the copy runs, pageable memory at the call.
        pinned.as_mut_slice().unwrap().fill(3.0);
        stream.memcpy_htod(&pinned, &mut y).unwrap();
        pinned.as_mut_slice().unwrap().fill(4.0);
        assert_eq!(stream.clone_dtoh(&y).unwrap(), [4.0; 40]);
        let mut pageable = vec![5.0_f32; 40];
        stream.memcpy_htod(&pageable, &mut y).unwrap();
        pageable.fill(6.0);
        assert_eq!(stream.clone_dtoh(&y).unwrap(), [5.0; 40]);
    });
}

#[test]
fn events_order_streams_and_take_time() {
    on_device("events_order_streams_and_take_time", "checks", &sources(), &LATE, || {
        let (context, first, kernel) = open("add_scaled");
        let second = context.new_stream().unwrap();
        let x = first.clone_htod(&[1.0_f32; 8]).unwrap();
        let mut y = first.alloc_zeros::<f32>(8).unwrap();
        first.synchronize().unwrap();
        let start = context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).unwrap();
        let end = context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).unwrap();
        start.record(&first).unwrap();
        let (scale, n) = (1.0_f32, 8_i32);
        // SAFETY: 8 values each.
        unsafe { first.launch_builder(&kernel).arg(&x).arg(&mut y).arg(&scale).arg(&n).launch(ONE_BLOCK) }.unwrap();
        // Without the wait the second stream reads what was there before.
        assert_eq!(second.clone_dtoh(&y).unwrap(), [0.0; 8]);
        end.record(&first).unwrap();
        assert!(!end.is_complete());
        second.wait(&end).unwrap();
        assert_eq!(second.clone_dtoh(&y).unwrap(), [1.0; 8]);
        assert!(end.is_complete());
        let milliseconds = start.elapsed_ms(&end).unwrap();
        assert!((0.0..1000.0).contains(&milliseconds), "{milliseconds}");
        let untimed = context.new_event(None).unwrap();
        untimed.record(&first).unwrap();
        assert!(start.elapsed_ms(&untimed).is_err());
    });
}

#[test]
fn graphs_replay_with_the_data_of_the_moment() {
    on_device("graphs_replay_with_the_data_of_the_moment", "checks", &sources(), &MODES, || {
        let (_context, stream, kernel) = open("add_scaled");
        let mut x = stream.clone_htod(&[1.0_f32; 8]).unwrap();
        let mut y = stream.alloc_zeros::<f32>(8).unwrap();
        stream.synchronize().unwrap();
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        {
            let (scale, n) = (3.0_f32, 8_i32);
            for _ in 0..2 {
                // SAFETY: 8 values each.
                unsafe { stream.launch_builder(&kernel).arg(&x).arg(&mut y).arg(&scale).arg(&n).launch(ONE_BLOCK) }
                    .unwrap();
            }
        }
        let flags = CUgraphInstantiate_flags_enum::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = stream.end_capture(flags).unwrap().unwrap();
        assert_eq!(stream.clone_dtoh(&y).unwrap(), [0.0; 8], "capturing runs nothing");
        graph.launch().unwrap();
        assert_eq!(stream.clone_dtoh(&y).unwrap(), [6.0; 8]);
        stream.memcpy_htod(&[10.0_f32; 8], &mut x).unwrap();
        graph.launch().unwrap();
        graph.launch().unwrap();
        assert_eq!(stream.clone_dtoh(&y).unwrap(), [126.0; 8]);
    });
}

#[test]
fn waiting_or_allocating_spoils_a_capture() {
    on_device("waiting_or_allocating_spoils_a_capture", "checks", &sources(), &LATE, || {
        let (_context, stream, _) = open("add_scaled");
        for spoil in [
            (|stream| stream.synchronize()) as fn(&Arc<CudaStream>) -> Result<(), DriverError>,
            |stream| stream.alloc_zeros::<f32>(8).map(drop),
            |stream| stream.clone_htod(&[1.0_f32]).map(drop),
        ] {
            stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
            assert_eq!(code(spoil(&stream)), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
            let flags = CUgraphInstantiate_flags_enum::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
            let ended = stream.end_capture(flags).map(drop);
            assert_eq!(code(ended), CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        }
    });
}

#[test]
fn arguments_have_the_sizes_of_the_signature() {
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Mixed {
        first: i32,
        second: f64,
    }
    // SAFETY: plain numbers, laid out as in the kernel's source.
    unsafe impl cudarc::driver::DeviceRepr for Mixed {}
    on_device("arguments_have_the_sizes_of_the_signature", "checks", &sources(), &MODES, || {
        let (_context, stream, kernel) = open("take_mixed");
        let mut output = stream.alloc_zeros::<f64>(1).unwrap();
        let (small, mixed) = (200_u8, Mixed { first: -7, second: 0.25 });
        // SAFETY: one value is written.
        unsafe { stream.launch_builder(&kernel).arg(&small).arg(&mixed).arg(&mut output).launch(ONE_BLOCK) }.unwrap();
        assert_eq!(stream.clone_dtoh(&output).unwrap(), [193.25]);
    });
}

#[test]
fn launches_that_no_device_takes_are_refused() {
    on_device("launches_that_no_device_takes_are_refused", "checks", &sources(), &LATE, || {
        let (_context, stream, kernel) = open("count_blocks");
        let mut counter = stream.alloc_zeros::<i32>(1).unwrap();
        let mut try_with = |config: LaunchConfig| {
            // SAFETY: one counter, whatever the grid.
            unsafe { stream.launch_builder(&kernel).arg(&mut counter).launch(config) }.map(drop)
        };
        for config in [
            LaunchConfig { grid_dim: (0, 1, 1), ..ONE_BLOCK },
            LaunchConfig { grid_dim: (1, 65536, 1), ..ONE_BLOCK },
            LaunchConfig { block_dim: (1025, 1, 1), ..ONE_BLOCK },
            LaunchConfig { block_dim: (1, 1, 65), ..ONE_BLOCK },
            LaunchConfig { shared_mem_bytes: (48 << 10) + 1, ..ONE_BLOCK },
        ] {
            assert_eq!(code(try_with(config)), CUresult::CUDA_ERROR_INVALID_VALUE, "{config:?}");
        }
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        assert!(kernel.set_attribute(attribute, (99 << 10) + 1).is_err());
        kernel.set_attribute(attribute, 99 << 10).unwrap();
        try_with(LaunchConfig { grid_dim: (3, 2, 2), shared_mem_bytes: 99 << 10, ..ONE_BLOCK }).unwrap();
        assert_eq!(stream.clone_dtoh(&counter).unwrap(), [12]);
    });
}

#[test]
fn a_write_behind_an_allocation_is_an_error_that_stays() {
    on_device("a_write_behind_an_allocation_is_an_error_that_stays", "checks", &sources(), &LATE, || {
        let (_context, stream, kernel) = open("write_one_more");
        let mut y = stream.alloc_zeros::<f32>(20).unwrap();
        let n = 20_i32;
        // SAFETY: the element behind the last one is the stand-in's guard.
        unsafe { stream.launch_builder(&kernel).arg(&mut y).arg(&n).launch(ONE_BLOCK) }.unwrap();
        assert_eq!(code(stream.synchronize()), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        assert_eq!(code(stream.alloc_zeros::<f32>(1).map(drop)), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    });
}

#[test]
fn a_report_of_the_emulation_is_an_error_of_the_driver() {
    on_device("a_report_of_the_emulation_is_an_error_of_the_driver", "checks", &sources(), &LATE, || {
        let (_context, stream, kernel) = open("load_misaligned");
        let x = stream.alloc_zeros::<f32>(64).unwrap();
        let mut y = stream.alloc_zeros::<f32>(32).unwrap();
        // SAFETY: the vector lies inside `x`; that it is not aligned is what is tested.
        unsafe { stream.launch_builder(&kernel).arg(&x).arg(&mut y).launch(ONE_BLOCK) }.unwrap();
        assert_eq!(code(stream.synchronize()), CUresult::CUDA_ERROR_MISALIGNED_ADDRESS);
    });
}

#[test]
fn sanitizers_see_into_kernels_under_cudarc() {
    let test = "sanitizers_see_into_kernels_under_cudarc";
    // The modes' kernels in turn: each has its own fault, and the child runs both.
    for (mode, words) in [(Mode::ADDRESS, "heap-buffer-overflow"), (Mode::BLOCKS, "data race")] {
        let outcome = outcome_on_device(test, "checks", &sources(), mode, || {
            let (_context, stream, kernel) =
                open(if child_has_address_sanitizer() { "write_one_more" } else { "write_one_place" });
            let mut y = stream.alloc_zeros::<f32>(20).unwrap();
            let n = 20_i32;
            let two_blocks = LaunchConfig { grid_dim: (2, 1, 1), ..ONE_BLOCK };
            // SAFETY: what is wrong with the kernel is what the sanitizer must find.
            unsafe { stream.launch_builder(&kernel).arg(&mut y).arg(&n).launch(two_blocks) }.unwrap();
            stream.synchronize().unwrap();
        });
        let Some((status, text)) = outcome else { return };
        assert!(!status.success() && text.contains(words), "{mode:?}: {status}\n{text}");
    }
}

/// Whether this process runs under the address sanitizer; the thread sanitizer otherwise.
fn child_has_address_sanitizer() -> bool {
    std::env::var("LD_PRELOAD").is_ok_and(|library| library.contains("asan"))
}

#[test]
fn a_machine_without_a_device_says_so() {
    on_device("a_machine_without_a_device_says_so", "checks", &sources(), &LATE, || {
        // SAFETY: the only thread of a child that has called nothing of CUDA yet.
        unsafe { std::env::set_var("STANDIN_NO_DEVICE", "1") };
        assert_eq!(code(CudaContext::new(0).map(drop)), CUresult::CUDA_ERROR_NO_DEVICE);
    });
}

#[test]
fn a_capture_takes_in_streams_that_wait_and_come_back() {
    on_device("a_capture_takes_in_streams_that_wait_and_come_back", "checks", &sources(), &LATE, || {
        let (context, stream, kernel) = open("add_scaled");
        let side = context.new_stream().unwrap();
        let x = stream.clone_htod(&[1.0_f32; 8]).unwrap();
        let mut y = stream.alloc_zeros::<f32>(8).unwrap();
        stream.synchronize().unwrap();
        let flags = CUgraphInstantiate_flags_enum::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let (scale, n) = (1.0_f32, 8_i32);
        for joins in [true, false] {
            let (fork, join) = (context.new_event(None).unwrap(), context.new_event(None).unwrap());
            stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
            fork.record(&stream).unwrap();
            side.wait(&fork).unwrap();
            // SAFETY: 8 values each.
            unsafe { side.launch_builder(&kernel).arg(&x).arg(&mut y).arg(&scale).arg(&n).launch(ONE_BLOCK) }.unwrap();
            if joins {
                join.record(&side).unwrap();
                stream.wait(&join).unwrap();
                stream.end_capture(flags).unwrap().unwrap().launch().unwrap();
                assert_eq!(stream.clone_dtoh(&y).unwrap(), [1.0; 8]);
            } else {
                let ended = stream.end_capture(flags).map(drop);
                assert_eq!(code(ended), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
            }
        }
    });
}
