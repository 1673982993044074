//! What a cold adapter costs by the tier that it comes from, beside a copy of its bytes: an adapter of 20 MB (rank 16 on all seven
//! projections of 28 layers as Qwen3-0.6B has them), in turns, from the page cache.
//!
//! `cargo bench -p lora-pool --bench tiers`

use std::error::Error;
use std::time::{Duration, Instant};

use lora_adapter::{Adapter, LoraPair, Matrix, PreparedAdapter, prepare, write_plain};
use lora_math::scaling::ScalingRule;
use lora_math::shape::{AttentionSize, MlpSize};
use lora_math::{Features, LayerShape, ModelShape, Site};
use lora_pool::{HostStream, LoraPool, PoolOptions, Staged};

const ROUNDS: usize = 21;
const RANK: usize = 16;

fn main() -> Result<(), Box<dyn Error>> {
    let attention = AttentionSize { hidden_size: 1024, q_features: 2048, kv_features: 1024, o_features: 2048 };
    let mlp = MlpSize { hidden_size: 1024, intermediate_size: 3072 };
    let layer = LayerShape::new().with_attention(attention).with_mlp(mlp);
    let shape = ModelShape::uniform(1024, 32_000, 28, layer)?;
    let directory = tempfile::tempdir()?;
    let files = directory.path().join("adapter");
    write_plain(&random(&shape)?, &files)?;

    let cold = LoraPool::open(&shape, PoolOptions { num_slots: 1, ..PoolOptions::default() })?;
    let warm = LoraPool::open(&shape, PoolOptions { num_slots: 1, host_bytes: 1 << 30, ..PoolOptions::default() })?;
    let content = load_files(&warm, &files, &shape)?;
    warm.evict("it")?;
    let image_bytes = warm.host_tier_snapshot().num_bytes;
    let source = vec![1u8; image_bytes];
    let mut target = vec![0u8; image_bytes];

    let (mut copies, mut hosts, mut disks) = (Vec::new(), Vec::new(), Vec::new());
    let (mut host_ratios, mut disk_ratios) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let copy = timed(|| {
            target.copy_from_slice(std::hint::black_box(&source));
            Ok(())
        })?;
        std::hint::black_box(&target);
        let host = timed(|| match warm.stage_kept("it", content)? {
            Some(Staged::Landing(landing)) => {
                landing.publish(&HostStream)?;
                Ok(())
            }
            _ => Err("the image is not kept".into()),
        })?;
        warm.evict("it")?;
        let disk = timed(|| load_files(&cold, &files, &shape).map(|_| ()))?;
        cold.evict("it")?;
        copies.push(copy);
        hosts.push(host);
        disks.push(disk);
        host_ratios.push(host.as_secs_f64() / copy.as_secs_f64());
        disk_ratios.push(disk.as_secs_f64() / copy.as_secs_f64());
    }
    println!(
        "{:.1} MB, medians of {ROUNDS} rounds, ratios to the copy of the same round with quartiles",
        image_bytes as f64 / 1e6
    );
    println!("copy of the bytes            {:>9.2?}", middle(copies));
    println!("from the host tier           {:>9.2?}  {}", middle(hosts), quartiles(host_ratios));
    println!("from files (page cache)      {:>9.2?}  {}", middle(disks), quartiles(disk_ratios));
    Ok(())
}

fn load_files(
    pool: &std::sync::Arc<LoraPool>,
    files: &std::path::Path,
    shape: &ModelShape,
) -> Result<lora_math::ContentDigest, Box<dyn Error>> {
    let prepared = prepare(Adapter::open(files)?, shape)?;
    Ok(pool.load("it", &prepared)?.content)
}

fn random(shape: &ModelShape) -> Result<PreparedAdapter, Box<dyn Error>> {
    let mut state = 1u64;
    let mut values = |count: usize| -> Vec<f32> {
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            // Exact in bf16, as adapters that were trained in it are.
            ((state >> 33) % 255) as f32 / 256.0 - 0.5
        };
        (0..count).map(|_| next()).collect()
    };
    let layers = shape.layers().iter().enumerate();
    let sites: Vec<Site> = layers
        .flat_map(|(index, layer)| layer.modules().iter().map(move |&(module, _)| Site::layer(index, module)))
        .collect();
    let mut pairs = Vec::new();
    for site in sites {
        let Features { in_features, out_features } = shape.features(site).ok_or("a site of the model")?;
        let a = Matrix::from_f32(RANK, in_features, &values(RANK * in_features))?;
        let b = Matrix::from_f32(out_features, RANK, &values(out_features * RANK))?;
        pairs.push((site, LoraPair::new(a, b, 32.0, ScalingRule::Standard)?));
    }
    Ok(prepare(Adapter::from_pairs(pairs)?, shape)?)
}

fn timed(run: impl FnOnce() -> Result<(), Box<dyn Error>>) -> Result<Duration, Box<dyn Error>> {
    let start = Instant::now();
    run()?;
    Ok(start.elapsed())
}

fn middle(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn quartiles(mut ratios: Vec<f64>) -> String {
    ratios.sort_by(f64::total_cmp);
    let at = |quarter: usize| ratios[(ratios.len() - 1) * quarter / 4];
    format!("{:.2} ({:.2} to {:.2})", at(2), at(1), at(3))
}
