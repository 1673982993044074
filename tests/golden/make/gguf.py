"""Writes ../gguf with the `gguf` package: golden adapters of PEFT as llama.cpp's convert_lora_to_gguf.py stores them.

    python gguf.py           (needs gguf, numpy, safetensors; ml_dtypes for bf16)

The rules are those of the converter: names by the package's own table, rows of q and k of `llama` permuted in each head,
A of the embedding transposed, experts of a layer stacked. One adapter is written in bf16 and one in f16 as well.
"""

import json
import pathlib
import re
import sys

# This file has the name of the package.
sys.path.pop(0)

import gguf
import numpy
from safetensors.numpy import load_file

GOLDEN = pathlib.Path(__file__).resolve().parent.parent
OUT = GOLDEN / "gguf"

# Directory, base architecture, type of the tensors.
CASES = [
    ("adapters/llama/qv", "llama", "F32"),
    ("adapters/llama/all_linear", "llama", "F32"),
    ("adapters/llama/all_linear", "llama", "BF16"),
    ("adapters/llama/all_linear", "llama", "F16"),
    ("adapters/llama/embed_head_lora", "llama", "F32"),
    ("adapters/qwen3/all_linear", "qwen3", "F32"),
    ("adapters_moe/qwen3_moe/tp_both", "qwen3moe", "F32"),
    ("adapters_moe/qwen3_next/linear_attn", "qwen3next", "F32"),
]
CONFIGS = {"llama": GOLDEN / "models" / "llama" / "config.json"}
ARCHITECTURES = {name: architecture for architecture, name in gguf.MODEL_ARCH_NAMES.items()}
LAYERS = 64


def permuted(weight, num_heads):
    return weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def pairs(weights):
    """A and B by the name of the base weight."""
    found = {}
    for name, tensor in weights.items():
        name = name.removeprefix("base_model.model.")
        for half, ends in (("a", (".lora_A.weight", ".lora_embedding_A")), ("b", (".lora_B.weight", ".lora_embedding_B"))):
            for end in ends:
                if name.endswith(end):
                    found.setdefault(name.removesuffix(end), {})[half] = tensor.astype(numpy.float32)
    return found


def experts(found, rank, fused):
    """Stacked parameters of PEFT, [experts * rank, in] and [out, rank * experts], as llama.cpp has them: [experts, rank, in]
    and [experts, out, rank]; gate and up of one matrix apart where not `fused`."""
    out = {}
    for name, pair in found.items():
        if ".experts" not in name:
            out[name] = pair
            continue
        module = name.removesuffix(".base_layer")
        a = pair["a"].reshape(-1, rank, pair["a"].shape[1])
        b = pair["b"].reshape(pair["b"].shape[0], rank, -1).transpose(2, 0, 1)
        if module == name:
            out[f"{module}.down_proj"] = {"a": a, "b": b}
        elif fused:
            out[f"{module}.gate_up_proj"] = {"a": a, "b": b}
        else:
            gate, up = numpy.split(b, 2, axis=1)
            out[f"{module}.gate_proj"] = {"a": a, "b": gate}
            out[f"{module}.up_proj"] = {"a": a, "b": up}
    return out


def write(case, architecture, dtype, fused=False):
    source = GOLDEN / case
    config = json.loads((source / "adapter_config.json").read_text())
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], LAYERS)
    suffix = "_fused" if fused else "" if dtype == "F32" else f"_{dtype.lower()}"
    path = OUT / architecture / f"{source.name}{suffix}.gguf"
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(config["lora_alpha"]))
    if architecture in CONFIGS:
        model = json.loads(CONFIGS[architecture].read_text())
        heads, kv_heads = model["num_attention_heads"], model["num_key_value_heads"]
    found = pairs(load_file(source / "adapter_model.safetensors"))
    for name, pair in experts(found, config["r"], fused).items():
        a, b = pair["a"], pair["b"]
        if architecture == "llama" and name.endswith("q_proj"):
            b = permuted(b, heads)
        if architecture == "llama" and name.endswith("k_proj"):
            b = permuted(b, kv_heads)
        base = names.get_name(name + ".weight", try_suffixes=(".weight",))
        assert base is not None, name
        if base == "token_embd.weight":
            a = a.T
        for half, tensor in (("a", a), ("b", b)):
            tensor = numpy.ascontiguousarray(tensor)
            kind = gguf.GGMLQuantizationType[dtype]
            if dtype != "F32":
                writer.add_tensor(f"{base}.lora_{half}", gguf.quantize(tensor, kind), raw_dtype=kind)
            else:
                writer.add_tensor(f"{base}.lora_{half}", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


for case in CASES:
    write(*case)
write("adapters_moe/qwen3_next/tp_all", "qwen3next", "F32", fused=True)
