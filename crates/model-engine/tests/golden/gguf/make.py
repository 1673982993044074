"""Makes the golden files of this folder with the `gguf` and `transformers` Python packages (gguf 0.19, transformers 5).

blocks.gguf            one tensor of random blocks for every storage type that is read
blocks.safetensors     the same elements as gguf.quants.dequantize gives them, f32
tiny_llama/            a random Llama as transformers saves it
tiny_llama.gguf        the same weights, F32, named and permuted as llama.cpp's converter does it

Run in this folder: python make.py
"""

import numpy as np
import torch
from gguf import GGUFWriter, GGMLQuantizationType as Q, GGML_QUANT_SIZES
from gguf.quants import dequantize
from safetensors.numpy import save_file
from transformers import LlamaConfig, LlamaForCausalLM

ROWS, COLUMNS = 2, 256
# Byte offsets of the f16 fields in a block: random bytes there could be infinite or NaN.
HALVES = {Q.Q4_0: [0], Q.Q4_1: [0, 2], Q.Q5_0: [0], Q.Q5_1: [0, 2], Q.Q8_0: [0], Q.Q4_K: [0, 2], Q.Q5_K: [0, 2], Q.Q6_K: [208]}


def blocks():
    random = np.random.default_rng(20)
    writer = GGUFWriter("blocks.gguf", "llama")
    expected = {}
    for kind in [Q.F32, Q.F16, Q.BF16, *HALVES]:
        elements, size = GGML_QUANT_SIZES[kind]
        if kind in HALVES:
            data = random.integers(0, 256, (ROWS * COLUMNS // elements, size), dtype=np.uint8)
            for offset in HALVES[kind]:
                scales = random.normal(0, 0.1, data.shape[0]).astype(np.float16)
                data[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
            data = data.reshape(ROWS, -1)
        else:
            data = random.normal(0, 1, (ROWS, COLUMNS)).astype(np.float32)
            if kind == Q.BF16:
                data = (data.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
            elif kind == Q.F16:
                data = data.astype(np.float16)
        writer.add_tensor(kind.name, data, raw_dtype=kind)
        expected[kind.name] = np.ascontiguousarray(dequantize(data, kind), dtype=np.float32)
        assert expected[kind.name].shape == (ROWS, COLUMNS), (kind, expected[kind.name].shape)
    finish(writer)
    save_file(expected, "blocks.safetensors")


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleave(weight, heads):
    """The converter's `permute`: within a head, the two halves become even and odd rows."""
    shape = weight.shape
    return weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_llama():
    torch.manual_seed(21)
    config = LlamaConfig(
        vocab_size=24, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, eos_token_id=[2, 5],
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained("tiny_llama")

    writer = GGUFWriter("tiny_llama.gguf", "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(40)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(24)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    for name, weight in model.state_dict().items():
        weight = weight.numpy()
        if name.startswith("model.layers."):
            _, _, layer, module = name.split(".", 3)
            module, kind = module.rsplit(".", 1)
            if module.endswith("q_proj"):
                weight = interleave(weight, 4)
            if module.endswith("k_proj"):
                weight = interleave(weight, 2)
            name = f"blk.{layer}.{NAMES[module]}.{kind}"
        else:
            name = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
                    "lm_head.weight": "output.weight"}[name]
        writer.add_tensor(name, np.ascontiguousarray(weight))
    finish(writer)


blocks()
tiny_llama()
