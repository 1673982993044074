//! `multilora score`: the logits of token sequences, all computed in one mixed batch.
//!
//! For whoever checks parity with another implementation: what goes in and out are token ids and float32 numbers.

use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::{Deserialize, Serialize};

use multilora::engine::kv_tokens_for;
use multilora::engine::score::{ScoreRequest, score};
use multilora::math::AdapterSelection;

use super::setup::{BASE, EngineArgs, EngineSize};

/// Options of `multilora score`.
#[derive(Args)]
pub(crate) struct ScoreArgs {
    #[command(flatten)]
    engine: EngineArgs,
    /// File with one JSON object a line: {"adapter": NAME or null, "token_ids": [...], "decode": [...]}; - reads
    /// standard input. Tokens of "decode" are computed one at a time, by decode steps.
    #[arg(long, value_name = "FILE")]
    requests: PathBuf,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    adapter: Option<String>,
    token_ids: Vec<u32>,
    #[serde(default)]
    decode: Vec<u32>,
}

#[derive(Serialize)]
struct Answer<'a> {
    adapter: Option<&'a str>,
    logits: &'a [Vec<f32>],
}

/// Scores and prints.
pub(crate) fn run(args: &ScoreArgs) -> Result<ExitCode> {
    let requests = read_requests(&args.requests)?;
    let opened = args.engine.open()?;
    let selections: Vec<AdapterSelection> = requests
        .iter()
        .enumerate()
        .map(|(index, request)| {
            let name = request.adapter.as_deref().unwrap_or(BASE);
            opened.selection(name).with_context(|| format!("request {}", index + 1))
        })
        .collect::<Result<_>>()?;

    let (model, _) = opened.load_model()?;
    let size = EngineSize {
        kv_tokens: kv_tokens_for(requests.iter().map(|request| request.token_ids.len() + request.decode.len())),
        num_sequences: requests.len(),
    };
    let mut engine = opened.engine(model, size)?;
    let scored: Vec<ScoreRequest> = requests
        .iter()
        .zip(selections)
        .map(|(Request { token_ids, decode, .. }, selection)| ScoreRequest {
            selection,
            token_ids: token_ids.clone(),
            decode: decode.clone(),
        })
        .collect();
    let logits = score(&mut engine, &scored)?;

    let mut out = BufWriter::new(std::io::stdout().lock());
    for (request, logits) in requests.iter().zip(&logits) {
        serde_json::to_writer(&mut out, &Answer { adapter: request.adapter.as_deref(), logits })?;
        out.write_all(b"\n")?;
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

fn read_requests(path: &Path) -> Result<Vec<Request>> {
    let name = path.display();
    let input: Box<dyn BufRead> = if path == Path::new("-") {
        Box::new(std::io::stdin().lock())
    } else {
        Box::new(BufReader::new(std::fs::File::open(path).with_context(|| format!("cannot open {name}"))?))
    };
    let mut requests = Vec::new();
    for (index, line) in input.lines().enumerate() {
        let line = line.with_context(|| format!("cannot read {name}"))?;
        if line.trim().is_empty() {
            continue;
        }
        let request: Request = serde_json::from_str(&line).with_context(|| format!("{name}, line {}", index + 1))?;
        if request.token_ids.is_empty() {
            bail!("{name}, line {}: token_ids is empty", index + 1);
        }
        requests.push(request);
    }
    if requests.is_empty() {
        bail!("{name} holds no requests");
    }
    Ok(requests)
}
