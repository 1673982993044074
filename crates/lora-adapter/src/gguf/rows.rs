//! The order of rows in q and k of llama.cpp's `llama` models, and back.
//!
//! llama.cpp rotates neighbouring elements of a head, transformers the first half with the second; so the converter of
//! `llama` models (`LlamaModel.permute`) puts row `t·d/2 + j` of each head of d rows at `2j + t`. For an adapter the rows
//! are those of B.

use std::sync::Arc;

use crate::matrix::{Matrix, MatrixError};

/// B with the rows of every head as transformers has them. None where its rows are not that many heads of even size.
pub(crate) fn half_rotation(b: &Matrix, num_heads: usize) -> Option<Result<Matrix, MatrixError>> {
    let head_dim = b.rows().checked_div(num_heads)?;
    if head_dim * num_heads != b.rows() || head_dim % 2 == 1 {
        return None;
    }
    let row_bytes = b.cols() * b.dtype().bytes();
    let mut bytes = Vec::with_capacity(b.bytes().len());
    for head in b.bytes().chunks_exact((head_dim * row_bytes).max(1)) {
        for row in 0..head_dim {
            let (half, within) = (row / (head_dim / 2), row % (head_dim / 2));
            bytes.extend_from_slice(&head[(2 * within + half) * row_bytes..][..row_bytes]);
        }
    }
    let range = 0..bytes.len();
    Some(Matrix::from_bytes(b.tensor().into(), [b.rows(), b.cols()], b.dtype(), Arc::new(bytes), range))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_rows_of_a_head_come_first() {
        let interleaved = [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0];
        let b = Matrix::from_f32(8, 1, &interleaved).unwrap();
        let plain = half_rotation(&b, 2).unwrap().unwrap();
        assert_eq!(plain.to_f32(), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
        for num_heads in [0, 3, 8, 16] {
            assert!(half_rotation(&b, num_heads).is_none(), "{num_heads}");
        }
    }
}
