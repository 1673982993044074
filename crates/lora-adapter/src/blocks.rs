//! BD-LoRA: one half of a pair stored as the blocks of a block-diagonal matrix, one below the other.
//!
//! A of `[rank, in_features / n]` stands for the `n` blocks `[rank / n, in_features / n]` on a diagonal, B of
//! `[out_features, rank / n]` likewise. Inside, both halves are plain matrices: the zeros are written out.

use std::sync::Arc;

use serde_json::Value;

use crate::config::{CONFIG_FILE, bad_field};
use crate::error::Reasons;
use crate::keys::Half;
use crate::matrix::Matrix;
use crate::reason::Reason;

/// More blocks than any group of devices is large: a short config must not make much memory of a small file.
const MAX_BLOCKS: usize = 64;

/// More bytes than A or B of any model has: rank 512 on 400,000 features in double precision would be that many.
const MAX_DIAGONAL_BYTES: usize = 1 << 31;

/// What `use_bdlora` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BlockDiagonal {
    /// Texts in the paths of modules whose A is stored in blocks.
    a: Vec<String>,
    /// Texts in the paths of modules whose B is.
    b: Vec<String>,
    pub(crate) num_blocks: usize,
    /// Whether every pair has to be one of them.
    match_strict: bool,
}

impl BlockDiagonal {
    /// Reads the field.
    pub(crate) fn parse(value: &Value, reasons: &mut Reasons) -> Option<Self> {
        const EXPECTED: &str = "target_modules_bd_a, target_modules_bd_b and nblocks from 1 to 64";
        let texts = |name: &str| match value.get(name) {
            None | Some(Value::Null) => Some(Vec::new()),
            Some(Value::Array(list)) => list.iter().map(|text| text.as_str().map(str::to_owned)).collect(),
            Some(_) => None,
        };
        let num_blocks = value.get("nblocks").and_then(Value::as_u64).and_then(|count| usize::try_from(count).ok());
        // As PEFT's own default.
        let match_strict = value.get("match_strict").is_none_or(|strict| *strict != Value::Bool(false));
        let num_blocks = num_blocks.filter(|count| (1..=MAX_BLOCKS).contains(count));
        let parsed = texts("target_modules_bd_a").zip(texts("target_modules_bd_b")).zip(num_blocks);
        let blocks = parsed.map(|((a, b), num_blocks)| BlockDiagonal { a, b, num_blocks, match_strict });
        let overlap = blocks.as_ref().is_some_and(|blocks| blocks.a.iter().any(|text| blocks.b.contains(text)));
        if blocks.is_none() || overlap {
            reasons.push(CONFIG_FILE, bad_field("use_bdlora", EXPECTED, value));
            return None;
        }
        blocks
    }

    /// The half that is stored in blocks at this path.
    pub(crate) fn half(&self, path: &str) -> Option<Half> {
        self.half_of(path).ok().flatten()
    }

    /// As [`half`](Self::half), or what PEFT expects of a path that it refuses.
    pub(crate) fn half_of(&self, path: &str) -> Result<Option<Half>, &'static str> {
        let named = |texts: &[String]| texts.iter().any(|text| path.contains(text.as_str()));
        match (named(&self.a), named(&self.b)) {
            (true, true) => Err("only one of A and B of a module in blocks"),
            (true, false) => Ok(Some(Half::A)),
            (false, true) => Ok(Some(Half::B)),
            (false, false) if self.match_strict => Err("one of A and B of every module in blocks (match_strict)"),
            (false, false) => Ok(None),
        }
    }
}

/// The matrix with its `num_blocks` groups of rows on a diagonal. The rows are a multiple of the blocks.
pub(crate) fn on_diagonal(stored: &Matrix, num_blocks: usize) -> Result<Matrix, Reason> {
    let (rows, cols, size) = (stored.rows(), stored.cols(), stored.dtype().bytes());
    let (row_bytes, out_bytes) = (cols * size, cols * num_blocks * size);
    // The zeros are not in the file: the one place where a file becomes more than its own size.
    let needed_bytes = rows.saturating_mul(out_bytes);
    if needed_bytes > MAX_DIAGONAL_BYTES {
        return Err(Reason::OutOfMemory { needed_bytes });
    }
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(needed_bytes).map_err(|_| Reason::OutOfMemory { needed_bytes })?;
    bytes.resize(needed_bytes, 0);
    for (row, (out, stored)) in
        bytes.chunks_exact_mut(out_bytes).zip(stored.bytes().chunks_exact(row_bytes)).enumerate()
    {
        let block = row / (rows / num_blocks);
        out[block * row_bytes..(block + 1) * row_bytes].copy_from_slice(stored);
    }
    let range = 0..bytes.len();
    let name = Arc::from(stored.tensor());
    Ok(Matrix::from_bytes(name, [rows, cols * num_blocks], stored.dtype(), Arc::new(bytes), range)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_file_does_not_become_much_memory() {
        let stored = Matrix::from_f32(512, 20_000, &vec![0.5; 512 * 20_000]).unwrap();
        let needed_bytes = 512 * 20_000 * 4 * 64;
        assert_eq!(on_diagonal(&stored, 64).unwrap_err(), Reason::OutOfMemory { needed_bytes });
        assert_eq!(on_diagonal(&stored, 2).unwrap().cols(), 40_000);
    }
}
