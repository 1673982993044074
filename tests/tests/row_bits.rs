//! A row's logits are the same to the bit whatever shares its step: batch mates, their order, the cut of its prompt into
//! steps, the number of threads, the slot of its adapter.

use std::sync::Arc;

use conformance::engines::{
    back_ends, bits, golden_engine, load_adapter, load_model, named, open_pool, run_in_chunks, small_options,
};
use conformance::golden::model_dir;
use lora_kernels::LoraKernels;
use lora_math::{AdapterSelection, Module, ModuleSet, SlotDtype};
use lora_pool::{LoraPool, PoolOptions};
use model_engine::score::{ScoreRequest, score};
use model_engine::{Engine, EngineOptions, LogitsFor, StepInput};

/// Of every kind: pairs of other ranks, gains, norms, shifts, pairs of embedding and head.
const ADAPTERS: [&str; 7] = ["patterns", "dora_emb", "mts_norm", "embed_head_lora", "rslora", "lora_bias", "kasa"];

/// Sequences of unequal lengths, several longer than a block of the KV cache, under every adapter and none.
fn sequences() -> Vec<(AdapterSelection, Vec<u32>)> {
    let lengths = [40, 3, 17, 16, 33, 1, 29, 8];
    let selection = |index: usize| ADAPTERS.get(index % 8).map_or(AdapterSelection::Base, |name| named(name));
    let tokens = |index: usize, length: usize| (0..length).map(move |at| ((at * 37 + index * 11 + 5) % 128) as u32);
    lengths.iter().enumerate().map(|(index, length)| (selection(index), tokens(index, *length).collect())).collect()
}

fn engine(num_threads: usize, kernels: Arc<dyn LoraKernels>) -> Engine {
    golden_engine("llama", &ADAPTERS, &small_options(num_threads, kernels))
}

/// Every sequence alone in its engine's steps, the whole prompt at once.
fn alone(engine: &mut Engine) -> Vec<Vec<Vec<u32>>> {
    let run = |(selection, token_ids): (AdapterSelection, Vec<u32>)| {
        let sequence = engine.add_sequence(&selection).expect("a sequence");
        let logits = run_in_chunks(engine, sequence, &token_ids, token_ids.len());
        engine.finish(sequence).expect("running");
        bits(&logits)
    };
    sequences().into_iter().map(run).collect()
}

#[test]
fn bits_do_not_depend_on_batch_mates_or_their_order() {
    for (back_end, kernels) in back_ends() {
        let mut engine = engine(2, kernels);
        let expected = alone(&mut engine);
        let sequences = sequences();
        for order in [[0, 1, 2, 3, 4, 5, 6, 7], [5, 2, 7, 0, 3, 6, 1, 4]] {
            for by_decode in [false, true] {
                let requests: Vec<ScoreRequest> = order
                    .iter()
                    .map(|index| {
                        let (selection, tokens) = &sequences[*index];
                        let split = if by_decode { tokens.len().div_ceil(2) } else { tokens.len() };
                        ScoreRequest {
                            selection: selection.clone(),
                            token_ids: tokens[..split].to_vec(),
                            decode: tokens[split..].to_vec(),
                        }
                    })
                    .collect();
                let found = score(&mut engine, &requests).expect("logits");
                for (found, index) in found.iter().zip(order) {
                    assert!(bits(found) == expected[index], "{back_end}: row {index}, decode steps: {by_decode}");
                }
            }
        }
    }
}

/// Adapters that change norms, outputs or the embedding of their own rows leave the base's rows as an engine without any
/// pool computes them.
#[test]
fn base_rows_have_the_bits_of_an_engine_without_adapters() {
    for (back_end, kernels) in back_ends() {
        let mut plain = golden_engine("llama", &[], &small_options(2, kernels.clone()));
        let mut engine = engine(2, kernels);
        let requests: Vec<ScoreRequest> = sequences()
            .into_iter()
            .chain(sequences().into_iter().map(|(_, token_ids)| (AdapterSelection::Base, token_ids)))
            .map(|(selection, token_ids)| ScoreRequest { selection, token_ids, decode: Vec::new() })
            .collect();
        let expected = score(&mut plain, &requests[8..]).expect("logits");
        let found = score(&mut engine, &requests).expect("logits");
        for (index, (found, expected)) in found[8..].iter().zip(&expected).enumerate() {
            assert!(bits(found) == bits(expected), "{back_end}: base row {index}");
        }
    }
}

#[test]
fn bits_do_not_depend_on_chunks_or_threads() {
    for (back_end, kernels) in back_ends() {
        let expected = alone(&mut engine(1, kernels.clone()));
        for num_threads in [1, 2, 3] {
            let mut engine = engine(num_threads, kernels.clone());
            for chunk in [1, 7, 64] {
                for (index, (selection, tokens)) in sequences().into_iter().enumerate() {
                    let sequence = engine.add_sequence(&selection).expect("a sequence");
                    let found = run_in_chunks(&mut engine, sequence, &tokens, chunk);
                    engine.finish(sequence).expect("running");
                    let found = bits(&found);
                    assert!(found == expected[index], "{back_end}: row {index}, {chunk} a step, {num_threads} threads");
                }
            }
        }
    }
}

/// Hundreds of rows in one step: enough work that every product and every row-wise operation is cut over the threads.
#[test]
fn bits_do_not_depend_on_threads_that_share_the_work_of_a_large_step() {
    for (back_end, kernels) in back_ends() {
        let expected = alone(&mut engine(1, kernels.clone()));
        for num_threads in [2, 3] {
            let options =
                EngineOptions { max_step_rows: 1024, kv_tokens: 4096, ..small_options(num_threads, kernels.clone()) };
            let mut engine = golden_engine("llama", &ADAPTERS, &options);
            let request = |(selection, token_ids)| ScoreRequest { selection, token_ids, decode: Vec::new() };
            let requests: Vec<ScoreRequest> = (0..5).flat_map(|_| sequences()).map(request).collect();
            assert!(requests.iter().map(|request| request.token_ids.len()).sum::<usize>() > 700);
            let found = score(&mut engine, &requests).expect("logits");
            for (index, found) in found.iter().enumerate() {
                assert!(bits(found) == expected[index % 8], "{back_end}: row {index}, {num_threads} threads");
            }
        }
    }
}

#[test]
fn steps_bounded_in_rows_cut_prompts_without_changing_bits() {
    let [_, (_, kernels)] = back_ends();
    let expected = alone(&mut engine(1, kernels.clone()));
    let requests: Vec<ScoreRequest> = sequences()
        .into_iter()
        .map(|(selection, token_ids)| ScoreRequest { selection, token_ids, decode: Vec::new() })
        .collect();
    let options = EngineOptions { max_step_rows: 13, ..small_options(2, kernels) };
    let mut engine = golden_engine("llama", &ADAPTERS, &options);
    let found = score(&mut engine, &requests).expect("logits");
    assert!(found.iter().map(|rows| bits(rows)).eq(expected));
}

#[test]
fn a_slot_used_again_gives_the_bits_of_a_fresh_one() {
    let model = || load_model(&model_dir("llama"));
    let shape = model().shape().clone();
    let adapter = |case: &str| load_adapter("llama", case, &shape).expect("served");
    let tokens: Vec<u32> = (0..20).map(|at| at * 5 % 128).collect();
    for (back_end, kernels) in back_ends() {
        let run = |engine: &mut Engine, name: &str| {
            let sequence = engine.add_sequence(&named(name)).expect("a sequence");
            let logits = run_in_chunks(engine, sequence, &tokens, 8);
            engine.finish(sequence).expect("running");
            bits(&logits)
        };
        // One slot: every load evicts the one before. `all_linear` has rank 8 everywhere, the others less at fewer sites.
        let order = ["all_linear", "rank_1", "all_linear", "layers_to_transform", "patterns", "rank_1"];
        let pool = open_pool(&shape, &[("first".to_owned(), adapter("qv"))]);
        let mut engine =
            Engine::new(model(), Some(pool.clone()), &small_options(1, kernels.clone())).expect("an engine");
        for name in order {
            pool.load(name, &adapter(name)).expect("the slot is idle");
            let fresh = open_pool(&shape, &[(name.to_owned(), adapter(name))]);
            let mut fresh = Engine::new(model(), Some(fresh), &small_options(1, kernels.clone())).expect("an engine");
            let (found, expected) = (run(&mut engine, name), run(&mut fresh, name));
            assert!(found == expected, "{name} on {back_end}");
        }
    }
}

#[test]
fn a_pool_that_covers_some_modules_gives_the_same_bits() {
    let model = || load_model(&model_dir("llama"));
    let shape = model().shape().clone();
    let [_, (_, kernels)] = back_ends();
    let tokens: Vec<u32> = (0..20).collect();
    let covered = [("qv", [Module::QProj, Module::VProj]), ("layers_to_transform", [Module::QProj, Module::UpProj])];
    for (case, modules) in covered {
        let run = |modules: ModuleSet| {
            let options = PoolOptions { modules, dtype: SlotDtype::F32, ..PoolOptions::default() };
            let pool = LoraPool::open(&shape, options).expect("a pool");
            pool.load(case, &load_adapter("llama", case, &shape).expect("served")).expect("covered");
            let rejected = pool.load("all", &load_adapter("llama", "all_linear", &shape).expect("served"));
            let mut engine = Engine::new(model(), Some(pool), &small_options(1, kernels.clone())).expect("an engine");
            let sequence = engine.add_sequence(&named(case)).expect("a sequence");
            (bits(&run_in_chunks(&mut engine, sequence, &tokens, 20)), rejected.is_err())
        };
        let (expected, rejected) = run(ModuleSet::DENSE);
        assert!(!rejected);
        assert_eq!(run(modules.into_iter().collect()), (expected, true), "{case}");
    }
}

#[test]
fn logits_asked_for_are_the_rows_of_all_logits() {
    let [_, (_, kernels)] = back_ends();
    let mut engine = engine(2, kernels);
    let sequences = sequences();
    let mut run = |wanted: [LogitsFor; 3]| {
        let ids: Vec<_> = sequences[..3].iter().map(|(selection, _)| engine.add_sequence(selection).unwrap()).collect();
        let inputs: Vec<StepInput<'_>> = (0..3)
            .map(|index| StepInput { sequence: ids[index], token_ids: &sequences[index].1, logits: wanted[index] })
            .collect();
        let output = engine.step(&inputs).expect("a step");
        let found: Vec<Vec<Vec<u32>>> =
            (0..3).map(|index| bits(&output.logits(index).rows().map(<[f32]>::to_vec).collect::<Vec<_>>())).collect();
        ids.into_iter().for_each(|sequence| engine.finish(sequence).unwrap());
        found
    };
    let all = run([LogitsFor::All; 3]);
    let some = run([LogitsFor::Last, LogitsFor::None, LogitsFor::All]);
    assert_eq!(some[0], all[0][39..]);
    assert!(some[1].is_empty());
    assert_eq!(some[2], all[2]);
}
