//! Adapters that combine features, in one batch: logits of PEFT, by prefill and by decode.

use conformance::engines::{back_ends, load_model, named, open_pool, small_options};
use conformance::golden::{DENSE_BOUND, TensorFile, golden_dir, largest_difference, model_dir};
use lora_adapter::{Adapter, PrepareOptions, prepare_with};
use model_engine::Engine;
use model_engine::score::{ScoreRequest, score};

/// Magnitudes on a base that the initialisation changed: they scale what the change left.
const CASES: [&str; 2] = ["dora_pissa", "dora_olora"];

#[test]
fn combinations_give_the_logits_of_peft() {
    for (back_end, kernels) in back_ends() {
        let model = load_model(&model_dir("llama"));
        let directory = |case: &str| golden_dir().join("adapters_combined/llama").join(case);
        let adapters = CASES.map(|case| {
            let adapter = Adapter::open(&directory(case)).expect(case);
            (case.to_owned(), prepare_with(adapter, &model, &PrepareOptions::default()).expect(case))
        });
        let pool = open_pool(model.shape(), &adapters);
        let mut engine = Engine::new(model, Some(pool), &small_options(2, kernels)).expect("an engine");
        for by_decode in [false, true] {
            let (mut requests, mut expected) = (Vec::new(), Vec::new());
            for case in CASES {
                let file = TensorFile::open(&directory(case).join("golden.safetensors"));
                let logits = file.logits("logits_adapter");
                for (index, token_ids) in file.token_rows("input_ids").iter().enumerate() {
                    let split = if by_decode { token_ids.len() / 2 } else { token_ids.len() };
                    let (token_ids, decode) = token_ids.split_at(split);
                    let (token_ids, decode) = (token_ids.to_vec(), decode.to_vec());
                    requests.push(ScoreRequest { selection: named(case), token_ids, decode });
                    expected.push(logits.sequence(index).to_vec());
                }
            }
            let found = score(&mut engine, &requests).expect("logits");
            for ((found, expected), request) in found.iter().zip(&expected).zip(&requests) {
                let difference = largest_difference(found, expected);
                let who = &request.selection;
                assert!(difference <= DENSE_BOUND, "{who:?} on {back_end}: logits differ by {difference:e}");
            }
        }
    }
}
