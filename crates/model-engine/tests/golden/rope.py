"""Makes rope.json: inverse frequencies, attention factor, cosines and sines of one position, as transformers 5 computes
them for every rotary scaling. Run in this folder: python rope.py
"""

import json

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

BASE = {"model_type": "llama", "vocab_size": 8, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2}
CASES = {
    "default": ({"rope_type": "default", "rope_theta": 10000.0}, 64, 40, 37),
    "linear": ({"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}, 64, 40, 37),
    "dynamic_within": ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}, 64, 64, 37),
    "dynamic_beyond": ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}, 64, 150, 137),
    "yarn": ({"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024},
             4096, 900, 877),
    "yarn_options": ({"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "mscale": 0.707,
                      "mscale_all_dim": 1.0, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0,
                      "original_max_position_embeddings": 128}, 5120, 900, 877),
    "yarn_attention_factor": ({"rope_type": "yarn", "rope_theta": 50000.0, "factor": 2.0, "attention_factor": 0.75,
                               "original_max_position_embeddings": 512}, 1024, 900, 877),
    "llama3": ({"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 256}, 8192, 900, 877),
}

cases = []
for name, (rope, max_position_embeddings, length, position) in CASES.items():
    settings = {**BASE, "head_dim": 16, "max_position_embeddings": max_position_embeddings, "rope_parameters": rope}
    rotary = LlamaRotaryEmbedding(LlamaConfig(**{**settings, "rope_parameters": dict(rope)}))
    cos, sin = rotary(torch.zeros(1), torch.arange(length)[None])
    cases.append({
        "name": name, "config": settings, "sequence_length": length, "position": position,
        "inv_freq": rotary.inv_freq.tolist(), "attention_factor": rotary.attention_scaling,
        "cos": cos[0, position, :8].tolist(), "sin": sin[0, position, :8].tolist(),
    })
with open("rope.json", "w") as file:
    json.dump(cases, file, indent=1)
    file.write("\n")
