//! `multilora plan`: what a pool of slots costs on a model, before anything is loaded.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, ValueEnum};
use serde::Serialize;

use multilora::engine::checkpoint::CheckpointInfo;
use multilora::engine::model::config_shape;
use multilora::math::{LayoutOptions, Module, ModuleSet, SlotLayout};
use multilora::pool::FixedStride;

use super::bytes::{Bytes, show};
use super::setup::SlotDtypeArg;

/// Options of `multilora plan`.
#[derive(Args)]
pub(crate) struct PlanArgs {
    /// Directory or GGUF file of the base model.
    #[arg(long, value_name = "PATH")]
    model: PathBuf,
    /// Largest rank that a slot admits.
    #[arg(long, value_name = "R")]
    max_rank: usize,
    /// Number of slots.
    #[arg(long, value_name = "N")]
    slots: u32,
    /// Element type of A and B in the pool.
    #[arg(long, value_enum, default_value = "bf16")]
    slot_dtype: SlotDtypeArg,
    /// A module that every slot has room for besides attention and dense MLP. May be given several times.
    #[arg(long = "with", value_enum, value_name = "MODULE")]
    with: Vec<VocabularyModule>,
    /// Memory to fill, such as 2GiB: says how many adapters fit.
    #[arg(long, value_name = "BYTES")]
    budget: Option<Bytes>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// The modules that only some adapters have pairs for.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum VocabularyModule {
    #[value(name = "embed_tokens")]
    EmbedTokens,
    #[value(name = "lm_head")]
    LmHead,
}

impl From<VocabularyModule> for Module {
    fn from(module: VocabularyModule) -> Self {
        match module {
            VocabularyModule::EmbedTokens => Module::EmbedTokens,
            VocabularyModule::LmHead => Module::LmHead,
        }
    }
}

#[derive(Serialize)]
struct Plan {
    model: String,
    num_layers: usize,
    max_rank: usize,
    slot_dtype: &'static str,
    num_slots: u32,
    num_sites: usize,
    slot_bytes: u64,
    table_bytes: u64,
    pool_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    budget_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    adapters_in_budget: Option<u64>,
    modules: Vec<ModuleBytes>,
}

#[derive(Serialize)]
struct ModuleBytes {
    module: &'static str,
    num_sites: usize,
    bytes: u64,
    share: f64,
}

/// Plans and prints.
pub(crate) fn run(args: &PlanArgs) -> Result<ExitCode> {
    let plan = plan(args)?;
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&plan)?)?;
    } else {
        print(&mut out, &plan)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn plan(args: &PlanArgs) -> Result<Plan> {
    let info = CheckpointInfo::open(&args.model)?;
    let shape = config_shape(&info.config)?;
    let modules = args.with.iter().copied().map(Module::from).fold(ModuleSet::DENSE, ModuleSet::with);
    let options = LayoutOptions { modules, max_rank: args.max_rank, dtype: args.slot_dtype.into() };
    let layout = SlotLayout::new(&shape, options)?;

    let pool = FixedStride::new(layout, args.slots as usize)?;
    let layout = pool.layout();
    let slot_bytes = layout.slot_bytes() as u64;
    let mut by_module: BTreeMap<Module, (usize, u64)> = BTreeMap::new();
    for span in layout.spans() {
        let (num_sites, bytes) = by_module.entry(span.site.module()).or_default();
        *num_sites += 1;
        *bytes += (span.a_bytes + span.b_bytes) as u64;
    }
    Ok(Plan {
        model: args.model.display().to_string(),
        num_layers: shape.num_layers(),
        max_rank: args.max_rank,
        slot_dtype: layout.dtype().name(),
        num_slots: args.slots,
        num_sites: layout.num_sites(),
        slot_bytes,
        table_bytes: pool.table_bytes() as u64,
        pool_bytes: pool.memory_bytes() as u64,
        budget_bytes: args.budget.map(|budget| budget.0),
        adapters_in_budget: args.budget.map(|budget| budget.0 / pool.bytes_per_slot() as u64),
        modules: by_module
            .into_iter()
            .map(|(module, (num_sites, bytes))| ModuleBytes {
                module: module.name(),
                num_sites,
                bytes,
                share: bytes as f64 / slot_bytes as f64,
            })
            .collect(),
    })
}

fn print(out: &mut impl Write, plan: &Plan) -> std::io::Result<()> {
    writeln!(out, "{}: {} layers, {} sites", plan.model, plan.num_layers, plan.num_sites)?;
    writeln!(out)?;
    writeln!(out, "one slot, rank up to {}, {}: {}", plan.max_rank, plan.slot_dtype, show(plan.slot_bytes))?;
    writeln!(out, "{} slots with their tables: {}", plan.num_slots, show(plan.pool_bytes))?;
    if let (Some(budget), Some(count)) = (plan.budget_bytes, plan.adapters_in_budget) {
        writeln!(out, "a budget of {} holds {count} adapters", show(budget))?;
    }
    writeln!(out)?;
    let widest = plan.modules.iter().map(|module| module.bytes).max().unwrap_or(1).max(1);
    for module in &plan.modules {
        let bar = "█".repeat((40.0 * module.bytes as f64 / widest as f64).ceil() as usize);
        writeln!(out, "{:>12} {:>10} {:>5.1} %  {bar}", module.module, show(module.bytes), 100.0 * module.share)?;
    }
    Ok(())
}
