//! Loads by name on a loader's threads.

mod common;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use common::*;
use lora_adapter::PreparedAdapter;
use lora_math::AdapterId;
use lora_pool::{
    AdapterSource, HostMemory, HostStream, LoadError, Loaded, LoadedFrom, Loader, LoaderOptions, LoraPool, PoolError,
    PoolOptions, Prefetch, SourceError,
};

/// Adapters by name, with a count of loads and of those that run at once.
#[derive(Default)]
struct Source {
    adapters: Mutex<HashMap<String, PreparedAdapter>>,
    loads: AtomicUsize,
    running: AtomicUsize,
    most_running: AtomicUsize,
    /// Each load waits here for the others.
    meeting: Option<Barrier>,
    num_bytes: usize,
}

impl Source {
    fn new(adapters: &[(&str, PreparedAdapter)]) -> Self {
        let adapters = adapters.iter().map(|(name, adapter)| ((*name).to_owned(), adapter.clone())).collect();
        Source { adapters: Mutex::new(adapters), num_bytes: 1, ..Source::default() }
    }

    fn loads(&self) -> usize {
        self.loads.load(Ordering::SeqCst)
    }
}

impl AdapterSource for Source {
    fn load(&self, name: &str) -> Result<PreparedAdapter, SourceError> {
        self.loads.fetch_add(1, Ordering::SeqCst);
        let running = 1 + self.running.fetch_add(1, Ordering::SeqCst);
        self.most_running.fetch_max(running, Ordering::SeqCst);
        if let Some(meeting) = &self.meeting {
            meeting.wait();
        } else {
            std::thread::sleep(Duration::from_millis(2));
        }
        self.running.fetch_sub(1, Ordering::SeqCst);
        assert_ne!(name, "panic", "a source that panics");
        let adapters = self.adapters.lock().unwrap();
        adapters.get(name).cloned().ok_or_else(|| format!("no files for {name}").into())
    }

    fn num_bytes(&self, _name: &str) -> usize {
        self.num_bytes
    }
}

type HostLoader = Loader<HostMemory>;

fn loader(num_slots: usize, source: &Arc<Source>, options: LoaderOptions) -> (Arc<LoraPool>, HostLoader) {
    let options_of_pool = PoolOptions { host_bytes: 1 << 20, ..common::options(num_slots) };
    let pool = LoraPool::open(&shape(), options_of_pool).unwrap();
    let loader = Loader::new(pool.clone(), source.clone(), options).unwrap();
    (pool, loader)
}

/// Publishes until so many loads have ended.
fn ended(loader: &HostLoader, count: usize) -> Vec<Loaded> {
    let mut all = Vec::new();
    while all.len() < count {
        assert!(loader.wait(Duration::from_secs(20)), "{all:?}");
        all.extend(loader.publish_arrived(&HostStream));
    }
    assert_eq!(all.len(), count);
    all
}

fn only(loader: &HostLoader) -> Loaded {
    ended(loader, 1).pop().unwrap()
}

fn id(loaded: &Loaded) -> AdapterId {
    *loaded.result.as_ref().unwrap()
}

#[test]
fn a_name_goes_from_files_to_slot_and_back_from_the_host() {
    let (a, b) = (full_adapter(1, 8), small_adapter(2));
    let source = Arc::new(Source::new(&[("a", a.clone()), ("b", b.clone())]));
    let (pool, loader) = loader(1, &source, LoaderOptions::default());
    assert!(!loader.wait(Duration::ZERO));
    assert_eq!(loader.prefetch("a"), Prefetch::Queued);
    let loaded = only(&loader);
    assert_eq!((&*loaded.name, loaded.from), ("a", Some(LoadedFrom::Source)));
    assert_eq!(lease(&pool, "a").id(), id(&loaded));
    assert_eq!(loader.prefetch("a"), Prefetch::Resident);
    assert_eq!(loader.num_under_way(), 0);

    loader.prefetch("b"); // takes the only slot
    only(&loader);
    assert_eq!(loader.prefetch("a"), Prefetch::Queued);
    let loaded = only(&loader);
    assert_eq!(loaded.from, Some(LoadedFrom::Host));
    assert_eq!(source.loads(), 2, "no file is read again");
    let held = lease(&pool, "a");
    assert_eq!(device_pairs(&pool, &held), adapter_pairs(pool.layout(), &a));

    // Other files under the name are read once the loader forgets what it had.
    drop(held);
    source.adapters.lock().unwrap().insert("a".into(), b.clone());
    pool.evict("a").unwrap();
    loader.prefetch("a");
    only(&loader);
    assert_eq!(lease(&pool, "a").id().content, a.content());
    pool.evict("a").unwrap();
    loader.forget("a");
    loader.prefetch("a");
    let loaded = only(&loader);
    assert_eq!((loaded.from, id(&loaded).content), (Some(LoadedFrom::Source), b.content()));
}

#[test]
fn many_requests_for_a_name_are_one_load() {
    let source = Arc::new(Source::new(&[("a", small_adapter(1))]));
    let (_pool, loader) = loader(2, &source, LoaderOptions { num_threads: 4, ..LoaderOptions::default() });
    let queued = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                if loader.prefetch("a") == Prefetch::Queued {
                    queued.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
    });
    only(&loader);
    assert_eq!((source.loads(), queued.into_inner()), (1, 1));
}

#[test]
fn loads_run_side_by_side_within_their_bytes() {
    let names = ["a", "b", "c", "d"];
    let adapters: Vec<_> = names.iter().zip(1..).map(|(&name, seed)| (name, small_adapter(seed))).collect();
    // Two meet in the source: one after the other they would wait for ever.
    let source = Arc::new(Source { meeting: Some(Barrier::new(2)), ..Source::new(&adapters) });
    let (_pool, two) = loader(4, &source, LoaderOptions { num_threads: 2, max_loading_bytes: 2 });
    assert_eq!(names.map(|name| two.prefetch(name)), [Prefetch::Queued; 4]);
    ended(&two, 4);
    assert_eq!(source.most_running.load(Ordering::SeqCst), 2);

    // With room for one, and for loads that are larger than all the room, one runs at a time.
    for num_bytes in [1, 100] {
        let source = Arc::new(Source { num_bytes, ..Source::new(&adapters) });
        let (_pool, one) = loader(4, &source, LoaderOptions { num_threads: 4, max_loading_bytes: 1 });
        assert_eq!(names.map(|name| one.prefetch(name)), [Prefetch::Queued; 4]);
        assert!(ended(&one, 4).iter().all(|loaded| loaded.result.is_ok()));
        assert_eq!(source.most_running.load(Ordering::SeqCst), 1);
    }
}

#[test]
fn what_fails_is_told_and_can_be_asked_for_again() {
    let source = Arc::new(Source::new(&[("a", small_adapter(1)), ("b", small_adapter(2))]));
    let (pool, loader) = loader(1, &source, LoaderOptions::default());
    loader.prefetch("nobody");
    let error = only(&loader).result.unwrap_err();
    assert_eq!(error.to_string(), "adapter \"nobody\" does not load: no files for nobody");
    assert!(!error.is_retryable());
    loader.prefetch("panic");
    assert!(matches!(only(&loader).result, Err(LoadError::Panicked { .. })));
    source.adapters.lock().unwrap().insert("nobody".into(), small_adapter(3));
    assert_eq!(loader.prefetch("nobody"), Prefetch::Queued);
    let first = only(&loader);
    let held = lease(&pool, "nobody");
    assert_eq!(held.id(), id(&first));

    // No slot: worth another try when there is one.
    loader.prefetch("a");
    let error = only(&loader).result.unwrap_err();
    assert!(error.is_retryable() && matches!(error, LoadError::Pool(PoolError::Full { .. })), "{error}");
    drop(held);
    let loads = source.loads();
    loader.prefetch("a");
    assert!(only(&loader).result.is_ok());
    assert_eq!(lease(&pool, "a").name(), "a");
    assert!(source.loads() <= loads + 1);
}

#[test]
fn a_loader_that_ends_leaves_nothing_half_loaded() {
    let source = Arc::new(Source::new(&[("a", small_adapter(1)), ("b", small_adapter(2))]));
    let (pool, loader) = loader(2, &source, LoaderOptions { num_threads: 1, ..LoaderOptions::default() });
    let empty = pool.snapshot();
    loader.prefetch("a");
    loader.prefetch("b");
    assert!(loader.wait(Duration::from_secs(20)), "a is staged, and not published");
    drop(loader);
    assert_eq!(pool.snapshot(), empty);
    pool.load("a", &small_adapter(3)).unwrap();
}
