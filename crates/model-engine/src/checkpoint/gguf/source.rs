//! GGUF tensors under their Hugging Face names and in the Hugging Face layout.

use std::path::Path;

use half::bf16;

use super::super::config::{Architecture, ModelConfig};
use super::super::error::CheckpointError;
use super::super::source::{TensorInfo, TensorSource};
use super::super::weights::{WeightData, WeightDtype};
use super::config::ROPE_DIVISORS;
use super::{GgmlType, GgufFile, GgufTensor};

/// Names outside the layers: Hugging Face's, GGUF's.
const MODEL_NAMES: [(&str, &str); 3] = [
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("model.norm.weight", "output_norm.weight"),
    ("lm_head.weight", "output.weight"),
];

/// Names inside a layer, without `.weight` or `.bias`.
const LAYER_NAMES: [(&str, &str); 11] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// One GGUF file with the configuration read from it.
pub(crate) struct GgufSource<'a> {
    pub(crate) path: &'a Path,
    pub(crate) file: &'a GgufFile<'a>,
    pub(crate) config: &'a ModelConfig,
}

impl GgufSource<'_> {
    fn info(&self, name: &str, tensor: &GgufTensor) -> TensorInfo {
        TensorInfo {
            name: name.to_owned(),
            shape: tensor.shape.clone(),
            dtype: tensor.ggml_type.name().to_owned(),
            size_bytes: self.file.data(tensor).len() as u64,
            file: self.path.to_owned(),
        }
    }

    /// Heads whose rows the converter interleaved in this tensor, if it did: Llama's q and k only, since llama.cpp
    /// rotates neighbouring elements there and halves everywhere else.
    fn interleaved_heads(&self, file_name: &str) -> Option<usize> {
        if self.config.architecture != Architecture::Llama {
            return None;
        }
        if file_name.contains(".attn_q.") {
            Some(self.config.num_heads)
        } else if file_name.contains(".attn_k.") {
            Some(self.config.num_kv_heads)
        } else {
            None
        }
    }
}

impl TensorSource for GgufSource<'_> {
    fn path(&self) -> &Path {
        self.path
    }

    fn file_name(&self, name: &str) -> String {
        if let Some((_, translated)) = MODEL_NAMES.iter().find(|(known, _)| *known == name) {
            return (*translated).to_owned();
        }
        let translated = || {
            let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
            let (module, kind) = rest.rsplit_once('.')?;
            let (_, module) = LAYER_NAMES.iter().find(|(known, _)| *known == module)?;
            Some(format!("blk.{layer}.{module}.{kind}"))
        };
        translated().unwrap_or_else(|| name.to_owned())
    }

    fn find(&self, file_name: &str) -> Option<TensorInfo> {
        self.file.tensor(file_name).map(|tensor| self.info(file_name, tensor))
    }

    fn tensors(&self) -> Vec<TensorInfo> {
        // The divisors are part of the configuration.
        let weights = self.file.tensors().filter(|(name, _)| *name != ROPE_DIVISORS);
        weights.map(|(name, tensor)| self.info(name, tensor)).collect()
    }

    fn read(&self, name: &str, dtype: Option<WeightDtype>) -> Result<WeightData, CheckpointError> {
        let file_name = self.file_name(name);
        let Some(tensor) = self.file.tensor(&file_name) else {
            let path = self.path.to_owned();
            return Err(CheckpointError::MissingTensor { path, tensor: file_name, expected: Vec::new() });
        };
        let mut elements = self.file.dequantize(tensor);
        if let Some(num_heads) = self.interleaved_heads(&file_name) {
            elements = deinterleave(&elements, tensor.shape[0], num_heads);
        }
        let natural = if tensor.ggml_type == GgmlType::Bf16 { WeightDtype::Bf16 } else { WeightDtype::F32 };
        Ok(match dtype.unwrap_or(natural) {
            WeightDtype::F32 => WeightData::F32(elements),
            WeightDtype::Bf16 => WeightData::Bf16(elements.into_iter().map(bf16::from_f32).collect()),
        })
    }
}

/// Rows from the interleaved order of llama.cpp's converter (`permute` in `convert_hf_to_gguf.py`) back to half
/// rotation: within a head, row `2j + t` goes to row `t · head_dim / 2 + j`.
///
/// `num_rows` is a multiple of `2 · num_heads`: the loader has checked the shape against a configuration whose heads
/// are even.
fn deinterleave(elements: &[f32], num_rows: usize, num_heads: usize) -> Vec<f32> {
    let row_len = elements.len() / num_rows;
    let head_dim = num_rows / num_heads;
    let half = head_dim / 2;
    let mut output = Vec::with_capacity(elements.len());
    for row in 0..num_rows {
        let (head, within) = (row / head_dim, row % head_dim);
        let source = head * head_dim + 2 * (within % half) + within / half;
        output.extend_from_slice(&elements[source * row_len..(source + 1) * row_len]);
    }
    output
}

#[cfg(test)]
mod tests {
    use super::deinterleave;

    #[test]
    fn deinterleave_puts_even_rows_first_in_each_head() {
        // Two heads of four rows, one element a row.
        let interleaved: Vec<f32> = [0, 2, 1, 3, 4, 6, 5, 7].map(|row| row as f32).to_vec();
        let expected: Vec<f32> = (0..8).map(|row| row as f32).collect();
        assert_eq!(deinterleave(&interleaved, 8, 2), expected);
    }
}
