//! Golden rows: sequences with the logits that each must give, run as one batch.

use std::path::Path;

use lora_math::AdapterSelection;
use model_engine::Engine;
use model_engine::score::{ScoreRequest, score};

use crate::golden::{DENSE_BOUND, TensorFile, largest, largest_difference};

/// One sequence and what it must give.
pub struct Row {
    /// Its adapter, or the base.
    pub selection: AdapterSelection,
    /// All its tokens.
    pub token_ids: Vec<u32>,
    /// Logits of every position.
    pub expected: Vec<f32>,
}

/// The rows of a golden file: `input_ids` under `selection`, which gives the tensor `logits`.
#[must_use]
pub fn file_rows(file: &Path, logits: &str, selection: &AdapterSelection) -> Vec<Row> {
    let file = TensorFile::open(file);
    let logits = file.logits(logits);
    let rows = file.token_rows("input_ids").into_iter().enumerate();
    rows.map(|(index, token_ids)| {
        let expected = logits.sequence(index).to_vec();
        Row { selection: selection.clone(), token_ids, expected }
    })
    .collect()
}

/// The largest difference over all rows, run as one batch: all tokens by prefill, or the last half by decode steps.
pub fn difference(engine: &mut Engine, rows: &[Row], by_decode: bool) -> f32 {
    let requests: Vec<ScoreRequest> = rows
        .iter()
        .map(|row| {
            let split = if by_decode { row.token_ids.len() / 2 } else { row.token_ids.len() };
            let (token_ids, decode) = row.token_ids.split_at(split);
            ScoreRequest { selection: row.selection.clone(), token_ids: token_ids.to_vec(), decode: decode.to_vec() }
        })
        .collect();
    let logits = score(engine, &requests).expect("logits");
    assert_eq!(logits.len(), rows.len());
    let differences = logits.iter().zip(rows).map(|(found, row)| largest_difference(found, &row.expected));
    largest(differences)
}

/// Every row within the bound, by prefill and by decode steps.
pub fn check(engine: &mut Engine, rows: &[Row], what: &str) {
    for by_decode in [false, true] {
        let found = difference(engine, rows, by_decode);
        assert!(found <= DENSE_BOUND, "{what}: logits differ by {found:e} (decode steps: {by_decode})");
    }
}
