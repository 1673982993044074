//! Loads by name off the step thread: files or host tier → slot, by a few threads, published between two steps.
//!
//! ```text
//! prefetch ──▶ queue ──▶ worker: host tier, else source; pack; start the copy ──▶ publish_arrived on the step thread
//! ```

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lora_adapter::PreparedAdapter;
use lora_math::{AdapterId, ContentDigest};
use thiserror::Error;
use tracing::debug;

use crate::error::PoolError;
use crate::landing::{Landing, Staged};
use crate::memory::DeviceMemory;
use crate::pool::LoraPool;

/// Where a [`Loader`] gets adapters that the host tier does not hold.
pub trait AdapterSource: Send + Sync + 'static {
    /// Reads, checks and prepares the adapter of this name. Runs on a loader's thread, and may take its time.
    ///
    /// # Errors
    /// Whatever keeps the adapter from being loaded; it becomes [`LoadError::Source`].
    fn load(&self, name: &str) -> Result<PreparedAdapter, SourceError>;

    /// Bytes that [`load`](Self::load) of this name takes on its way, roughly: what a loader holds its cap against. An unknown
    /// name may say 0.
    fn num_bytes(&self, name: &str) -> usize;
}

/// What a source failed with.
pub type SourceError = Box<dyn std::error::Error + Send + Sync>;

/// Why a load came to nothing.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The source does not give the adapter.
    #[error("adapter {name:?} does not load: {source}")]
    Source {
        /// The name that was asked for.
        name: String,
        /// What the source said.
        source: SourceError,
    },
    /// The pool does not take it.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The source panicked.
    #[error("the load of adapter {name:?} panicked")]
    Panicked {
        /// The name that was asked for.
        name: String,
    },
}

impl LoadError {
    /// Whether the same prefetch may succeed later without a change by the caller.
    pub fn is_retryable(&self) -> bool {
        matches!(self, LoadError::Pool(error) if error.is_retryable())
    }
}

/// How much a [`Loader`] does at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoaderOptions {
    /// Threads, at least 1: loads that run side by side.
    pub num_threads: usize,
    /// Bytes that loads from the source take together, as the source tells them; one load runs in any case.
    pub max_loading_bytes: usize,
}

impl Default for LoaderOptions {
    /// 2 threads and 1 GiB.
    fn default() -> Self {
        LoaderOptions { num_threads: 2, max_loading_bytes: 1 << 30 }
    }
}

/// What a prefetch found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefetch {
    /// The name points to a resident generation.
    Resident,
    /// Its load was asked for before, and goes on.
    UnderWay,
    /// Its load waits for a thread.
    Queued,
}

/// Where the contents of a load came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadedFrom {
    /// They were in a slot already.
    Device,
    /// The host tier had their image.
    Host,
    /// The source.
    Source,
}

/// The end of a load.
#[derive(Debug)]
pub struct Loaded {
    /// The name that was asked for.
    pub name: Arc<str>,
    /// The generation that it points to, or what went wrong.
    pub result: Result<AdapterId, LoadError>,
    /// Where the contents came from; none where the load failed before that was known.
    pub from: Option<LoadedFrom>,
    /// From the prefetch to the start of the load.
    pub queued: Duration,
    /// From there to the start of the copy: reading, checking, packing.
    pub staged: Duration,
    /// From there to the publication.
    pub copied: Duration,
}

/// Loads adapters into a pool by name, on threads of its own. Its drop waits for the loads that run, and gives up those that
/// are not published.
///
/// The loader remembers which contents a name had, so that a name whose generation was evicted comes back from the host tier
/// without its files. A name whose files have changed keeps its old contents until [`forget`](Self::forget).
pub struct Loader<M: DeviceMemory> {
    shared: Arc<Shared<M>>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared<M: DeviceMemory> {
    pool: Arc<LoraPool<M>>,
    source: Arc<dyn AdapterSource>,
    max_loading_bytes: usize,
    state: Mutex<State<M>>,
    /// Notified when there is something to load, or room for it, or the end.
    work: Condvar,
    /// Notified when a load has come to an end or to a publication.
    progress: Condvar,
}

struct State<M: DeviceMemory> {
    queue: VecDeque<Waiting>,
    /// Names in the queue, on a thread, or waiting for a publication.
    under_way: HashSet<Arc<str>>,
    staged: Vec<StagedLoad<M>>,
    ended: Vec<Loaded>,
    contents: HashMap<Arc<str>, ContentDigest>,
    loading_bytes: usize,
    closing: bool,
}

struct Waiting {
    name: Arc<str>,
    num_bytes: usize,
    since: Instant,
}

struct StagedLoad<M: DeviceMemory> {
    landing: Landing<M>,
    name: Arc<str>,
    from: LoadedFrom,
    queued: Duration,
    staged: Duration,
    since: Instant,
}

impl<M: DeviceMemory> Loader<M> {
    /// A loader of `source`'s adapters into `pool`.
    ///
    /// # Errors
    /// Threads that the system does not give.
    pub fn new(
        pool: Arc<LoraPool<M>>,
        source: Arc<dyn AdapterSource>,
        options: LoaderOptions,
    ) -> std::io::Result<Self> {
        let state = State {
            queue: VecDeque::new(),
            under_way: HashSet::new(),
            staged: Vec::new(),
            ended: Vec::new(),
            contents: HashMap::new(),
            loading_bytes: 0,
            closing: false,
        };
        let shared = Arc::new(Shared {
            pool,
            source,
            max_loading_bytes: options.max_loading_bytes,
            state: Mutex::new(state),
            work: Condvar::new(),
            progress: Condvar::new(),
        });
        // Filled one by one: on an error the drop ends those that run.
        let mut loader = Loader { shared, threads: Vec::new() };
        for number in 0..options.num_threads.max(1) {
            let shared = loader.shared.clone();
            let thread = std::thread::Builder::new().name(format!("adapter loader {number}"));
            loader.threads.push(thread.spawn(move || shared.work())?);
        }
        Ok(loader)
    }

    /// Asks for an adapter, unless it is resident or asked for already. Never waits for a load; what became of it is told by
    /// [`publish_arrived`](Self::publish_arrived).
    pub fn prefetch(&self, name: &str) -> Prefetch {
        let mut state = self.shared.state();
        if state.under_way.contains(name) {
            return Prefetch::UnderWay;
        }
        // Behind the look at what is under way: a load leaves that only when its name is resident or has failed.
        if self.shared.pool.state().is_loaded(name) {
            return Prefetch::Resident;
        }
        let name: Arc<str> = name.into();
        let num_bytes = self.shared.source.num_bytes(&name);
        state.under_way.insert(name.clone());
        state.queue.push_back(Waiting { name, num_bytes, since: Instant::now() });
        self.shared.work.notify_one();
        Prefetch::Queued
    }

    /// Publishes the loads whose copies have arrived, and tells of all that came to an end since the last call: for the step
    /// thread, between two steps. Costs nothing that grows with the size of an adapter.
    pub fn publish_arrived(&self, stream: &M::Stream) -> Vec<Loaded> {
        let mut state = self.shared.state();
        let staged = std::mem::take(&mut state.staged);
        for load in staged {
            match load.landing.has_arrived() {
                Ok(false) => state.staged.push(load),
                Ok(true) => {
                    let result = load.landing.publish(stream).map_err(LoadError::Pool);
                    state.end(Loaded {
                        name: load.name,
                        result,
                        from: Some(load.from),
                        queued: load.queued,
                        staged: load.staged,
                        copied: load.since.elapsed(),
                    });
                }
                Err(error) => state.end(Loaded {
                    name: load.name,
                    result: Err(error.into()),
                    from: Some(load.from),
                    queued: load.queued,
                    staged: load.staged,
                    copied: load.since.elapsed(),
                }),
            }
        }
        std::mem::take(&mut state.ended)
    }

    /// Waits until there is something for [`publish_arrived`](Self::publish_arrived) to look at, or for as long as this: for an
    /// engine that has nothing else to do. Whether there is.
    pub fn wait(&self, timeout: Duration) -> bool {
        let state = self.shared.state();
        let idle = |state: &mut State<M>| state.staged.is_empty() && state.ended.is_empty();
        let waited = self.shared.progress.wait_timeout_while(state, timeout, idle);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        !idle(&mut state)
    }

    /// Forgets which contents a name had: its next load reads the source. What is resident stays.
    pub fn forget(&self, name: &str) {
        self.shared.state().contents.remove(name);
    }

    /// Loads that were asked for and have not come to an end.
    pub fn num_under_way(&self) -> usize {
        self.shared.state().under_way.len()
    }
}

impl<M: DeviceMemory> State<M> {
    /// A load is over: its name can be asked for again.
    fn end(&mut self, loaded: Loaded) {
        match &loaded.result {
            Ok(id) => debug!(name = &*loaded.name, generation = id.generation.number(), ?loaded.from, "adapter loaded"),
            Err(error) => debug!(name = &*loaded.name, %error, "adapter not loaded"),
        }
        self.under_way.remove(&loaded.name);
        self.ended.push(loaded);
    }

    /// The first load that there is room for; none fits while one that is larger than the cap runs alone.
    fn next(&mut self, max_loading_bytes: usize) -> Option<Waiting> {
        let room = max_loading_bytes.saturating_sub(self.loading_bytes);
        let fits = |waiting: &Waiting| self.loading_bytes == 0 || waiting.num_bytes <= room;
        let index = self.queue.iter().position(fits)?;
        self.queue.remove(index)
    }
}

impl<M: DeviceMemory> Shared<M> {
    fn state(&self) -> MutexGuard<'_, State<M>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a thread does: one load after the other.
    fn work(&self) {
        let mut state = self.state();
        loop {
            if state.closing {
                return;
            }
            let Some(Waiting { name, num_bytes, since }) = state.next(self.max_loading_bytes) else {
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            // An unknown size is at least one load.
            let num_bytes = num_bytes.max(1);
            state.loading_bytes = state.loading_bytes.saturating_add(num_bytes);
            let content = state.contents.get(&name).copied();
            drop(state);
            let (start, queued) = (Instant::now(), since.elapsed());
            let loaded = self.load(&name, content);
            let staged = start.elapsed();
            state = self.state();
            state.loading_bytes -= num_bytes;
            let over =
                |result, from| Loaded { name: name.clone(), result, from, queued, staged, copied: Duration::ZERO };
            match loaded {
                Ok((Staged::Landing(landing), from, content)) => {
                    state.contents.insert(name.clone(), content);
                    let since = Instant::now();
                    state.staged.push(StagedLoad { landing, name, from, queued, staged, since });
                }
                Ok((Staged::Resident(lease), _, content)) => {
                    state.contents.insert(name.clone(), content);
                    state.end(over(Ok(lease.id()), Some(LoadedFrom::Device)));
                }
                Err(error) => state.end(over(Err(error), None)),
            }
            self.progress.notify_all();
            // There may be room for another one.
            self.work.notify_all();
        }
    }

    /// From the host tier where it has what the name had, else from the source.
    fn load(
        &self,
        name: &str,
        content: Option<ContentDigest>,
    ) -> Result<(Staged<M>, LoadedFrom, ContentDigest), LoadError> {
        if let Some(content) = content
            && let Some(staged) = self.pool.stage_kept(name, content)?
        {
            return Ok((staged, LoadedFrom::Host, content));
        }
        let prepared = catch_unwind(AssertUnwindSafe(|| self.source.load(name)))
            .map_err(|_| LoadError::Panicked { name: name.to_owned() })?
            .map_err(|source| LoadError::Source { name: name.to_owned(), source })?;
        Ok((self.pool.stage(name, &prepared)?, LoadedFrom::Source, prepared.content()))
    }
}

impl<M: DeviceMemory> Drop for Loader<M> {
    fn drop(&mut self) {
        self.shared.state().closing = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A thread ends by returning: a source's panic is caught.
            let _ = thread.join();
        }
    }
}

impl<M: DeviceMemory> fmt::Debug for Loader<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loader")
            .field("num_threads", &self.threads.len())
            .field("under_way", &self.num_under_way())
            .finish()
    }
}
