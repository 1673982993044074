//! What the engine refuses, and that a refusal changes nothing.

use conformance::engines::{
    back_ends, bits, golden_engine, load_adapter, load_model, load_prepared, named, open_pool, small_options,
};
use conformance::golden::{adapter_dir, model_dir};
use lora_adapter::{Adapter, BaseWeights, PrepareOptions, prepare_with};
use lora_math::selection::SelectionError;
use lora_math::{AdapterSelection, ModelShape, NormSite, Site, SlotId};
use lora_pool::PoolError;
use model_engine::{Engine, EngineError, EngineOptions, LogitsFor, SequenceId, StepInput, TransformerModel};

fn options() -> EngineOptions {
    let [_, (_, kernels)] = back_ends();
    small_options(1, kernels)
}

fn input(sequence: SequenceId, token_ids: &[u32]) -> StepInput<'_> {
    StepInput { sequence, token_ids, logits: LogitsFor::Last }
}

fn step(engine: &mut Engine, sequence: SequenceId, token_ids: &[u32]) -> Result<Vec<Vec<u32>>, EngineError> {
    let output = engine.step(&[input(sequence, token_ids)])?;
    Ok(bits(&[output.logits(0).last().expect("a row").to_vec()]))
}

#[test]
fn a_full_cache_refuses_before_anything_changes_and_serves_again_after() {
    let mut engine = golden_engine("llama", &["qv"], &EngineOptions { kv_tokens: 48, ..options() });
    let tokens: Vec<u32> = (0..40).collect();
    let expected = {
        let sequence = engine.add_sequence(&named("qv")).unwrap();
        let logits = (step(&mut engine, sequence, &tokens[..20]), step(&mut engine, sequence, &tokens[20..25]));
        engine.finish(sequence).unwrap();
        logits
    };
    let (first, second) = (engine.add_sequence(&named("qv")).unwrap(), engine.add_sequence(&named("qv")).unwrap());
    assert_eq!(step(&mut engine, first, &tokens[..20]), expected.0);
    // One block is free. The second input alone would not fit; with it the whole step is refused.
    let error = engine.step(&[input(first, &tokens[20..25]), input(second, &tokens[..17])]).unwrap_err();
    assert_eq!(error, EngineError::KvFull { needed_blocks: 2, free_blocks: 1, num_blocks: 3 });
    assert!(error.is_retryable());
    assert_eq!((engine.sequence_length(first), engine.sequence_length(second)), (Ok(20), Ok(0)));
    assert_eq!(engine.kv_usage().free_blocks, 1);
    assert_eq!(step(&mut engine, first, &tokens[20..25]), expected.1);
    engine.finish(first).unwrap();
    assert_eq!(engine.kv_usage().free_blocks, 3);
    assert_eq!(step(&mut engine, second, &tokens[..20]), expected.0);
    // What no amount of waiting helps is not retryable.
    engine.finish(second).unwrap();
    let long = golden_engine("llama", &[], &EngineOptions { kv_tokens: 16, max_context: Some(64), ..options() });
    assert_eq!(long.max_context(), 16);
}

#[test]
fn bad_inputs_are_refused_by_name_and_change_nothing() {
    let mut engine = golden_engine("llama", &["qv"], &EngineOptions { max_step_rows: 32, ..options() });
    let mut fresh = golden_engine("llama", &["qv"], &options());
    let (good, other) = (engine.add_sequence(&named("qv")).unwrap(), engine.add_sequence(&named("qv")).unwrap());
    let gone = engine.add_sequence(&AdapterSelection::Base).unwrap();
    engine.finish(gone).unwrap();
    assert_eq!(engine.finish(gone), Err(EngineError::UnknownSequence { sequence: gone }));

    let free_blocks = engine.kv_usage().free_blocks;
    let long = [1; 33];
    let max_context = engine.max_context();
    assert_eq!(max_context, 256);
    let cases: [(Vec<StepInput<'_>>, EngineError); 6] = [
        (vec![], EngineError::EmptyStep),
        (vec![input(good, &[1]), input(gone, &[1])], EngineError::UnknownSequence { sequence: gone }),
        (
            vec![input(good, &[1]), input(other, &[1]), input(good, &[2])],
            EngineError::DuplicateSequence { sequence: good },
        ),
        (vec![input(good, &[1]), input(other, &[])], EngineError::EmptyInput { sequence: other }),
        (
            vec![input(good, &[1]), input(other, &[5, 128])],
            EngineError::TokenOutOfRange { sequence: other, index: 1, token_id: 128, vocab_size: 128 },
        ),
        (vec![input(good, &[1]), input(other, &long)], EngineError::TooManyRows { rows: 34, max_rows: 32 }),
    ];
    for (inputs, expected) in cases {
        assert_eq!(engine.step(&inputs).map(|_| ()), Err(expected));
    }
    assert_eq!(engine.kv_usage().free_blocks, free_blocks);
    let sequence = fresh.add_sequence(&named("qv")).unwrap();
    assert_eq!(step(&mut engine, good, &[3, 1, 4]), step(&mut fresh, sequence, &[3, 1, 4]));
}

#[test]
fn a_sequence_ends_at_the_context() {
    let mut engine = golden_engine("llama", &[], &EngineOptions { max_context: Some(10), ..options() });
    let sequence = engine.add_sequence(&AdapterSelection::Base).unwrap();
    step(&mut engine, sequence, &[1; 8]).unwrap();
    let full = |added| EngineError::ContextFull { sequence, length: 8, added, max_context: 10 };
    assert_eq!(step(&mut engine, sequence, &[1; 3]), Err(full(3)));
    step(&mut engine, sequence, &[1; 2]).unwrap();
    assert!(matches!(step(&mut engine, sequence, &[1]), Err(EngineError::ContextFull { length: 10, .. })));
}

#[test]
fn without_a_pool_only_the_base_is_served() {
    let mut engine = golden_engine("llama", &[], &options());
    let base = engine.add_sequence(&AdapterSelection::Base).unwrap();
    let active = engine.add_sequence(&AdapterSelection::Active).unwrap();
    assert_eq!(step(&mut engine, base, &[1, 2]), step(&mut engine, active, &[1, 2]));
    for selection in [named("qv"), AdapterSelection::Slot(SlotId::new(0))] {
        let error = engine.add_sequence(&selection).unwrap_err();
        assert!(matches!(error, EngineError::Selection(SelectionError::NoPool { .. })), "{error}");
    }
}

#[test]
fn with_a_pool_unknown_adapters_are_refused_and_active_is_what_the_pool_says() {
    let mut engine = golden_engine("llama", &["qv", "rslora"], &options());
    let error = engine.add_sequence(&named("nobody")).unwrap_err();
    assert!(matches!(error, EngineError::Pool(PoolError::Selection(SelectionError::UnknownName { .. }))), "{error}");
    assert!(engine.add_sequence(&AdapterSelection::Slot(SlotId::new(9))).is_err());

    let pool = engine.pool().unwrap().clone();
    let mut run = |selection: &AdapterSelection| {
        let sequence = engine.add_sequence(selection).unwrap();
        let logits = step(&mut engine, sequence, &[7, 8, 9]).unwrap();
        engine.finish(sequence).unwrap();
        logits
    };
    let base = run(&AdapterSelection::Base);
    assert_eq!(run(&AdapterSelection::Active), base);
    pool.set_active("rslora").unwrap();
    assert_eq!(run(&AdapterSelection::Active), run(&named("rslora")));
    assert_ne!(run(&AdapterSelection::Active), base);
    pool.clear_active();
    assert_eq!(run(&AdapterSelection::Active), base);
}

#[test]
fn a_running_sequence_keeps_its_adapter_from_first_to_last_token() {
    let [_, (_, kernels)] = back_ends();
    let model = load_model(&model_dir("llama"));
    let adapter = |case: &str| load_adapter("llama", case, model.shape()).expect("served");
    let (qv, rslora) = (adapter("qv"), adapter("rslora"));
    let pool = open_pool(model.shape(), &[("qv".to_owned(), qv), ("rslora".to_owned(), rslora.clone())]);
    let mut engine = Engine::new(model, Some(pool.clone()), &small_options(1, kernels)).unwrap();
    let run = |engine: &mut Engine, between: &dyn Fn()| {
        let sequence = engine.add_sequence(&AdapterSelection::Active).unwrap();
        let first = step(engine, sequence, &[1, 2, 3]).unwrap();
        between();
        let second = step(engine, sequence, &[4]).unwrap();
        engine.finish(sequence).unwrap();
        (first, second)
    };
    pool.set_active("qv").unwrap();
    let expected = run(&mut engine, &|| ());
    let disturbed = run(&mut engine, &|| {
        // The name of the active adapter moves, and the slot in use can neither be evicted nor taken.
        pool.set_active("rslora").unwrap();
        assert!(matches!(pool.evict("qv"), Err(PoolError::InUse { num_leases: 1, .. })));
        assert!(pool.load("third", &rslora).is_err());
    });
    assert_eq!(disturbed, expected);
    // With the sequence the lease is gone; so it is with the engine.
    pool.evict("qv").unwrap();
    pool.load("third", &rslora).unwrap();
    let _running = engine.add_sequence(&named("third")).unwrap();
    assert_eq!(pool.snapshot().num_leases(), 1);
    drop(engine);
    assert_eq!(pool.snapshot().num_leases(), 0);
}

/// The name moves to other weights between two tokens, and then away: the sequence does not notice, and one that begins
/// later gets what the name means then.
#[test]
fn a_replaced_or_unloaded_adapter_stays_with_the_sequences_that_have_it() {
    for (_, kernels) in back_ends() {
        let model = load_model(&model_dir("llama"));
        // Pairs, a norm and gains of its own: all of it moves with the generation.
        let adapter = |case: &str| load_prepared("llama", case, &model).expect("served");
        let (old, new) = (adapter("mts_norm"), adapter("dora"));
        let alone = |engine: &mut Engine, name: &str| {
            let sequence = engine.add_sequence(&named(name)).unwrap();
            let logits = [step(engine, sequence, &[1, 2, 3]).unwrap(), step(engine, sequence, &[4]).unwrap()];
            engine.finish(sequence).unwrap();
            logits
        };
        let pool = open_pool(model.shape(), &[("a".to_owned(), old.clone()), ("new".to_owned(), new.clone())]);
        let mut engine = Engine::new(model, Some(pool.clone()), &small_options(2, kernels)).unwrap();
        let (expected_old, expected_new) = (alone(&mut engine, "a"), alone(&mut engine, "new"));
        assert_ne!(expected_old, expected_new);
        pool.evict("new").unwrap();

        let running = engine.add_sequence(&named("a")).unwrap();
        assert_eq!(step(&mut engine, running, &[1, 2, 3]).unwrap(), expected_old[0]);
        pool.replace("a", &new, None).unwrap();
        assert_eq!(alone(&mut engine, "a"), expected_new);
        let unloading = pool.unload("a").unwrap();
        assert!(engine.add_sequence(&named("a")).is_err());
        assert!(unloading.is_done(), "nobody has the new one any more");
        assert_eq!(step(&mut engine, running, &[4]).unwrap(), expected_old[1]);
        assert_eq!(pool.snapshot().num_free, 1, "the old one is still in use");
        engine.finish(running).unwrap();
        assert_eq!((pool.snapshot().num_free, pool.snapshot().num_leases()), (2, 0));
    }
}

#[test]
fn a_pool_of_another_model_is_refused() {
    let llama = load_model(&model_dir("llama"));
    let qwen3 = load_model(&model_dir("qwen3"));
    let pool = open_pool(qwen3.shape(), &[]);
    let error = Engine::new(llama, Some(pool), &options()).unwrap_err();
    assert!(matches!(error, EngineError::PoolShape { .. }), "{error}");
    for (option, options) in [
        ("max_step_rows", EngineOptions { max_step_rows: 0, ..options() }),
        ("kv_tokens", EngineOptions { kv_tokens: 0, ..options() }),
        ("kv_tokens", EngineOptions { kv_tokens: usize::MAX, ..options() }),
        ("max_context", EngineOptions { max_context: Some(0), ..options() }),
    ] {
        let error = Engine::new(load_model(&model_dir("llama")), None, &options).unwrap_err();
        assert!(matches!(error, EngineError::Option { option: found, .. } if found == option), "{error}");
    }
}

/// A base that has everything of another, and norms of the heads besides.
struct WithHeadNorms<'a>(&'a TransformerModel);

impl BaseWeights for WithHeadNorms<'_> {
    fn shape(&self) -> &ModelShape {
        self.0.shape()
    }

    fn is_tied(&self) -> bool {
        self.0.is_tied()
    }

    fn read_rows(&self, site: Site, first_row: usize, rows: &mut [f32]) -> bool {
        self.0.read_rows(site, first_row, rows)
    }

    fn bias(&self, site: Site) -> Option<Vec<f32>> {
        self.0.bias(site)
    }

    fn norm(&self, site: NormSite) -> Option<Vec<f32>> {
        self.0.norm(site).or_else(|| Some(vec![1.0; 64]))
    }
}

/// Pairs alone do not tell two models apart: an adapter whose norms have no place here is refused before its first token.
#[test]
fn norms_of_another_model_are_refused_and_leave_no_lease() {
    let model = load_model(&model_dir("llama"));
    let directory = tempfile::tempdir().expect("a directory");
    let case = adapter_dir("llama", "mts_norm");
    std::fs::copy(case.join("adapter_config.json"), directory.path().join("adapter_config.json")).expect("a copy");
    // One norm of a layer becomes a norm over the heads of q.
    let bytes = std::fs::read(case.join("adapter_model.safetensors")).expect("tensors");
    let header_end = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    let header = std::str::from_utf8(&bytes[8..header_end]).expect("a header");
    let header = header.replace("layers.0.input_layernorm", "layers.0.self_attn.q_norm");
    let length = (header.len() as u64).to_le_bytes();
    let file = [&length, header.as_bytes(), &bytes[header_end..]].concat();
    std::fs::write(directory.path().join("adapter_model.safetensors"), file).expect("a file");

    let adapter = Adapter::open(directory.path()).expect("an adapter");
    let prepared = prepare_with(adapter, &WithHeadNorms(&model), &PrepareOptions::default()).expect("fits that model");
    let pool = open_pool(model.shape(), &[("a".to_owned(), prepared)]);
    let mut engine = Engine::new(model, Some(pool.clone()), &options()).expect("an engine");
    let error = engine.add_sequence(&named("a")).unwrap_err();
    let place = "layer 0 q_norm".to_owned();
    assert_eq!(error, EngineError::VectorPlace { place, expected: None, found: 64 });
    assert!(!error.is_retryable());
    assert_eq!((pool.snapshot().num_leases(), engine.sequences().count()), (0, 0));
}
