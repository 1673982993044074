//! The table of `docs/benchmarks.md` for CUDA: `gpu_bench [JSON FILE]`. The device is that of `MULTILORA_CUDA_DEVICE`;
//! `cargo xtask gpu-bench` builds and runs this.

use std::fs;

use conformance_cuda::bench::{Bench, Line, SHAPES};
use conformance_cuda::{DEVICE, context, real_device};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let Some(number) = real_device() else {
        return Err(format!("{DEVICE} must name a device by its number").into());
    };
    // Adapters take at most half of the memory.
    let memory = context().total_mem()?;
    let bench = Bench::new(memory / 2, 20, 256 << 20)?;
    let (name, copy) = bench.device()?;
    println!("device {number}: {name}, {:.0} GB; a copy moves {copy:.0} GB/s (read and write)\n", memory as f64 / 1e9);
    println!(
        "| model | rank | adapters | layers run | launches a layer | µs a layer | MB a layer | GB/s | of copy | cold |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    let mut lines = Vec::new();
    for shape in &SHAPES {
        for rank in [16, 64] {
            for adapters in [1, 8, 32] {
                let line = bench.line(shape, rank, adapters)?;
                let cold = if bench.is_cold(&line)? { "yes" } else { "no" };
                println!("{} {cold} |", row(&line));
                lines.push(line);
            }
        }
    }
    if let Some(path) = std::env::args().nth(1) {
        let objects: Vec<String> = lines.iter().map(json).collect();
        let text = format!(
            "{{\"device\": {name:?}, \"copy_gb_per_s\": {copy:.1}, \"lines\": [\n  {}\n]}}\n",
            objects.join(",\n  ")
        );
        fs::write(&path, text)?;
        println!("\nwritten: {path}");
    }
    Ok(())
}

fn row(line: &Line) -> String {
    let Line { shape, rank, adapters, layers, launches_per_layer, layer_us, layer_bytes, gb_per_s, share_of_copy } =
        line;
    let (megabytes, percent) = (*layer_bytes as f64 / 1e6, 100.0 * share_of_copy);
    format!(
        "| {shape} | {rank} | {adapters} | {layers} | {launches_per_layer} | {layer_us:.1} | {megabytes:.2} | {gb_per_s:.0} | {percent:.0} % |"
    )
}

fn json(line: &Line) -> String {
    let Line { shape, rank, adapters, layers, launches_per_layer, layer_us, layer_bytes, gb_per_s, share_of_copy } =
        line;
    format!(
        "{{\"model\": {shape:?}, \"rank\": {rank}, \"adapters\": {adapters}, \"layers\": {layers}, \
         \"launches_per_layer\": {launches_per_layer}, \"layer_us\": {layer_us:.3}, \"layer_bytes\": {layer_bytes}, \
         \"gb_per_s\": {gb_per_s:.2}, \"share_of_copy\": {share_of_copy:.4}}}"
    )
}
