//! Which waiting requests begin to run, and which adapters are loaded for those that cannot yet.

use std::collections::BTreeSet;

use lora_math::AdapterSelection;
use lora_math::selection::SelectionError;
use lora_pool::{PoolError, Prefetch, ResidentSnapshot};

use super::Scheduler;
use super::request::{Blocked, Event, RequestError, Running, Waiting};
use crate::engine::{EngineError, SequenceId, SequenceOptions};
use crate::generate::Sampler;

/// The outcome of an attempt.
enum Attempt {
    Admitted(SequenceId),
    Blocked(Blocked),
    Failed(EngineError),
}

/// What older requests that wait have been passed over for often enough.
#[derive(Default)]
struct Closed {
    slots: bool,
    /// And with it everything: every request competes for the KV cache.
    cache: bool,
}

impl Closed {
    fn look_at(&mut self, waiting: &Waiting, max_bypasses: usize) {
        if waiting.bypasses >= max_bypasses {
            match waiting.blocked {
                Blocked::Slot => self.slots = true,
                Blocked::Turn | Blocked::Kv => self.cache = true,
            }
        }
    }
}

impl Scheduler {
    /// Admits in order of submission; see the module's page for who may pass whom.
    pub(super) fn admit(&mut self) {
        // Set by requests that let nobody pass any more who competes with them.
        let mut closed = Closed::default();
        let mut index = 0;
        while index < self.waiting.len() && self.running.len() < self.options.max_running {
            if closed.cache {
                break;
            }
            if closed.slots && self.waiting[index].uses_adapter() {
                self.waiting[index].blocked = Blocked::Slot;
                index += 1;
                continue;
            }
            match self.attempt(index) {
                Attempt::Admitted(sequence) => {
                    if let Some(waiting) = self.waiting.remove(index) {
                        self.count_bypasses(index, waiting.uses_adapter(), &mut closed);
                        self.start(waiting, sequence);
                    }
                }
                Attempt::Failed(error) => {
                    if let Some(waiting) = self.waiting.remove(index) {
                        let result = Err(RequestError::Engine(error));
                        self.events.push(Event::Finished { request: waiting.id, result });
                    }
                }
                Attempt::Blocked(blocked) => {
                    let waiting = &mut self.waiting[index];
                    waiting.blocked = blocked;
                    closed.look_at(waiting, self.options.max_bypasses);
                    index += 1;
                }
            }
        }
        self.prefetch();
    }

    fn attempt(&mut self, index: usize) -> Attempt {
        let waiting = &self.waiting[index];
        if waiting.num_blocks > self.free_blocks() {
            return Attempt::Blocked(Blocked::Kv);
        }
        let options = SequenceOptions {
            selection: waiting.request.selection.clone(),
            prompt_tokens: Some(waiting.request.prompt.len()),
            salt: waiting.request.salt.clone(),
        };
        match self.engine.add_sequence_with(&options) {
            Ok(sequence) => Attempt::Admitted(sequence),
            Err(EngineError::Pool(PoolError::LoadUnderWay { .. })) => Attempt::Blocked(Blocked::Slot),
            Err(EngineError::Pool(PoolError::Selection(SelectionError::UnknownName { .. })))
                if self.loader.is_some() =>
            {
                Attempt::Blocked(Blocked::Slot)
            }
            Err(error) => Attempt::Failed(error),
        }
    }

    /// A request was admitted from behind these: they let it pass, if it takes what they wait for.
    fn count_bypasses(&mut self, index: usize, uses_adapter: bool, closed: &mut Closed) {
        let max_bypasses = self.options.max_bypasses;
        for older in self.waiting.iter_mut().take(index) {
            let competes = match older.blocked {
                Blocked::Slot => uses_adapter,
                Blocked::Turn | Blocked::Kv => true,
            };
            older.bypasses += usize::from(competes);
            closed.look_at(older, max_bypasses);
        }
    }

    fn start(&mut self, waiting: Waiting, sequence: SequenceId) {
        let Waiting { id, request, limit, num_blocks, since, bypasses, .. } = waiting;
        self.reserved_blocks += num_blocks;
        let cached = self.engine.reuse_prefix(sequence, &request.prompt);
        debug_assert!(cached.is_ok(), "the sequence is there, and empty");
        let cached = cached.unwrap_or(0);
        let lease = self.engine.lease(sequence).ok().flatten();
        self.running.push(Running {
            id,
            sequence,
            adapter: lease.map(|lease| lease.id()),
            sampler: Sampler::new(request.temperature, request.seed),
            end_tokens: self.engine.model().config().eos_token_ids.clone(),
            limit,
            num_blocks,
            fed: cached,
            cached,
            pending: None,
            num_new: 0,
            steps_waited: self.num_steps - since,
            bypasses,
            request,
        });
    }

    /// Asks for the adapters of the oldest waiting requests, as many as there are slots that nobody uses: more would drive
    /// each other out before their requests are admitted.
    fn prefetch(&self) {
        let (Some(loader), Some(pool)) = (&self.loader, self.pool()) else { return };
        let mut names = BTreeSet::new();
        let mut wanted = self.waiting.iter().filter_map(|waiting| match &waiting.request.selection {
            AdapterSelection::Named(name) => names.insert(name).then_some(name),
            _ => None,
        });
        let Some(first) = wanted.next() else { return };
        let snapshot = pool.snapshot();
        let is_idle = |resident: &&ResidentSnapshot| {
            resident.num_leases == 0 && !resident.pinned && !resident.active && !resident.retired
        };
        let mut room = snapshot.num_free + snapshot.residents.iter().filter(is_idle).count();
        for name in std::iter::once(first).chain(wanted) {
            if room == 0 {
                return;
            }
            let takes_room = match snapshot.resident(name) {
                Some(resident) => is_idle(&resident),
                None => loader.prefetch(name) == Prefetch::Queued,
            };
            room -= usize::from(takes_room);
        }
    }
}
