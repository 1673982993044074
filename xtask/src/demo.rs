//! The demo: one question, asked of the base model and of every demo adapter in one batch.
//!
//! Builds the binary in release, runs the mixed batch and the same prompts on the base alone, and shows the answers
//! side by side with the tokens per second of both.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::Value;

use crate::fetch;

/// Runs of each batch that are timed.
const SPEED_RUNS: usize = 3;

/// Options of the demo.
#[derive(Args)]
pub(crate) struct DemoArgs {
    /// The question to ask.
    #[arg(long, default_value = "What is the capital of Greece?")]
    question: String,
    /// Fetch nothing: the model must be cached.
    #[arg(long)]
    offline: bool,
    /// Longest answer, in tokens.
    #[arg(long, default_value_t = 64)]
    max_new_tokens: usize,
    /// Threads of the engine; all cores unless given.
    #[arg(long)]
    threads: Option<usize>,
}

/// Fetches, builds, runs and prints.
pub(crate) fn run(args: &DemoArgs) -> Result<()> {
    let model = fetch::model(args.offline)?;
    let adapters = adapters(&crate::root().join("demo/adapters"))?;
    let binary = build(args.offline)?;

    let names: Vec<&str> = std::iter::once("base").chain(adapters.iter().map(|(name, _)| name.as_str())).collect();
    eprintln!("one batch: {}", names.join(", "));
    let runner = Runner { args, binary, model };
    let answers = runner.generate(&adapters, &names, &[])?.answers;
    // For speed every row runs to the full length, so that both batches keep their size; they take turns.
    let base_only = vec!["base"; names.len()];
    let to_the_end = ["--ignore-end-tokens"];
    let (mut mixed, mut base) = (Vec::new(), Vec::new());
    for _ in 0..SPEED_RUNS {
        mixed.push(runner.generate(&adapters, &names, &to_the_end)?.tokens_per_second);
        base.push(runner.generate(&[], &base_only, &to_the_end)?.tokens_per_second);
    }
    let (mixed, base) = (median(mixed), median(base));

    println!("\nQuestion: {}\n", args.question);
    for (name, answer) in names.iter().zip(&answers) {
        print_answer(name, answer);
    }
    let (tokens, count) = (args.max_new_tokens, adapters.len());
    println!("decode to {tokens} tokens a row, median of {SPEED_RUNS} runs in turns:");
    println!("  base and {count} adapters in one batch   {mixed:6.1} tokens/s");
    println!("  the same prompts, base only       {base:6.1} tokens/s");
    println!("  the first over the second         {:6.0} %", 100.0 * mixed / base);
    Ok(())
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

/// Name and folder of every demo adapter, by name.
fn adapters(folder: &Path) -> Result<Vec<(String, PathBuf)>> {
    let mut adapters: Vec<(String, PathBuf)> = fs::read_dir(folder)
        .with_context(|| format!("cannot read {}", folder.display()))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.join("adapter_config.json").is_file())
        .filter_map(|path| Some((path.file_name()?.to_str()?.to_owned(), path)))
        .collect();
    adapters.sort();
    if adapters.is_empty() {
        bail!("no adapters in {}", folder.display());
    }
    Ok(adapters)
}

fn build(offline: bool) -> Result<PathBuf> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["build", "--release", "--package", "multilora", "--message-format", "json-render-diagnostics"]);
    if offline {
        command.arg("--offline");
    }
    let output =
        command.current_dir(crate::root()).stderr(Stdio::inherit()).output().context("cargo could not be run")?;
    if !output.status.success() {
        bail!("the build of multilora failed: {}", output.status);
    }
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter_map(|message| message["executable"].as_str().map(PathBuf::from))
        .next_back()
        .context("cargo named no executable")
}

struct Answers {
    answers: Vec<String>,
    tokens_per_second: f64,
}

/// The built binary with the model and the options of the demo.
struct Runner<'a> {
    args: &'a DemoArgs,
    binary: PathBuf,
    model: PathBuf,
}

impl Runner<'_> {
    /// The question once for each selection, in one batch.
    fn generate(&self, adapters: &[(String, PathBuf)], selections: &[&str], more: &[&str]) -> Result<Answers> {
        let mut command = Command::new(&self.binary);
        command.arg("generate").arg("--json").arg("--model").arg(&self.model);
        command.args(more).arg("--max-new-tokens").arg(self.args.max_new_tokens.to_string());
        if let Some(threads) = self.args.threads {
            command.arg("--threads").arg(threads.to_string());
        }
        for (name, path) in adapters {
            command.arg("--adapter").arg(format!("{name}={}", path.display()));
        }
        for selection in selections {
            command.arg("--prompt").arg(&self.args.question).arg("--use").arg(selection);
        }
        let output = command.stderr(Stdio::inherit()).output().context("multilora could not be run")?;
        if !output.status.success() {
            bail!("multilora generate ended with {}", output.status);
        }
        let lines: Vec<Value> = String::from_utf8(output.stdout)?
            .lines()
            .map(serde_json::from_str)
            .collect::<Result<_, _>>()
            .context("multilora generate printed something that is not JSON")?;
        let text = |line: &Value| line["text"].as_str().map(str::to_owned);
        let answers: Vec<String> = lines.iter().filter(|line| line["type"] == "result").filter_map(text).collect();
        let tokens_per_second = lines
            .iter()
            .find(|line| line["type"] == "stats")
            .and_then(|line| line["decode_tokens_per_second"].as_f64())
            .context("multilora generate printed no statistics")?;
        if answers.len() != selections.len() {
            bail!("{} answers for {} prompts", answers.len(), selections.len());
        }
        Ok(Answers { answers, tokens_per_second })
    }
}

/// Prints one answer in a column beside its name.
fn print_answer(name: &str, answer: &str) {
    let mut line = String::new();
    let mut lines = Vec::new();
    for word in answer.split_whitespace() {
        if !line.is_empty() && line.chars().count() + word.chars().count() > 84 {
            lines.push(std::mem::take(&mut line));
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    lines.push(line);
    for (index, line) in lines.iter().enumerate() {
        println!("{:>12} | {line}", if index == 0 { name } else { "" });
    }
    println!();
}
