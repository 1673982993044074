//! The crates in an engine: one base model, adapters in a pool, one batch in which every prompt names its own.
//!
//! ```text
//! cargo run --release -p model-engine --example many_adapters -- MODEL PROMPT [ADAPTER_DIR]...
//! ```

use std::error::Error;
use std::path::{Path, PathBuf};

use lora_adapter::{Adapter, PrepareOptions, PreparedAdapter, prepare_with};
use lora_math::AdapterSelection;
use lora_pool::{LoraPool, PoolOptions};
use model_engine::checkpoint::{Checkpoint, LoadOptions};
use model_engine::generate::{Generator, Request};
use model_engine::tokenizer::ChatMessage;
use model_engine::{Engine, EngineOptions, TransformerModel};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(model), Some(prompt)) = (arguments.next(), arguments.next()) else {
        return Err("usage: many_adapters MODEL PROMPT [ADAPTER_DIR]...".into());
    };
    let adapter_dirs: Vec<PathBuf> = arguments.map(PathBuf::from).collect();

    // The base model.
    let checkpoint = Checkpoint::open(Path::new(&model), LoadOptions::default())?;
    let tokenizer = checkpoint.tokenizer?;
    let model = TransformerModel::new(checkpoint.config, checkpoint.weights)?;

    // Every adapter is checked against the model before a pool sees it, and the pool is laid out for what they hold.
    let prepare = |directory: &PathBuf| -> Result<PreparedAdapter, Box<dyn Error>> {
        Ok(prepare_with(Adapter::open(directory)?, &model, &PrepareOptions::default())?)
    };
    let adapters: Vec<PreparedAdapter> = adapter_dirs.iter().map(prepare).collect::<Result<_, _>>()?;
    let options = PoolOptions { num_slots: adapters.len().max(1), ..PoolOptions::default() };
    let pool = LoraPool::open(model.shape(), options.covering(&adapters))?;
    let mut selections = vec![AdapterSelection::Base];
    for (directory, adapter) in adapter_dirs.iter().zip(&adapters) {
        let name = directory.display().to_string();
        pool.load(&name, adapter)?;
        selections.push(AdapterSelection::Named(name));
    }

    // One request for the base and one for each adapter, all in one batch.
    let mut engine = Engine::new(model, Some(pool), &EngineOptions::default())?;
    let prompt = match tokenizer.chat_template() {
        Some(template) => tokenizer.encode(&template.render(&[ChatMessage::new("user", prompt)], true)?, false)?,
        None => tokenizer.encode(&prompt, true)?,
    };
    let request = |selection: &AdapterSelection| Request {
        prompt: prompt.clone(),
        selection: selection.clone(),
        max_new_tokens: 48,
        ..Request::default()
    };
    let requests: Vec<Request> = selections.iter().map(request).collect();
    let report = Generator::new(&mut engine, Some(&tokenizer)).run(&requests, |_| ())?;
    for (selection, completion) in selections.iter().zip(&report.completions) {
        println!("{selection:?}: {}\n", completion.text.trim());
    }
    println!("{:.1} tokens/s in decode steps of all rows", report.stats.decode_tokens_per_second());
    Ok(())
}
