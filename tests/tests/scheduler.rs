//! Requests that come and go at any step, over more adapters than there are slots.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use conformance::engines::{back_ends, load_model, named, small_options};
use conformance::golden::model_dir;
use lora_adapter::{Adapter, LoraPair, Matrix, PreparedAdapter, prepare};
use lora_math::scaling::ScalingRule;
use lora_math::{AdapterSelection, ContentDigest, Features, ModelShape, Module, Site, SlotDtype};
use lora_pool::{AdapterSource, Loader, LoaderOptions, LoraPool, PoolOptions, SourceError};
use model_engine::generate::{FinishReason, Generator, Request};
use model_engine::scheduler::{Event, Finished, RequestError, RequestId, Scheduler, SchedulerOptions, SubmitError};
use model_engine::{Engine, EngineError, EngineOptions};

struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) % end as u64) as usize
    }
}

/// A small adapter whose A and B are random, large enough to change what the model says.
fn adapter(shape: &ModelShape, seed: u64) -> PreparedAdapter {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut values =
        |count: usize| -> Vec<f32> { (0..count).map(|_| random.below(201) as f32 / 100.0 - 1.0).collect() };
    let sites = (0..shape.layers().len())
        .flat_map(|layer| [Module::QProj, Module::DownProj].map(|module| Site::layer(layer, module)));
    let pairs = sites.map(|site| {
        let Features { in_features, out_features } = shape.features(site).expect("a site of the model");
        let a = Matrix::from_f32(2, in_features, &values(2 * in_features)).expect("a matrix");
        let b = Matrix::from_f32(out_features, 2, &values(2 * out_features)).expect("a matrix");
        (site, LoraPair::new(a, b, 1.0, ScalingRule::Standard).expect("a pair"))
    });
    prepare(Adapter::from_pairs(pairs).expect("an adapter"), shape).expect("an adapter of the model")
}

/// Adapters whose name is `a` and their seed.
struct Seeds(ModelShape);

impl AdapterSource for Seeds {
    fn load(&self, name: &str) -> Result<PreparedAdapter, SourceError> {
        let seed = name.strip_prefix('a').ok_or("no such adapter")?;
        Ok(adapter(&self.0, seed.parse()?))
    }

    fn num_bytes(&self, _name: &str) -> usize {
        1 << 16
    }
}

fn engine_options() -> EngineOptions {
    let [_, (_, cpu)] = back_ends();
    small_options(1, cpu)
}

fn scheduler_with(num_slots: usize, engine: EngineOptions, options: SchedulerOptions) -> Scheduler {
    let model = load_model(&model_dir("llama"));
    let shape = model.shape().clone();
    let pool_options =
        PoolOptions { num_slots, max_rank: 2, dtype: SlotDtype::F32, host_bytes: 1 << 20, ..PoolOptions::default() };
    let pool = LoraPool::open(&shape, pool_options).expect("a pool");
    let loader = Loader::new(pool.clone(), Arc::new(Seeds(shape)), LoaderOptions::default()).expect("threads");
    Scheduler::new(Engine::new(model, Some(pool), &engine).expect("an engine"), Some(loader), options)
}

fn scheduler(num_slots: usize, options: SchedulerOptions) -> Scheduler {
    scheduler_with(num_slots, engine_options(), options)
}

fn request(selection: AdapterSelection, prompt: &[u32], max_new_tokens: usize) -> Request {
    Request { prompt: prompt.to_vec(), selection, max_new_tokens, ignore_end_tokens: true, ..Request::default() }
}

fn prompt(index: usize) -> Vec<u32> {
    (0..3 + 5 * index % 17).map(|i| ((index * 13 + i * 7) % 127) as u32).collect()
}

/// Tokens and ends of requests.
#[derive(Default)]
struct Told {
    tokens: BTreeMap<RequestId, Vec<u32>>,
    ends: HashMap<RequestId, Result<Finished, RequestError>>,
}

impl Told {
    fn take(&mut self, events: Vec<Event>) {
        for event in events {
            match event {
                Event::Token { request, token_id } => {
                    assert!(!self.ends.contains_key(&request), "a token behind the end");
                    self.tokens.entry(request).or_default().push(token_id);
                }
                Event::Finished { request, result } => {
                    assert!(self.ends.insert(request, result).is_none(), "{request} ends twice");
                }
            }
        }
    }

    fn finished(&self, request: RequestId) -> Finished {
        *self.ends[&request].as_ref().expect("an end without an error")
    }
}

fn step(scheduler: &mut Scheduler, told: &mut Told) {
    scheduler.wait(Duration::from_secs(20));
    told.take(scheduler.step().expect("a step"));
}

fn run(scheduler: &mut Scheduler, told: &mut Told) {
    let mut steps = 0;
    while !scheduler.is_idle() {
        step(scheduler, told);
        steps += 1;
        assert!(steps < 20_000, "{scheduler:?} does not come to an end");
    }
}

/// What a request gives when it has an engine to itself.
fn alone(prompt: &[u32], adapter_of: Option<u64>, max_new_tokens: usize) -> Vec<u32> {
    let model = load_model(&model_dir("llama"));
    let shape = model.shape().clone();
    let options = PoolOptions { num_slots: 1, max_rank: 2, dtype: SlotDtype::F32, ..PoolOptions::default() };
    let pool = LoraPool::open(&shape, options).expect("a pool");
    let selection = match adapter_of {
        Some(seed) => {
            pool.load("it", &adapter(&shape, seed)).expect("a load");
            named("it")
        }
        None => AdapterSelection::Base,
    };
    let mut engine = Engine::new(model, Some(pool), &engine_options()).expect("an engine");
    let report = Generator::new(&mut engine, None).run(&[request(selection, prompt, max_new_tokens)], |_| {});
    report.expect("a run").completions.remove(0).token_ids
}

/// Memory of this process that is in use, where the system tells.
fn resident_bytes() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    Some(text.split_whitespace().nth(1)?.parse::<usize>().ok()? * 4096)
}

fn assert_nothing_is_left(scheduler: &Scheduler) {
    let engine = scheduler.engine();
    let usage = engine.kv_usage();
    assert_eq!(usage.free_blocks, usage.num_blocks);
    assert_eq!(engine.sequences().count(), 0);
    assert_eq!(engine.pool().expect("a pool").snapshot().num_leases(), 0);
}

#[test]
fn every_request_gives_what_it_gives_alone() {
    for max_prefill_rows in [1, 7, 512] {
        let options = SchedulerOptions { max_prefill_rows, max_running: 6, ..SchedulerOptions::default() };
        let mut scheduler = scheduler(2, options);
        let mut told = Told::default();
        let mut expected = Vec::new();
        for index in 0..14usize {
            // Ten adapters over two slots, base between, some twice.
            let seed = (index % 4 != 3).then_some((index % 10) as u64);
            let selection = seed.map_or(AdapterSelection::Base, |seed| named(&format!("a{seed}")));
            let id = scheduler.submit(request(selection, &prompt(index), 4 + index % 5)).expect("a request");
            expected.push((id, index, seed));
            // They come while others run.
            if index % 3 == 0 {
                step(&mut scheduler, &mut told);
            }
        }
        run(&mut scheduler, &mut told);
        for (id, index, seed) in expected {
            assert_eq!(told.tokens[&id], alone(&prompt(index), seed, 4 + index % 5), "request {index}");
            let finished = told.finished(id);
            assert_eq!(finished.reason, FinishReason::MaxNewTokens);
            assert_eq!((finished.prompt_tokens, finished.new_tokens), (prompt(index).len(), 4 + index % 5));
            let shape = scheduler.engine().model().shape();
            assert_eq!(finished.adapter.map(|id| id.content), seed.map(|seed| adapter(shape, seed).content()));
        }
        assert_nothing_is_left(&scheduler);
    }
}

#[test]
fn nobody_waits_for_ever_behind_a_busy_adapter() {
    let options = SchedulerOptions { max_bypasses: 5, ..SchedulerOptions::default() };
    let mut scheduler = scheduler(1, options);
    let mut told = Told::default();
    let hot = |scheduler: &mut Scheduler| scheduler.submit(request(named("a0"), &[1, 2, 3], 4)).expect("a request");
    hot(&mut scheduler);
    while scheduler.num_running() == 0 {
        step(&mut scheduler, &mut told);
    }
    let cold = scheduler.submit(request(named("a1"), &[4, 5], 3)).expect("a request");
    let mut bases = Vec::new();
    // Two requests a step for the adapter in the only slot: without a bound it would never fall free.
    for round in 0..200 {
        hot(&mut scheduler);
        hot(&mut scheduler);
        bases.push(scheduler.submit(request(AdapterSelection::Base, &[7], 2)).expect("a request"));
        step(&mut scheduler, &mut told);
        if told.ends.contains_key(&cold) {
            assert!(round > 2, "it had to wait for the slot");
            break;
        }
    }
    assert!(told.ends.contains_key(&cold), "starved");
    assert_eq!(told.finished(cold).bypasses, 5, "{:?}", told.finished(cold));
    assert_eq!(told.tokens[&cold], alone(&[4, 5], Some(1), 3));
    run(&mut scheduler, &mut told);
    for base in bases {
        assert!(told.finished(base).steps_waited <= 1, "base requests wait for no slot: {:?}", told.finished(base));
    }
    assert_nothing_is_left(&scheduler);
}

#[test]
fn nobody_waits_for_ever_for_room_in_the_cache() {
    let options = SchedulerOptions { max_bypasses: 3, ..SchedulerOptions::default() };
    let mut scheduler = scheduler_with(1, EngineOptions { kv_tokens: 64, ..engine_options() }, options);
    let mut told = Told::default();
    let small =
        |scheduler: &mut Scheduler| scheduler.submit(request(AdapterSelection::Base, &[1, 2], 6)).expect("a request");
    small(&mut scheduler);
    step(&mut scheduler, &mut told);
    // All four blocks.
    let large = scheduler.submit(request(AdapterSelection::Base, &[9; 40], 20)).expect("a request");
    for _ in 0..100 {
        small(&mut scheduler);
        step(&mut scheduler, &mut told);
        if told.ends.contains_key(&large) {
            break;
        }
    }
    assert_eq!(told.finished(large).bypasses, 3);
    run(&mut scheduler, &mut told);
    assert_nothing_is_left(&scheduler);
}

#[test]
fn what_could_never_run_is_refused_and_what_fails_fails_alone() {
    let mut scheduler =
        scheduler_with(2, EngineOptions { kv_tokens: 32, max_context: Some(30), ..engine_options() }, {
            SchedulerOptions::default()
        });
    let base = AdapterSelection::Base;
    let mut refused = |request: Request| scheduler.submit(request).expect_err("a refusal");
    assert_eq!(refused(request(base.clone(), &[], 1)), SubmitError::EmptyPrompt);
    assert_eq!(
        refused(request(base.clone(), &[1; 31], 1)),
        SubmitError::PromptTooLong { prompt_tokens: 31, max_context: 30 }
    );
    assert_eq!(
        refused(request(base.clone(), &[1, 128], 1)),
        SubmitError::TokenOutOfRange { index: 1, token_id: 128, vocab_size: 128 }
    );
    let cold = Request { temperature: -1.0, ..request(base.clone(), &[1], 1) };
    assert_eq!(refused(cold), SubmitError::Temperature { temperature: -1.0 });

    let mut told = Told::default();
    let unknown = [1, 2].map(|token| scheduler.submit(request(named("nobody"), &[token], 3)).expect("a request"));
    let good = scheduler.submit(request(named("a3"), &[1, 2], 3)).expect("a request");
    let to_the_end = scheduler.submit(request(base.clone(), &[5; 28], 9)).expect("a request");
    let nothing = scheduler.submit(request(base, &[5; 3], 0)).expect("a request");
    run(&mut scheduler, &mut told);
    for id in unknown {
        let Err(RequestError::Load { adapter, reason }) = &told.ends[&id] else { panic!("{:?}", told.ends[&id]) };
        assert!(adapter == "nobody" && reason.contains("no such adapter"), "{reason}");
    }
    assert_eq!(told.tokens[&good], alone(&[1, 2], Some(3), 3));
    assert_eq!((told.finished(to_the_end).reason, told.tokens[&to_the_end].len()), (FinishReason::ContextFull, 3));
    assert_eq!((told.finished(nothing).new_tokens, told.tokens.get(&nothing)), (0, None));
    assert_nothing_is_left(&scheduler);

    // Without a loader an adapter that is not resident is an error at once.
    let model = load_model(&model_dir("llama"));
    let pool = LoraPool::open(model.shape(), PoolOptions::default()).expect("a pool");
    let engine = Engine::new(model, Some(pool), &engine_options()).expect("an engine");
    let mut scheduler = Scheduler::new(engine, None, SchedulerOptions::default());
    let id = scheduler.submit(request(named("a1"), &[1], 1)).expect("a request");
    let mut told = Told::default();
    run(&mut scheduler, &mut told);
    assert!(matches!(told.ends[&id], Err(RequestError::Engine(EngineError::Pool(_)))));
}

#[test]
fn a_cancelled_request_leaves_nothing_at_any_stage() {
    for steps in 0..8 {
        let mut scheduler = scheduler(1, SchedulerOptions { max_prefill_rows: 4, ..SchedulerOptions::default() });
        let mut told = Told::default();
        let first = scheduler.submit(request(named("a1"), &[3; 10], 6)).expect("a request");
        let second = scheduler.submit(request(named("a2"), &[4; 3], 6)).expect("a request");
        for _ in 0..steps {
            step(&mut scheduler, &mut told);
        }
        let was_there = !told.ends.contains_key(&first);
        assert_eq!(scheduler.cancel(first), was_there);
        assert!(!scheduler.cancel(first));
        run(&mut scheduler, &mut told);
        if was_there {
            assert_eq!(told.ends[&first], Err(RequestError::Cancelled));
        }
        assert_eq!(told.tokens[&second], alone(&[4; 3], Some(2), 6));
        assert_nothing_is_left(&scheduler);
    }
}

#[test]
fn thousands_of_steps_with_loads_replacements_and_cancellations_mix_nothing_up() {
    let options = SchedulerOptions { max_running: 8, max_prefill_rows: 9, max_bypasses: 4 };
    let mut scheduler = scheduler(4, options);
    let shape = scheduler.engine().model().shape().clone();
    let pool = scheduler.engine().pool().expect("a pool").clone();
    let (mut random, mut told) = (Random(5), Told::default());
    let mut open: Vec<RequestId> = Vec::new();
    let mut asked: HashMap<RequestId, (usize, usize)> = HashMap::new();
    let mut resident = None;
    for round in 0..10_000 {
        // Everything has had its largest size by then.
        if round == 3000 {
            resident = resident_bytes();
        }
        if scheduler.num_waiting() < 12 {
            let selection = match random.below(5) {
                0 => AdapterSelection::Base,
                _ => named(&format!("a{}", random.below(40))),
            };
            let (index, max_new_tokens) = (random.below(6), 1 + random.below(6));
            let id = scheduler.submit(request(selection, &prompt(index), max_new_tokens)).expect("a request");
            asked.insert(id, (index, max_new_tokens));
            open.push(id);
        }
        match random.below(12) {
            0 if !open.is_empty() => {
                scheduler.cancel(open.swap_remove(random.below(open.len())));
            }
            // A name moves to another adapter's contents, while requests use it.
            1 => {
                let (name, seed) = (format!("a{}", random.below(40)), random.below(40) as u64);
                let replaced = pool.replace(&name, &adapter(&shape, seed), None);
                assert!(
                    replaced.is_ok() || replaced.as_ref().is_err_and(lora_pool::PoolError::is_retryable),
                    "{replaced:?}"
                );
            }
            2 => {
                // In use, under way, or not there: what it says is of no interest here.
                let _ = pool.evict(&format!("a{}", random.below(40)));
            }
            _ => {}
        }
        told.take(scheduler.step().expect("a step"));
    }
    run(&mut scheduler, &mut told);
    assert_nothing_is_left(&scheduler);
    if let (Some(before), Some(after)) = (resident, resident_bytes()) {
        // What the test itself keeps of thousands of answers is a few of these.
        assert!(after < before + (24 << 20), "{before} bytes were resident after 3,000 steps, {after} after 10,000");
    }

    // Whatever a request was given, it is what the generation that it names gives alone.
    let contents: HashMap<ContentDigest, u64> = (0..40).map(|seed| (adapter(&shape, seed).content(), seed)).collect();
    let mut known: HashMap<(Option<u64>, usize), Vec<u32>> = HashMap::new();
    let mut checked = 0;
    for (id, end) in &told.ends {
        let Ok(finished) = end else {
            assert_eq!(end, &Err(RequestError::Cancelled));
            continue;
        };
        let seed = finished.adapter.map(|id| contents[&id.content]);
        let (index, max_new_tokens) = asked[id];
        let expected = known.entry((seed, index)).or_insert_with(|| alone(&prompt(index), seed, 6));
        assert_eq!(told.tokens[id], expected[..max_new_tokens], "{id}");
        assert!(finished.bypasses <= 4, "{finished:?}");
        checked += 1;
    }
    assert!(checked > 1000, "{checked} requests came to an end");
    // Prompts repeat, and the longer ones have a whole block.
    let cached = told.ends.values().flatten().filter(|finished| finished.cached_tokens > 0).count();
    assert!(cached > 20, "{cached} requests found a part of their prompt");
}
