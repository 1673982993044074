//! Adapters in mlx-lm's own format: logits of mlx-lm, by prefill and by decode, beside base rows.

use conformance::engines::{back_ends, load_model, named, open_pool, small_options};
use conformance::golden::{DENSE_BOUND, TensorFile, golden_dir, largest_difference, model_dir};
use lora_adapter::{Adapter, PrepareOptions, prepare_with};
use lora_math::AdapterSelection;
use model_engine::Engine;
use model_engine::score::{ScoreRequest, score};

const CASES: [&str; 4] = ["default", "dora", "embed", "keys_1layer"];

#[test]
fn adapters_give_the_logits_of_mlx() {
    for (back_end, kernels) in back_ends() {
        let model = load_model(&model_dir("llama"));
        let adapters = CASES.map(|case| {
            let adapter = Adapter::open(&golden_dir().join("mlx/llama").join(case)).expect(case);
            (case.to_owned(), prepare_with(adapter, &model, &PrepareOptions::default()).expect(case))
        });
        let pool = open_pool(model.shape(), &adapters);
        let mut engine = Engine::new(model, Some(pool), &small_options(2, kernels)).expect("an engine");
        for by_decode in [false, true] {
            let (mut requests, mut expected) = (Vec::new(), Vec::new());
            for case in CASES {
                let file = TensorFile::open(&golden_dir().join("mlx/llama").join(case).join("golden.safetensors"));
                let tokens = file.token_rows("input_ids");
                for (selection, logits) in [(named(case), "logits_adapter"), (AdapterSelection::Base, "logits_base")] {
                    let logits = file.logits(logits);
                    for (index, token_ids) in tokens.iter().enumerate() {
                        let split = if by_decode { token_ids.len() / 2 } else { token_ids.len() };
                        let (token_ids, decode) = token_ids.split_at(split);
                        let (token_ids, decode) = (token_ids.to_vec(), decode.to_vec());
                        requests.push(ScoreRequest { selection: selection.clone(), token_ids, decode });
                        expected.push(logits.sequence(index).to_vec());
                    }
                }
            }
            let found = score(&mut engine, &requests).expect("logits");
            assert_eq!(found.len(), CASES.len() * 2 * 3);
            for ((found, expected), request) in found.iter().zip(&expected).zip(&requests) {
                let difference = largest_difference(found, expected);
                let who = &request.selection;
                assert!(difference <= DENSE_BOUND, "{who:?} on {back_end}: logits differ by {difference:e}");
            }
            // The adapters have to matter: their logits are not the base's.
            let (default, base) = (&expected[0], &expected[3]);
            assert!(default.iter().zip(base).any(|(a, b)| (a - b).abs() > 0.05));
        }
    }
}
