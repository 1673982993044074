//! What the emulated collectives, tensor cores, async copies and conversions compute, through cudarc, against answers
//! worked out here in integers and f64 and by the `half` crate.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use cuda_standin::{Mode, on_device, sources_in};
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

fn sources() -> Vec<PathBuf> {
    sources_in(&Path::new(env!("CARGO_MANIFEST_DIR")).join("checks"), &["cu"])
}

const MODES: [Mode; 4] = [Mode::PLAIN, Mode::shuffled(3), Mode::ADDRESS, Mode::THREAD];

fn open(kernel: &str) -> (Arc<CudaStream>, CudaFunction) {
    let context = CudaContext::new(0).unwrap();
    let module = context.load_module(Ptx::from_binary(b"STANDIN\n".to_vec())).unwrap();
    (context.new_stream().unwrap(), module.load_function(kernel).unwrap())
}

fn shape(grid: (u32, u32, u32), block: (u32, u32, u32), shared_mem_bytes: u32) -> LaunchConfig {
    LaunchConfig { grid_dim: grid, block_dim: block, shared_mem_bytes }
}

#[test]
fn lanes_exchange_what_they_should() {
    on_device("lanes_exchange_what_they_should", "checks", &sources(), &MODES, || {
        let (stream, kernel) = open("warp_results");
        let values: Vec<i32> = (0..32).map(|lane| lane * lane - 3 * lane + 60).collect();
        let input = stream.clone_htod(&values).unwrap();
        let mut output = stream.alloc_zeros::<i32>(8 * 32).unwrap();
        // SAFETY: the kernel reads 32 and writes 256 values.
        unsafe { stream.launch_builder(&kernel).arg(&input).arg(&mut output).launch(shape((1, 1, 1), (32, 1, 1), 0)) }
            .unwrap();
        let rows = stream.clone_dtoh(&output).unwrap();
        let thirds: u32 = (0..32).filter(|lane| values[*lane] % 3 == 0).map(|lane| 1 << lane).sum();
        for lane in 0..32_usize {
            let group = lane / 8 * 8;
            let row = |kind: usize| rows[32 * kind + lane];
            assert_eq!(row(0), values[group + 5], "idx, lane {lane}");
            assert_eq!(row(1), values[lane ^ 3], "xor, lane {lane}");
            assert_eq!(row(2), values[if lane % 8 < 6 { lane + 2 } else { lane }], "down, lane {lane}");
            assert_eq!(row(3), values[if lane % 8 < 2 { lane } else { lane - 2 }], "up, lane {lane}");
            assert_eq!(row(4) as u32, thirds, "ballot, lane {lane}");
            assert_eq!(row(5), i32::from(values.contains(&77)), "any, lane {lane}");
            assert_eq!(row(6), i32::from(values.iter().all(|value| *value >= 0)), "all, lane {lane}");
            assert_eq!(row(7), values.iter().sum::<i32>(), "sum, lane {lane}");
        }
    });
}

#[test]
fn barriers_order_a_block_of_any_size() {
    on_device("barriers_order_a_block_of_any_size", "checks", &sources(), &MODES, || {
        let (stream, kernel) = open("block_results");
        for (grid, block) in [((3, 2, 1), (7, 5, 1)), ((2, 1, 1), (256, 1, 1)), ((1, 1, 1), (1, 1, 1))] {
            let threads = (block.0 * block.1) as usize;
            let blocks = (grid.0 * grid.1) as usize;
            let values: Vec<i32> = (0..(threads * blocks) as i32).map(|i| (i * 7919) % 1000).collect();
            let input = stream.clone_htod(&values).unwrap();
            let mut output = stream.alloc_zeros::<i32>(2 * blocks).unwrap();
            // SAFETY: a value a thread is read, two a block are written.
            unsafe {
                let config = shape(grid, block, threads as u32 * 4);
                stream.launch_builder(&kernel).arg(&input).arg(&mut output).launch(config).unwrap();
            }
            let results = stream.clone_dtoh(&output).unwrap();
            for (index, chunk) in values.chunks(threads).enumerate() {
                let odd = chunk.iter().filter(|value| *value % 2 == 1).count() as i32;
                assert_eq!(results[2 * index..2 * index + 2], [chunk.iter().sum::<i32>(), odd], "block {index}");
            }
        }
    });
}

#[test]
fn tensor_cores_multiply_tiles() {
    on_device("tensor_cores_multiply_tiles", "checks", &sources(), &MODES, || {
        let mut random = StdRng::seed_from_u64(5);
        for name in ["multiply_bf16", "multiply_f16", "multiply_ldmatrix"] {
            let (stream, kernel) = open(name);
            let is_f16 = name == "multiply_f16";
            let to_bits = |v: f32| if is_f16 { f16::from_f32(v).to_bits() } else { bf16::from_f32(v).to_bits() };
            let to_f64 =
                |bits: u16| if is_f16 { f16::from_bits(bits).to_f64() } else { bf16::from_bits(bits).to_f64() };
            let mut draw = |n: usize| -> Vec<f32> { (0..n).map(|_| random.random_range(-2.0..2.0)).collect() };
            let a: Vec<u16> = draw(256).into_iter().map(to_bits).collect();
            let b: Vec<u16> = draw(128).into_iter().map(to_bits).collect();
            let with_c = name != "multiply_ldmatrix";
            let c = if with_c { draw(128) } else { vec![0.0; 128] };
            let (a_there, b_there) = (stream.clone_htod(&a).unwrap(), stream.clone_htod(&b).unwrap());
            let c_there = stream.clone_htod(&c).unwrap();
            let mut d_there = stream.alloc_zeros::<f32>(128).unwrap();
            let mut launch = stream.launch_builder(&kernel);
            launch.arg(&a_there).arg(&b_there);
            if with_c {
                launch.arg(&c_there);
            }
            // SAFETY: one warp on tiles of 16 x 16, 16 x 8 and 16 x 8.
            unsafe { launch.arg(&mut d_there).launch(shape((1, 1, 1), (32, 1, 1), 0)) }.unwrap();
            let d = stream.clone_dtoh(&d_there).unwrap();
            for row in 0..16 {
                for column in 0..8 {
                    let product: f64 = (0..16).map(|k| to_f64(a[16 * row + k]) * to_f64(b[8 * k + column])).sum();
                    let expected = f64::from(c[8 * row + column]) + product;
                    let found = f64::from(d[8 * row + column]);
                    assert!((found - expected).abs() < 1e-5, "{name} ({row},{column}): {found} is not {expected}");
                }
            }
        }
    });
}

#[test]
fn async_copies_land_with_their_tail_filled() {
    on_device("async_copies_land_with_their_tail_filled", "checks", &sources(), &MODES, || {
        let (stream, kernel) = open("copy_through");
        for len in [1_usize, 2, 3, 4, 61, 64] {
            let values: Vec<f32> = (0..len).map(|i| i as f32 + 0.5).collect();
            let input = stream.clone_htod(&values).unwrap();
            let mut output = stream.alloc_zeros::<f32>(64).unwrap();
            let n = len as i32;
            // SAFETY: 16 threads write four values each; no byte behind `n` values is read.
            unsafe {
                let config = shape((1, 1, 1), (16, 1, 1), 256);
                stream.launch_builder(&kernel).arg(&input).arg(&mut output).arg(&n).launch(config).unwrap();
            }
            let mut expected = values;
            expected.resize(64, 0.0);
            assert_eq!(stream.clone_dtoh(&output).unwrap(), expected, "{len} values");
        }
    });
}

#[test]
fn conversions_are_those_of_another_implementation() {
    let test = "conversions_are_those_of_another_implementation";
    on_device(test, "checks", &sources(), &[Mode::PLAIN], || {
        let (stream, kernel) = open("convert");
        // All upper halves with lower ones that round down, up and to even, and a spread of others.
        let mut values: Vec<f32> = Vec::new();
        for upper in 0..=0xffff_u32 {
            for lower in [0, 0x7fff, 0x8000, 0x8001, 0x0fff, 0x1000, 0x1001, 0x2fff, 0x3000, 0xffff] {
                values.push(f32::from_bits(upper << 16 | lower));
            }
        }
        let n = values.len();
        let input = stream.clone_htod(&values).unwrap();
        let mut to_bf16 = stream.alloc_zeros::<u16>(n).unwrap();
        let mut to_f16 = stream.alloc_zeros::<u16>(n).unwrap();
        let mut from_bf16 = stream.alloc_zeros::<f32>(65536).unwrap();
        let mut from_f16 = stream.alloc_zeros::<f32>(65536).unwrap();
        let num = n as i32;
        // SAFETY: n values in and out, and one for each of the 65536 patterns.
        unsafe {
            let mut launch = stream.launch_builder(&kernel);
            launch.arg(&input).arg(&mut to_bf16).arg(&mut to_f16).arg(&mut from_bf16).arg(&mut from_f16).arg(&num);
            launch.launch(shape((n.div_ceil(1024) as u32, 1, 1), (1024, 1, 1), 0)).unwrap();
        }
        let (to_bf16, to_f16) = (stream.clone_dtoh(&to_bf16).unwrap(), stream.clone_dtoh(&to_f16).unwrap());
        for (index, value) in values.iter().enumerate() {
            if value.is_nan() {
                assert!(bf16::from_bits(to_bf16[index]).is_nan() && f16::from_bits(to_f16[index]).is_nan());
                continue;
            }
            assert_eq!(to_bf16[index], bf16::from_f32(*value).to_bits(), "{value:e} to bf16");
            assert_eq!(to_f16[index], f16::from_f32(*value).to_bits(), "{value:e} to f16");
        }
        let (from_bf16, from_f16) = (stream.clone_dtoh(&from_bf16).unwrap(), stream.clone_dtoh(&from_f16).unwrap());
        for bits in 0..=0xffff_u16 {
            let same = |found: f32, expected: f32| {
                found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan())
            };
            assert!(same(from_bf16[usize::from(bits)], bf16::from_bits(bits).to_f32()), "bf16 {bits:#06x}");
            assert!(same(from_f16[usize::from(bits)], f16::from_bits(bits).to_f32()), "f16 {bits:#06x}");
        }
    });
}
