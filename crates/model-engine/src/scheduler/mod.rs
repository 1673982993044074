//! Requests that come and go at any step: which of them run, in which order, on which adapters.
//!
//! [`Scheduler::step`] runs one step of the engine: a token for every request that decodes, and as much of waiting prompts as
//! there is room for. Between two steps requests are submitted, cancelled, and admitted, and loads that have arrived are
//! published. More adapters may wait than the pool has slots; they take turns.
//!
//! # Fairness
//! Requests are admitted in the order in which they came, except that one which must wait (for a slot, or for room in the KV
//! cache) lets younger ones pass: [`SchedulerOptions::max_bypasses`] of those that compete with it for what it waits for. From
//! then on none of those is admitted before it. Requests on the base model do not compete for slots. Since every running
//! request ends, at the latest after the tokens that it asked for, so does every wait.
//!
//! Room in the KV cache is set aside for all of a request's tokens when it is admitted: an admitted request is never driven out.

mod admission;
mod request;

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use lora_math::AdapterSelection;
use lora_pool::{HostMemory, HostStream, Loader, LoraPool};

pub use request::{Event, Finished, RequestError, RequestId, SubmitError};

use crate::engine::{Engine, EngineError, LogitsFor, StepInput};
use crate::generate::{FinishReason, Request};
use crate::kv_cache::KvCache;
use request::{Running, Waiting};

/// How many requests run, and how far waiting ones fall behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerOptions {
    /// Requests that run at once, at most the engine's rows of a step.
    pub max_running: usize,
    /// Rows of prompts in a step, at least 1: a bound on how long a step that decodes is held up by a prompt.
    pub max_prefill_rows: usize,
    /// Younger requests that a waiting one lets pass.
    pub max_bypasses: usize,
}

impl Default for SchedulerOptions {
    /// 64 requests, 256 prompt rows, 16 bypasses.
    fn default() -> Self {
        SchedulerOptions { max_running: 64, max_prefill_rows: 256, max_bypasses: 16 }
    }
}

/// Runs requests on an engine, whenever they come.
pub struct Scheduler {
    engine: Engine,
    /// Brings adapters that are named and not resident; without one such a request fails.
    loader: Option<Loader<HostMemory>>,
    options: SchedulerOptions,
    waiting: VecDeque<Waiting>,
    running: Vec<Running>,
    /// Blocks of the KV cache that are set aside for running requests.
    reserved_blocks: usize,
    /// What has happened since the last step.
    events: Vec<Event>,
    next_request: u64,
    num_steps: u64,
}

impl Scheduler {
    /// A scheduler of an engine without sequences. `loader`, if any, loads into the engine's pool.
    pub fn new(engine: Engine, loader: Option<Loader<HostMemory>>, options: SchedulerOptions) -> Self {
        let max_running = options.max_running.clamp(1, engine.max_step_rows());
        let options = SchedulerOptions { max_running, max_prefill_rows: options.max_prefill_rows.max(1), ..options };
        Scheduler {
            engine,
            loader,
            options,
            waiting: VecDeque::new(),
            running: Vec::new(),
            reserved_blocks: 0,
            events: Vec::new(),
            next_request: 0,
            num_steps: 0,
        }
    }

    /// Takes a request in; it waits for its turn.
    ///
    /// # Errors
    /// [`SubmitError`] for what could never run.
    pub fn submit(&mut self, request: Request) -> Result<RequestId, SubmitError> {
        let waiting = Waiting::new(&self.engine, RequestId(self.next_request), request, self.num_steps)?;
        self.next_request += 1;
        let id = waiting.id;
        self.waiting.push_back(waiting);
        Ok(id)
    }

    /// Ends a request wherever it is; its end is told by the next step. Whether there was one.
    pub fn cancel(&mut self, request: RequestId) -> bool {
        if let Some(index) = self.waiting.iter().position(|waiting| waiting.id == request) {
            self.waiting.remove(index);
        } else if let Some(index) = self.running.iter().position(|running| running.id == request) {
            self.end(index);
        } else {
            return false;
        }
        self.events.push(Event::Finished { request, result: Err(RequestError::Cancelled) });
        true
    }

    /// One step: publishes and admits, then runs what there is. Gives every token as it comes, and the end of every request.
    ///
    /// # Errors
    /// A fault of the engine: requests are checked when they are submitted. What was running still is.
    pub fn step(&mut self) -> Result<Vec<Event>, EngineError> {
        self.num_steps += 1;
        self.publish();
        self.admit();
        self.run()?;
        Ok(std::mem::take(&mut self.events))
    }

    /// Waits for a load, where nothing runs and something waits: for a loop that has nothing else to do. Whether the next step
    /// has something to do.
    pub fn wait(&self, timeout: Duration) -> bool {
        if !self.running.is_empty() || !self.events.is_empty() {
            return true;
        }
        if self.waiting.is_empty() {
            return false;
        }
        self.loader.as_ref().is_none_or(|loader| loader.num_under_way() == 0 || loader.wait(timeout))
    }

    /// Whether nothing waits, runs, or is to be told.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty() && self.events.is_empty()
    }

    /// Requests that wait for admission.
    #[must_use]
    pub fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Requests that run.
    #[must_use]
    pub fn num_running(&self) -> usize {
        self.running.len()
    }

    /// The engine.
    #[must_use]
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Publishes loads that have arrived, and ends the requests of those that failed for good.
    fn publish(&mut self) {
        let Some(loader) = &self.loader else { return };
        for loaded in loader.publish_arrived(&HostStream) {
            let Err(error) = loaded.result else { continue };
            // No slot was free after all: the load is asked for again when one is.
            if error.is_retryable() {
                continue;
            }
            let reason = error.to_string();
            let events = &mut self.events;
            self.waiting.retain(|waiting| {
                let fails =
                    matches!(&waiting.request.selection, AdapterSelection::Named(name) if **name == *loaded.name);
                if fails {
                    let error = RequestError::Load { adapter: loaded.name.to_string(), reason: reason.clone() };
                    events.push(Event::Finished { request: waiting.id, result: Err(error) });
                }
                !fails
            });
        }
    }

    /// Runs a token of every request that decodes, and of prompts, oldest first, as many rows as there is room for.
    fn run(&mut self) -> Result<(), EngineError> {
        let (mut inputs, mut indices) = (Vec::new(), Vec::new());
        let mut room = self.engine.max_step_rows();
        for (index, running) in self.running.iter().enumerate() {
            if let Some(token) = &running.pending {
                let token_ids = std::slice::from_ref(token);
                inputs.push(StepInput { sequence: running.sequence, token_ids, logits: LogitsFor::Last });
                indices.push(index);
                room -= 1;
            }
        }
        let mut room = room.min(self.options.max_prefill_rows);
        for (index, running) in self.running.iter().enumerate() {
            let rest = &running.request.prompt[running.fed..];
            if rest.is_empty() || room == 0 {
                continue;
            }
            let token_ids = &rest[..rest.len().min(room)];
            let logits = if token_ids.len() == rest.len() { LogitsFor::Last } else { LogitsFor::None };
            inputs.push(StepInput { sequence: running.sequence, token_ids, logits });
            indices.push(index);
            room -= token_ids.len();
        }
        if inputs.is_empty() {
            return Ok(());
        }
        let output = self.engine.step(&inputs)?;
        let fed: Vec<usize> = inputs.iter().map(|input| input.token_ids.len()).collect();
        let mut ended = Vec::new();
        for (position, &index) in indices.iter().enumerate() {
            let running = &mut self.running[index];
            if running.pending.take().is_none() {
                running.fed += fed[position];
            }
            let Some(row) = output.logits(position).last() else { continue };
            if running.limit.0 == 0 {
                ended.push((index, running.limit.1));
                continue;
            }
            let token_id = running.sampler.sample(row);
            running.num_new += 1;
            self.events.push(Event::Token { request: running.id, token_id });
            let ends = !running.request.ignore_end_tokens && running.end_tokens.contains(&token_id);
            match (ends, running.num_new >= running.limit.0) {
                (true, _) => ended.push((index, FinishReason::EndToken)),
                (false, true) => ended.push((index, running.limit.1)),
                (false, false) => running.pending = Some(token_id),
            }
        }
        // From the last on, so that indices stay what they are.
        ended.sort_unstable_by_key(|(index, _)| std::cmp::Reverse(*index));
        for (index, reason) in ended {
            let finished = self.running[index].finished(reason);
            let request = self.end(index);
            self.events.push(Event::Finished { request, result: Ok(finished) });
        }
        Ok(())
    }

    /// Takes a request out of the engine.
    fn end(&mut self, index: usize) -> RequestId {
        let running = self.running.remove(index);
        self.reserved_blocks -= running.num_blocks;
        let known = self.engine.finish(running.sequence);
        debug_assert!(known.is_ok(), "a running request has a sequence");
        running.id
    }

    fn pool(&self) -> Option<&Arc<LoraPool>> {
        self.engine.pool()
    }

    /// Blocks of the KV cache that nobody has set aside.
    fn free_blocks(&self) -> usize {
        self.engine.kv_usage().num_blocks - self.reserved_blocks
    }
}

/// Blocks of a request to its end: the last token is given out, not fed.
fn blocks_of(prompt_tokens: usize, max_new: usize) -> usize {
    KvCache::blocks_for(prompt_tokens + max_new.saturating_sub(1))
}

impl fmt::Debug for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scheduler")
            .field("waiting", &self.waiting.len())
            .field("running", &self.running.len())
            .field("engine", &self.engine)
            .finish_non_exhaustive()
    }
}
