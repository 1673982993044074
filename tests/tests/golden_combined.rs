//! Adapters that combine features, in one batch: logits of PEFT, by prefill and by decode.

use conformance::engines::{back_ends, directory_engine, named, small_options};
use conformance::golden::golden_dir;
use conformance::rows::{check, file_rows};

/// Magnitudes on a base that the initialisation changed: they scale what the change left.
const CASES: [&str; 2] = ["dora_pissa", "dora_olora"];

#[test]
fn combinations_give_the_logits_of_peft() {
    let directory = golden_dir().join("adapters_combined/llama");
    for (back_end, kernels) in back_ends() {
        let mut engine = directory_engine("llama", &directory, &CASES, &small_options(2, kernels));
        let file = |case: &str| directory.join(case).join("golden.safetensors");
        let rows: Vec<_> =
            CASES.iter().flat_map(|case| file_rows(&file(case), "logits_adapter", &named(case))).collect();
        assert_eq!(rows.len(), CASES.len() * 3);
        check(&mut engine, &rows, &format!("combinations on {back_end}"));
    }
}
