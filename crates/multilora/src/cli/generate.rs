//! `multilora generate`: prompts in, text out, all in one batch, each prompt with its own adapter.

use std::io::{BufRead, IsTerminal, Write};
use std::num::NonZero;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::Serialize;

use multilora::engine::generate::{FinishReason, Generator, Report, Request};
use multilora::engine::kv_tokens_for;
use multilora::engine::tokenizer::{ChatMessage, Tokenizer};
use multilora::math::AdapterSelection;

use super::setup::{BASE, EngineArgs, EngineSize, Opened};

/// Options of `multilora generate`.
#[derive(Args)]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    engine: EngineArgs,
    /// A prompt. May be given several times; without it, every line of standard input is one.
    #[arg(long = "prompt", value_name = "TEXT")]
    prompts: Vec<String>,
    /// Which adapter answers: one for all prompts, or one for each in order. The base model unless given.
    #[arg(long = "use", value_name = "NAME|base")]
    uses: Vec<String>,
    /// The most tokens of an answer.
    #[arg(long, value_name = "N", default_value = "128")]
    max_new_tokens: NonZero<usize>,
    /// 0 takes the most likely token each time; above 0 tokens are drawn.
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f32,
    /// Where the draws start: the same seed gives the same text.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Take prompts as they are, without the model's chat template.
    #[arg(long)]
    raw: bool,
    /// Go on after the model's end tokens, to the full --max-new-tokens: for measuring.
    #[arg(long)]
    ignore_end_tokens: bool,
    /// Print JSON lines: a result for each prompt, then statistics.
    #[arg(long)]
    json: bool,
}

/// One prompt with what answers it.
struct Job {
    name: String,
    selection: AdapterSelection,
    prompt: String,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum Line<'a> {
    Result {
        index: usize,
        adapter: Option<&'a str>,
        prompt: &'a str,
        text: &'a str,
        prompt_tokens: usize,
        new_tokens: usize,
        finish_reason: &'static str,
    },
    Stats {
        prompts: usize,
        threads: usize,
        prefill_tokens: usize,
        prefill_seconds: f64,
        prefill_tokens_per_second: f64,
        decode_tokens: usize,
        decode_steps: usize,
        decode_seconds: f64,
        decode_tokens_per_second: f64,
    },
}

/// Generates and prints.
pub(crate) fn run(args: &GenerateArgs) -> Result<ExitCode> {
    let prompts = prompts(args)?;
    let opened = args.engine.open()?;
    let jobs = jobs(args, prompts, &opened)?;
    let (model, tokenizer) = opened.load_model()?;
    let tokenizer = tokenizer.context("the model cannot read or write text")?;
    let requests: Vec<Request> = jobs
        .iter()
        .enumerate()
        .map(|(index, job)| {
            Ok(Request {
                prompt: encode(&tokenizer, &job.prompt, args.raw).with_context(|| format!("prompt {}", index + 1))?,
                selection: job.selection.clone(),
                max_new_tokens: args.max_new_tokens.get(),
                temperature: args.temperature,
                // Equal prompts of one call differ, as they would in two calls.
                seed: args.seed.wrapping_add(index as u64),
                ignore_end_tokens: args.ignore_end_tokens,
                ..Request::default()
            })
        })
        .collect::<Result<_>>()?;

    let max_context = model.config().max_position_embeddings;
    let longest = |request: &Request| request.prompt.len().saturating_add(args.max_new_tokens.get()).min(max_context);
    let size = EngineSize { kv_tokens: kv_tokens_for(requests.iter().map(longest)), num_sequences: requests.len() };
    let mut engine = opened.engine(model, size)?;
    let threads = engine.num_threads();

    let mut generator = Generator::new(&mut engine, Some(&tokenizer));
    if args.json {
        let report = generator.run(&requests, |_| {})?;
        print_json(&jobs, &requests, &report, threads)?;
    } else {
        let mut printer = Printer::new(&jobs);
        let report = generator.run(&requests, |event| printer.take(event.request, event.text, event.finished))?;
        printer.finish()?;
        let stats = report.stats;
        eprintln!(
            "\n{} in one batch: prefill {:.1} tokens/s, decode {:.1} tokens/s",
            if jobs.len() == 1 { "1 prompt".to_owned() } else { format!("{} prompts", jobs.len()) },
            stats.prefill_tokens_per_second(),
            stats.decode_tokens_per_second()
        );
    }
    Ok(ExitCode::SUCCESS)
}

fn prompts(args: &GenerateArgs) -> Result<Vec<String>> {
    if !args.prompts.is_empty() {
        return Ok(args.prompts.clone());
    }
    let stdin = std::io::stdin();
    if stdin.is_terminal() {
        bail!("no prompt: give --prompt TEXT, or prompts on standard input, one a line");
    }
    let mut prompts = Vec::new();
    for line in stdin.lock().lines() {
        let line = line.context("cannot read standard input")?;
        if !line.trim().is_empty() {
            prompts.push(line);
        }
    }
    if prompts.is_empty() {
        bail!("no prompt: standard input holds none");
    }
    Ok(prompts)
}

fn jobs(args: &GenerateArgs, prompts: Vec<String>, opened: &Opened<'_>) -> Result<Vec<Job>> {
    let names: Vec<&str> = match args.uses.as_slice() {
        [] => vec![BASE; prompts.len()],
        [one] => vec![one; prompts.len()],
        several if several.len() == prompts.len() => several.iter().map(String::as_str).collect(),
        several => bail!("{} --use for {} prompts: give one for all, or one for each", several.len(), prompts.len()),
    };
    names
        .into_iter()
        .zip(prompts)
        .map(|(name, prompt)| Ok(Job { name: name.to_owned(), selection: opened.selection(name)?, prompt }))
        .collect()
}

/// Token ids of a prompt: as the user's turn of a chat where the model has a template, else as plain text.
fn encode(tokenizer: &Tokenizer, prompt: &str, raw: bool) -> Result<Vec<u32>> {
    match tokenizer.chat_template() {
        Some(template) if !raw => {
            let text = template.render(&[ChatMessage::new("user", prompt)], true)?;
            Ok(tokenizer.encode(&text, false)?)
        }
        _ => Ok(tokenizer.encode(prompt, true)?),
    }
}

/// Prints answers in the order of the prompts: the first unfinished one as its text comes, the others when it is their
/// turn.
struct Printer<'a> {
    jobs: &'a [Job],
    pending: Vec<String>,
    finished: Vec<bool>,
    current: usize,
    result: std::io::Result<()>,
}

impl<'a> Printer<'a> {
    fn new(jobs: &'a [Job]) -> Self {
        let mut printer = Printer {
            jobs,
            pending: vec![String::new(); jobs.len()],
            finished: vec![false; jobs.len()],
            current: 0,
            result: Ok(()),
        };
        printer.head();
        printer
    }

    fn take(&mut self, request: usize, text: &str, finished: Option<FinishReason>) {
        self.pending[request].push_str(text);
        self.finished[request] |= finished.is_some();
        while self.current < self.jobs.len() {
            let text = std::mem::take(&mut self.pending[self.current]);
            self.write(&text);
            if !self.finished[self.current] {
                return;
            }
            self.write("\n");
            self.current += 1;
            self.head();
        }
    }

    /// With several prompts, names the one whose answer follows.
    fn head(&mut self) {
        if let (true, Some(job)) = (self.jobs.len() > 1, self.jobs.get(self.current)) {
            let head = format!("── {} ── {}\n", job.name, job.prompt);
            self.write(&head);
        }
    }

    fn write(&mut self, text: &str) {
        if self.result.is_ok() && !text.is_empty() {
            let mut out = std::io::stdout().lock();
            self.result = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        }
    }

    fn finish(self) -> std::io::Result<()> {
        self.result
    }
}

fn print_json(jobs: &[Job], requests: &[Request], report: &Report, threads: usize) -> Result<()> {
    let mut out = std::io::stdout().lock();
    for (index, ((job, request), completion)) in jobs.iter().zip(requests).zip(&report.completions).enumerate() {
        let line = Line::Result {
            index,
            adapter: (job.name != BASE).then_some(&job.name),
            prompt: &job.prompt,
            text: &completion.text,
            prompt_tokens: request.prompt.len(),
            new_tokens: completion.token_ids.len(),
            finish_reason: match completion.finished {
                FinishReason::EndToken => "stop",
                FinishReason::ContextFull => "context",
                _ => "length",
            },
        };
        writeln!(out, "{}", serde_json::to_string(&line)?)?;
    }
    let stats = report.stats;
    let line = Line::Stats {
        prompts: jobs.len(),
        threads,
        prefill_tokens: stats.prefill_tokens,
        prefill_seconds: stats.prefill_time.as_secs_f64(),
        prefill_tokens_per_second: stats.prefill_tokens_per_second(),
        decode_tokens: stats.decode_tokens,
        decode_steps: stats.decode_steps,
        decode_seconds: stats.decode_time.as_secs_f64(),
        decode_tokens_per_second: stats.decode_tokens_per_second(),
    };
    writeln!(out, "{}", serde_json::to_string(&line)?)?;
    Ok(())
}
