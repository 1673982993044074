//! Adapters in mlx-lm's own format: logits of mlx-lm, by prefill and by decode, beside base rows.

use conformance::engines::{back_ends, directory_engine, named, small_options};
use conformance::golden::golden_dir;
use conformance::rows::{check, file_rows};
use lora_math::AdapterSelection;

const CASES: [&str; 4] = ["default", "dora", "embed", "keys_1layer"];

#[test]
fn adapters_give_the_logits_of_mlx() {
    let directory = golden_dir().join("mlx/llama");
    for (back_end, kernels) in back_ends() {
        let mut engine = directory_engine("llama", &directory, &CASES, &small_options(2, kernels));
        let mut rows = Vec::new();
        for case in CASES {
            let file = directory.join(case).join("golden.safetensors");
            rows.extend(file_rows(&file, "logits_adapter", &named(case)));
            rows.extend(file_rows(&file, "logits_base", &AdapterSelection::Base));
        }
        assert_eq!(rows.len(), CASES.len() * 2 * 3);
        check(&mut engine, &rows, &format!("mlx on {back_end}"));
        // The adapters have to matter: their logits are not the base's.
        let (default, base) = (&rows[0].expected, &rows[3].expected);
        assert!(default.iter().zip(base).any(|(a, b)| (a - b).abs() > 0.05));
    }
}
