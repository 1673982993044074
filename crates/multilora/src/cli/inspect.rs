//! `multilora inspect`: what is in an adapter directory, what it costs, and whether it loads.
//!
//! Exit code 0 says that the adapter loads (on the model, where one is given), 2 that it is refused; every reason is
//! printed. The model's weights are read only where the adapter needs them; its configuration is enough for all others.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use multilora::adapter::{Adapter, AdapterReport, PreparedAdapter, Refusal, prepare, prepare_with};
use multilora::engine::checkpoint::{CheckpointInfo, ModelConfig};
use multilora::engine::model::config_shape;
use multilora::math::{LayoutOptions, ModelShape, SlotDtype, SlotLayout};
use multilora::pool::{PoolOptions, packed_layout};

use super::adapters;
use super::bytes::show;
use super::one_line;
use super::setup::{PrepareArgs, SlotDtypeArg, beyond_weights, exact_dtype, load_model};

/// Options of `multilora inspect`.
#[derive(Args)]
pub(crate) struct InspectArgs {
    /// The adapter's directory, or its GGUF file.
    adapter: PathBuf,
    /// Directory or GGUF file of the base model that it should load on.
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,
    /// Element type of A and B in the pool; the narrowest that holds the adapter exactly unless given.
    #[arg(long, value_enum)]
    slot_dtype: Option<SlotDtypeArg>,
    #[command(flatten)]
    preparing: PrepareArgs,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// The model that the adapter should load on, without its weights.
struct Model<'a> {
    path: &'a Path,
    shape: ModelShape,
    config: ModelConfig,
}

/// All that is found out about a directory.
#[derive(Serialize, Default)]
struct Inspection {
    path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<String>,
    loads: bool,
    reasons: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    adapter: Option<AdapterReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    slot: Option<SlotCost>,
}

/// What the adapter takes in a pool of its own rank.
#[derive(Serialize)]
struct SlotCost {
    dtype: &'static str,
    /// Whether the element type holds every number of the adapter exactly.
    exact: bool,
    /// Bytes of its A and B, packed at their real ranks.
    image_bytes: usize,
    /// Bytes of a slot at fixed stride, with room for its largest rank at every site of attention and dense MLP, and of
    /// embedding or head where it has a pair there.
    slot_bytes: usize,
    /// Bytes of its gains, shifts and norms, in memory of their own.
    vector_bytes: usize,
}

/// Inspects and prints.
pub(crate) fn run(args: &InspectArgs) -> Result<ExitCode> {
    let model = match &args.model {
        Some(model) => {
            let config = CheckpointInfo::open(model)?.config;
            Some(Model { path: model, shape: config_shape(&config)?, config })
        }
        None => None,
    };
    let inspection = inspect(args, model.as_ref());
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer(&mut out, &inspection)?;
        writeln!(out)?;
    } else {
        print(&mut out, &inspection)?;
    }
    Ok(if inspection.loads { ExitCode::SUCCESS } else { ExitCode::from(2) })
}

fn inspect(args: &InspectArgs, model: Option<&Model<'_>>) -> Inspection {
    let mut inspection = Inspection {
        path: args.adapter.display().to_string(),
        model: args.model.as_deref().map(Path::display).map(|path| path.to_string()),
        ..Inspection::default()
    };
    let opened = adapters::open(&args.adapter).and_then(|adapter| match model {
        Some(model) => adapters::for_model(adapter, &model.config),
        None => Ok(adapter),
    });
    let adapter = match opened {
        Ok(adapter) => adapter,
        Err(error) => {
            inspection.reasons = error.located().iter().map(ToString::to_string).collect();
            if error.num_omitted() > 0 {
                inspection.reasons.push(format!("and {} more", error.num_omitted()));
            }
            return inspection;
        }
    };
    inspection.adapter = Some(adapter.report());
    let Some(model) = model else {
        inspection.loads = true;
        return inspection;
    };
    match prepared(args, adapter, model) {
        Err(reasons) => inspection.reasons = reasons,
        Ok(adapter) => match cost(&adapter, &model.shape, args.slot_dtype) {
            Err(reason) => inspection.reasons = vec![one_line(&reason)],
            Ok(slot) => {
                inspection.slot = Some(slot);
                inspection.loads = true;
            }
        },
    }
    inspection
}

/// The adapter fitted to the model, or every reason against it.
fn prepared(args: &InspectArgs, adapter: Adapter, model: &Model<'_>) -> Result<PreparedAdapter, Vec<String>> {
    let reasons = |refusal: &Refusal| refusal.reasons.iter().map(ToString::to_string).collect::<Vec<_>>();
    match prepare(adapter.clone(), &model.shape).map_err(beyond_weights) {
        Ok(prepared) => return Ok(prepared),
        Err(Some(refusal)) => return Err(reasons(&refusal)),
        Err(None) => {}
    }
    let (model, _) = load_model(model.path, None).map_err(|error| vec![one_line(&error)])?;
    prepare_with(adapter, &model, &args.preparing.options()).map_err(|refusal| reasons(&refusal))
}

fn cost(adapter: &PreparedAdapter, shape: &ModelShape, dtype: Option<SlotDtypeArg>) -> Result<SlotCost> {
    let (narrowest, exists) = exact_dtype([adapter]);
    let dtype = dtype.map_or(narrowest, SlotDtype::from);
    let PoolOptions { modules, max_rank, .. } =
        PoolOptions { max_rank: 1, ..PoolOptions::default() }.covering([adapter]);
    let layout = SlotLayout::new(shape, LayoutOptions { modules, max_rank, dtype })?;
    Ok(SlotCost {
        dtype: dtype.name(),
        exact: exists && (dtype == narrowest || dtype == SlotDtype::F32),
        image_bytes: packed_layout(adapter, &layout)?.image_bytes(),
        slot_bytes: layout.slot_bytes(),
        vector_bytes: adapter.vectors().num_bytes(),
    })
}

fn print(out: &mut impl Write, inspection: &Inspection) -> Result<()> {
    writeln!(out, "{}", inspection.path)?;
    if let Some(adapter) = &inspection.adapter {
        writeln!(out, "{adapter}")?;
    }
    if let Some(slot) = &inspection.slot {
        let narrowed = if slot.exact { "exact" } else { "narrowed: some numbers are rounded" };
        writeln!(out, "in a pool   {} ({narrowed})", slot.dtype)?;
        writeln!(out, "            {} at its own ranks", show(slot.image_bytes as u64))?;
        writeln!(out, "            {} as a slot at fixed stride of its largest rank", show(slot.slot_bytes as u64))?;
        if slot.vector_bytes > 0 {
            writeln!(out, "            {} of gains, shifts and norms", show(slot.vector_bytes as u64))?;
        }
    }
    let on = inspection.model.as_deref().map(|model| format!(" on {model}")).unwrap_or_default();
    if inspection.loads {
        writeln!(out, "verdict: loads{on}")?;
        return Ok(());
    }
    let count = inspection.reasons.len();
    writeln!(out, "verdict: refused{on}, {count} reason{}", if count == 1 { "" } else { "s" })?;
    for reason in &inspection.reasons {
        writeln!(out, "  - {reason}")?;
    }
    Ok(())
}
