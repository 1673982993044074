//! Loading an adapter of 100 MB beside reading its bytes. The load checks and digests every byte and must not take more
//! than 1.5 times as long; both read from the page cache, in turns, so that what else the machine does meets both.
//!
//! `cargo bench -p lora-adapter`

use std::error::Error;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use lora_adapter::{Adapter, Matrix};
use lora_math::SlotDtype;
use serde_json::{Map, json};

const NUM_LAYERS: usize = 32;
const RANK: usize = 32;
const HIDDEN_SIZE: usize = 3072;
const MODULES: [&str; 4] = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"];
const ROUNDS: usize = 21;

fn main() -> Result<(), Box<dyn Error>> {
    let directory = tempfile::tempdir()?;
    let file_bytes = write(directory.path())?;
    let weights = directory.path().join("adapter_model.safetensors");
    let (mut reads, mut loads, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let read = timed(|| Ok(fs::read(&weights)?.len()))?;
        let load = timed(|| Ok(Adapter::open(directory.path())?.max_rank()))?;
        reads.push(read);
        loads.push(load);
        ratios.push(load.as_secs_f64() / read.as_secs_f64());
    }
    ratios.sort_by(f64::total_cmp);
    let (read, load) = (middle(reads), middle(loads));
    let rate = |time: Duration| file_bytes as f64 / time.as_secs_f64() / 1e9;
    println!("{:.0} MB, median of {ROUNDS}", file_bytes as f64 / 1e6);
    println!("read the bytes  {read:>10.2?}  {:.2} GB/s", rate(read));
    println!("load            {load:>10.2?}  {:.2} GB/s", rate(load));
    println!("ratio           {:>10.2}  of the medians", load.as_secs_f64() / read.as_secs_f64());
    println!("                {:>10.2}  median of the rounds", ratios[ROUNDS / 2]);

    let values: Vec<f32> = (0..1 << 22).map(|index| (index as f32).sin()).collect();
    let matrix = Matrix::from_f32(1 << 11, 1 << 11, &values)?;
    for dtype in [SlotDtype::F32, SlotDtype::F16, SlotDtype::Bf16] {
        let mut out = vec![0; matrix.num_elements() * dtype.bytes()];
        let time = median(|| Ok(matrix.write_as(dtype, &mut out)?))?;
        println!("f32 to {:<4}     {time:>10.2?}  {:.2} GB/s read", dtype.name(), 16.8e6 / time.as_secs_f64() / 1e9);
    }
    Ok(())
}

fn median<T>(mut run: impl FnMut() -> Result<T, Box<dyn Error>>) -> Result<Duration, Box<dyn Error>> {
    Ok(middle((0..ROUNDS).map(|_| timed(&mut run)).collect::<Result<_, _>>()?))
}

fn timed<T>(mut run: impl FnMut() -> Result<T, Box<dyn Error>>) -> Result<Duration, Box<dyn Error>> {
    let start = Instant::now();
    std::hint::black_box(run()?);
    Ok(start.elapsed())
}

fn middle(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// Writes the adapter; gives the bytes of its weights.
fn write(directory: &Path) -> Result<usize, Box<dyn Error>> {
    let config = json!({"peft_type": "LORA", "r": RANK, "lora_alpha": 16});
    fs::write(directory.join("adapter_config.json"), config.to_string())?;
    let mut header = Map::new();
    let mut end = 0;
    for layer in 0..NUM_LAYERS {
        for module in MODULES {
            for (half, shape) in [("A", [RANK, HIDDEN_SIZE]), ("B", [HIDDEN_SIZE, RANK])] {
                let begin = end;
                end += shape[0] * shape[1] * 4;
                let name = format!("base_model.model.model.layers.{layer}.{module}.lora_{half}.weight");
                header.insert(name, json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}));
            }
        }
    }
    let header = serde_json::to_string(&header)?;
    let mut bytes = Vec::with_capacity(8 + header.len() + end);
    bytes.extend_from_slice(&(header.len() as u64).to_le_bytes());
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend((0..end / 4).flat_map(|index| (index as f32).sqrt().to_le_bytes()));
    fs::write(directory.join("adapter_model.safetensors"), &bytes)?;
    Ok(bytes.len())
}
