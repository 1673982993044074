//! Generation on tiny models: batches give what each request gives alone, and end when they must.

use conformance::engines::{back_ends, golden_engine, named, small_options};
use lora_math::AdapterSelection;
use model_engine::generate::{FinishReason, GenerateError, Generator, Report, Request};
use model_engine::score::{ScoreRequest, score};
use model_engine::{Engine, EngineError, EngineOptions, kv_tokens_for};

const ADAPTERS: [&str; 3] = ["all_linear", "patterns", "qv"];

fn engine(options: &EngineOptions) -> Engine {
    golden_engine("llama", &ADAPTERS, options)
}

fn options() -> EngineOptions {
    let [_, (_, kernels)] = back_ends();
    small_options(2, kernels)
}

/// Requests of unequal lengths over all adapters and the base, greedy and drawn.
fn requests() -> Vec<Request> {
    (0..6u32)
        .map(|index| Request {
            prompt: (0..3 + index * 5).map(|at| (at * 13 + index * 29 + 3) % 128).collect(),
            selection: ADAPTERS.get(index as usize % 4).map_or(AdapterSelection::Base, |name| named(name)),
            max_new_tokens: 4 + index as usize * 3,
            temperature: if index % 2 == 0 { 0.0 } else { 0.8 },
            seed: u64::from(index),
            ignore_end_tokens: false,
            ..Request::default()
        })
        .collect()
}

fn run(engine: &mut Engine, requests: &[Request]) -> Report {
    let mut events = vec![Vec::new(); requests.len()];
    let mut reasons = vec![None; requests.len()];
    let report = Generator::new(engine, None)
        .run(requests, |event| {
            assert_eq!(reasons[event.request], None, "a token after the last");
            events[event.request].push(event.token_id);
            reasons[event.request] = event.finished;
        })
        .expect("generated");
    for (index, completion) in report.completions.iter().enumerate() {
        assert_eq!(completion.token_ids, events[index]);
        assert_eq!(Some(completion.finished), reasons[index]);
    }
    assert_eq!(engine.sequences().count(), 0);
    let usage = engine.kv_usage();
    assert_eq!(usage.free_blocks, usage.num_blocks);
    report
}

#[test]
fn a_batch_gives_what_each_request_gives_alone() {
    let requests = requests();
    let mut bounded = engine(&EngineOptions { max_step_rows: 4, ..options() });
    let mut engine = engine(&options());
    let together = run(&mut engine, &requests);
    assert_eq!(run(&mut bounded, &requests).completions, together.completions);
    for (index, request) in requests.iter().enumerate() {
        let alone = run(&mut engine, std::slice::from_ref(request));
        assert_eq!(alone.completions[0], together.completions[index], "request {index}");
    }
    let generated: usize = together.completions.iter().map(|completion| completion.token_ids.len()).sum();
    assert_eq!(together.stats.prefill_tokens, requests.iter().map(|request| request.prompt.len()).sum::<usize>());
    assert_eq!(together.stats.decode_tokens, generated - requests.len());
}

#[test]
fn greedy_tokens_are_the_largest_of_the_scored_logits() {
    let mut engine = engine(&options());
    let request = Request { temperature: 0.0, ..requests()[4].clone() };
    let completion = run(&mut engine, std::slice::from_ref(&request)).completions.remove(0);
    let (token_ids, selection) = (request.prompt.clone(), request.selection.clone());
    let scored = score(&mut engine, &[ScoreRequest { selection, token_ids, decode: completion.token_ids.clone() }]);
    let scored = &scored.expect("logits")[0][request.prompt.len() - 1..];
    for (token, logits) in completion.token_ids.iter().zip(scored) {
        assert!(logits.iter().all(|logit| *logit <= logits[*token as usize]));
    }
}

#[test]
fn end_tokens_limits_and_the_context_end_a_request() {
    let mut engine = engine(&EngineOptions { max_context: Some(12), ..options() });
    let prompt = vec![5; 10];
    let ask =
        |max_new_tokens| Request { prompt: prompt.clone(), max_new_tokens, temperature: 30.0, ..Request::default() };
    // Three tokens fit: the last one is given out and never fed. The draws avoid the end token by their seeds.
    let full = run(&mut engine, &[Request { seed: 1, ..ask(50) }]);
    assert_eq!((full.completions[0].token_ids.len(), full.completions[0].finished), (3, FinishReason::ContextFull));
    let limited = run(&mut engine, &[Request { seed: 1, ..ask(2) }]);
    assert_eq!(limited.completions[0].token_ids, full.completions[0].token_ids[..2]);
    assert_eq!(limited.completions[0].finished, FinishReason::MaxNewTokens);

    let end_tokens = engine.model().config().eos_token_ids.clone();
    assert!(!end_tokens.is_empty());
    let many: Vec<Request> = (0..200).map(|seed| Request { seed, prompt: vec![5; 2], ..ask(50) }).collect();
    let on: Vec<Request> = many.iter().map(|request| Request { ignore_end_tokens: true, ..request.clone() }).collect();
    let went_on = run(&mut engine, &on[..8]).completions;
    assert!(went_on.iter().all(|completion| completion.finished == FinishReason::ContextFull));
    let ended = many.iter().map(|request| run(&mut engine, std::slice::from_ref(request)).completions.remove(0));
    let ended: Vec<_> = ended.filter(|completion| completion.finished == FinishReason::EndToken).collect();
    assert!(!ended.is_empty(), "no draw met an end token");
    for completion in ended {
        let (last, before) = completion.token_ids.split_last().unwrap();
        assert!(end_tokens.contains(last) && !before.iter().any(|token| end_tokens.contains(token)));
    }
}

#[test]
fn what_cannot_run_is_refused_and_leaves_no_sequence() {
    let mut engine = engine(&EngineOptions { max_context: Some(32), kv_tokens: 64, ..options() });
    let good = Request { prompt: vec![1; 4], max_new_tokens: 4, ..Request::default() };
    let with = |change: fn(&mut Request)| {
        let mut request = good.clone();
        change(&mut request);
        vec![good.clone(), request]
    };
    let mut refused = |requests: &[Request]| {
        let error = Generator::new(&mut engine, None).run(requests, |_| ()).unwrap_err();
        assert_eq!(engine.sequences().count(), 0);
        error
    };
    let empty = refused(&with(|request| request.prompt.clear()));
    assert!(matches!(empty, GenerateError::EmptyPrompt { request: 1 }));
    let long = refused(&with(|request| request.prompt = vec![1; 33]));
    assert!(matches!(long, GenerateError::PromptTooLong { request: 1, prompt_tokens: 33, max_context: 32 }));
    let cold = refused(&with(|request| request.temperature = -1.0));
    assert!(matches!(cold, GenerateError::Temperature { request: 1, .. }));
    let unknown = refused(&with(|request| request.selection = named("nobody")));
    assert!(matches!(unknown, GenerateError::Engine(EngineError::Pool(_))));
    let token = refused(&with(|request| request.prompt = vec![1, 500]));
    assert!(matches!(token, GenerateError::Engine(EngineError::TokenOutOfRange { token_id: 500, .. })));
    // Each request takes 2 of the 4 blocks by its end; three do not fit.
    let three = vec![Request { prompt: vec![1; 10], max_new_tokens: 8, ..Request::default() }; 3];
    let full = refused(&three);
    let expected = EngineError::KvFull { needed_blocks: 6, free_blocks: 4, num_blocks: 4 };
    assert!(matches!(full, GenerateError::Engine(error) if error == expected));
    assert_eq!(kv_tokens_for([17, 17, 17]), 6 * 16);
    let nothing =
        Generator::new(&mut engine, None).run(&[Request { max_new_tokens: 0, ..good }], |_| panic!()).unwrap();
    assert!(nothing.completions[0].token_ids.is_empty());
}
