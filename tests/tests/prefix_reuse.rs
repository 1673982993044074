//! Blocks of the KV cache that sequences share: to the same bits, and never across adapters, contents, salts or tokens.

use conformance::engines::{
    back_ends, bits, golden_engine, load_model, load_prepared, named, run_in_chunks, small_options,
};
use conformance::golden::model_dir;
use lora_math::AdapterSelection;
use model_engine::{Engine, EngineError, EngineOptions, LogitsFor, SequenceId, SequenceOptions, StepInput};

fn options() -> EngineOptions {
    let [_, (_, kernels)] = back_ends();
    small_options(1, kernels)
}

fn tokens(seed: u32, count: u32) -> Vec<u32> {
    (0..count).map(|at| (at * 11 + seed * 31 + 3) % 128).collect()
}

fn add(engine: &mut Engine, selection: &AdapterSelection, salt: &[u8]) -> SequenceId {
    let options = SequenceOptions { selection: selection.clone(), salt: salt.to_vec(), ..SequenceOptions::default() };
    engine.add_sequence_with(&options).expect("a sequence")
}

/// Logits of every token behind what the cache had, and how many tokens it had.
fn run(engine: &mut Engine, selection: &AdapterSelection, salt: &[u8], token_ids: &[u32]) -> (usize, Vec<Vec<u32>>) {
    let sequence = add(engine, selection, salt);
    let cached = engine.reuse_prefix(sequence, token_ids).expect("an empty sequence");
    let logits = bits(&run_in_chunks(engine, sequence, &token_ids[cached..], 5));
    engine.finish(sequence).expect("a sequence");
    (cached, logits)
}

#[test]
fn a_second_request_goes_on_behind_the_first_to_the_same_bits() {
    let mut engine = golden_engine("llama", &["qv", "dora", "all_linear"], &options());
    for selection in [AdapterSelection::Base, named("qv"), named("dora"), named("all_linear")] {
        let first = tokens(1, 45);
        let (cached, alone) = run(&mut engine, &selection, b"", &first);
        assert_eq!(cached, 0, "{selection:?}: nothing is there yet");
        let (cached, again) = run(&mut engine, &selection, b"", &first);
        assert_eq!(cached, 32);
        assert_eq!(again, alone[32..]);
        // The last token is always left to be computed.
        let (cached, again) = run(&mut engine, &selection, b"", &first[..32]);
        assert_eq!((cached, &again[..]), (16, &alone[16..32]));
        // Another request that begins in the same way.
        let mut other = first[..20].to_vec();
        other.extend(tokens(7, 20));
        let mut fresh = golden_engine("llama", &["qv", "dora", "all_linear"], &options());
        let (_, expected) = run(&mut fresh, &selection, b"", &other);
        let (cached, found) = run(&mut engine, &selection, b"", &other);
        assert_eq!((cached, &found[..]), (16, &expected[16..]));
    }
}

#[test]
fn nothing_is_shared_that_differs_in_any_part() {
    let mut engine = golden_engine("llama", &["qv", "dora"], &options());
    let prompt = tokens(3, 40);
    run(&mut engine, &named("qv"), b"", &prompt);
    let cached = |engine: &mut Engine, selection: &AdapterSelection, salt: &[u8], prompt: &[u32]| {
        run(engine, selection, salt, prompt).0
    };
    assert_eq!(cached(&mut engine, &AdapterSelection::Base, b"", &prompt), 0);
    assert_eq!(cached(&mut engine, &named("dora"), b"", &prompt), 0);
    assert_eq!(cached(&mut engine, &named("qv"), b"tenant", &prompt), 0);
    let mut changed = prompt.clone();
    changed[0] += 1;
    assert_eq!(cached(&mut engine, &named("qv"), b"", &changed), 0);
    changed = prompt.clone();
    changed[17] += 1;
    assert_eq!(cached(&mut engine, &named("qv"), b"", &changed), 16, "the first block is the same");
    assert_eq!(cached(&mut engine, &named("qv"), b"tenant", &prompt), 32, "the tenant's own");

    // Other contents under the name share nothing; the same contents again, in another generation, do.
    let model = load_model(&model_dir("llama"));
    let pool = engine.pool().expect("a pool").clone();
    let before = load_prepared("llama", "qv", &model).expect("an adapter");
    let after = load_prepared("llama", "rank_1", &model).expect("an adapter");
    pool.evict("dora").expect("an eviction");
    pool.replace("qv", &after, None).expect("a replacement");
    assert_eq!(cached(&mut engine, &named("qv"), b"", &prompt), 0);
    pool.replace("qv", &before, None).expect("a replacement");
    assert_eq!(cached(&mut engine, &named("qv"), b"", &prompt), 32);
}

#[test]
fn a_failed_or_unfinished_step_shares_nothing_and_misuse_is_refused() {
    let mut engine = golden_engine("llama", &[], &EngineOptions { kv_tokens: 64, ..options() });
    let prompt = tokens(5, 40);
    let base = AdapterSelection::Base;
    let first = add(&mut engine, &base, b"");
    let step = |engine: &mut Engine, sequence, token_ids: &[u32]| {
        engine.step(&[StepInput { sequence, token_ids, logits: LogitsFor::None }]).map(|_| ())
    };
    step(&mut engine, first, &prompt[..20]).expect("a step");
    // Only one block is whole.
    let second = add(&mut engine, &base, b"");
    assert_eq!(engine.reuse_prefix(second, &prompt), Ok(16));
    assert_eq!(engine.reuse_prefix(second, &prompt), Err(EngineError::NotEmpty { sequence: second, length: 16 }));
    // Both go on, and do not disturb each other.
    step(&mut engine, second, &prompt[16..]).expect("a step");
    step(&mut engine, first, &tokens(9, 10)).expect("a step");
    assert_eq!(engine.sequence_length(first), Ok(30));
    let usage = engine.kv_usage();
    assert_eq!(usage.free_blocks, 0, "two blocks each, one of them shared, and one more: {usage:?}");
    engine.finish(first).expect("a sequence");
    let third = add(&mut engine, &base, b"");
    assert_eq!(engine.reuse_prefix(third, &prompt), Ok(32));
    engine.finish(second).expect("a sequence");
    engine.finish(third).expect("a sequence");
    assert_eq!(engine.kv_usage().free_blocks, engine.kv_usage().num_blocks);
    let gone = engine.reuse_prefix(third, &prompt);
    assert_eq!(gone, Err(EngineError::UnknownSequence { sequence: third }));
}

#[test]
fn kept_blocks_give_way_and_results_stay() {
    // Room for four blocks: each prompt drives out what is kept of the others.
    let mut engine = golden_engine("llama", &[], &EngineOptions { kv_tokens: 64, ..options() });
    let mut fresh = golden_engine("llama", &[], &options());
    let base = AdapterSelection::Base;
    for round in 0..6u32 {
        for seed in [1, 2, 1, 3] {
            let prompt = tokens(seed, 50);
            let (cached, found) = run(&mut engine, &base, b"", &prompt);
            let (reused, expected) = run(&mut fresh, &base, &round.to_le_bytes(), &prompt);
            let skip = cached.max(reused);
            assert_eq!(found[skip - cached..], expected[skip - reused..]);
        }
    }
}
