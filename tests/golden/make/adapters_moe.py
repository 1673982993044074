#!/usr/bin/env python3
"""Adapters of the mixture and hybrid models, and what PEFT makes of each weight.

    python adapters_moe.py --golden GOLDEN [--out ../adapters_moe]

GOLDEN holds `models/<kind>` and `adapters/<kind>/<case>`. Each case is copied, and PEFT merges it into its model in
float64; merged minus plain is the delta. `deltas.json` keeps three numbers for every site: u'Dv for two pairs of fixed
vectors and the Frobenius norm, with D as [out, in], the experts apart and gate and up apart.
"""

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

CASES = {
    "qwen3_moe": ["all_linear", "tm_gate", "tp_both", "tp_both_unsloth_grouped", "tp_down", "tp_gu", "tp_patterns", "tp_router"],
    "mixtral": ["tm_w123", "tp_both"],
    "gpt_oss": ["all_linear", "tp_both"],
    "llama4": ["tp_both"],
    "qwen3_next": ["all_linear", "linear_attn", "tp_all"],
    "qwen3_5": ["all_linear"],
    "qwen3_5_moe": ["all_linear", "tp_all"],
    "Qwen3_5ForConditionalGeneration": ["qkv"],
}
# Experts stored [experts, in, out]; and gate in the even columns, up in the odd ones.
TRANSPOSED = {"gpt_oss", "llama4"}
INTERLEAVED = {"gpt_oss"}


def vector(length, step):
    """Exact in every float type, and of no period that a wrong order would keep."""
    index = torch.arange(length, dtype=torch.int64)
    return (((index * step + index * index) % 17) - 8).to(torch.float64) / 8


def numbers(delta):
    out, inp = delta.shape
    sums = [float(vector(out, u) @ delta @ vector(inp, v)) for u, v in ((3, 5), (7, 11))]
    return sums + [float(delta.norm())]


def sites(kind, name, delta):
    """Names of this project for the parts of a parameter."""
    name = name.replace("language_model.", "").removeprefix("model.").removesuffix(".weight")
    if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        layer, parameter = name.split(".")[1], name.split(".")[-1]
        for expert, part in enumerate(delta):
            part = part.T if kind in TRANSPOSED else part
            parts = {"down_proj": part}
            if parameter == "gate_up_proj" and kind in INTERLEAVED:
                parts = {"gate_proj": part[0::2], "up_proj": part[1::2]}
            elif parameter == "gate_up_proj":
                half = part.shape[0] // 2
                parts = {"gate_proj": part[:half], "up_proj": part[half:]}
            for module, matrix in parts.items():
                yield f"layer {layer} expert {expert} experts.{module}", matrix
        return
    _, layer, *module = name.split(".")
    module = ".".join(module).removeprefix("self_attn.").removeprefix("linear_attn.").removeprefix("mlp.")
    yield f"layer {layer} {'router' if module in ('gate', 'router') else module}", delta


def regrouped(source, target):
    """A copy of an adapter whose stacked columns are grouped by expert, in the order that PEFT reads."""
    shutil.copytree(source, target)
    path = target / "adapter_model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if ".experts." in name and "lora_B" in name:
            out, columns = tensor.shape
            tensors[name] = tensor.reshape(out, 4, columns // 4).transpose(1, 2).reshape(out, columns).contiguous()
    path.chmod(0o644)
    save_file(tensors, path, metadata={"format": "pt"})
    return target


def deltas(golden, kind, case):
    source = golden / "adapters" / kind / case
    auto = AutoModelForImageTextToText if "Conditional" in kind else AutoModelForCausalLM
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / case
        target = regrouped(source, target) if case.endswith("grouped") else source
        model = auto.from_pretrained(golden / "models" / kind, dtype=torch.float64)
        base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        merged = PeftModel.from_pretrained(model, target).double().merge_and_unload().state_dict()
    found = {}
    for name, tensor in merged.items():
        delta = tensor.double() - base[name]
        if bool((delta != 0).any()):
            for site, matrix in sites(kind, name, delta):
                found[site] = numbers(matrix)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--golden", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent.parent / "adapters_moe")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for kind, cases in CASES.items():
        for case in cases:
            out = arguments.out / kind / case
            out.mkdir(parents=True, exist_ok=True)
            for name in ("adapter_config.json", "adapter_model.safetensors"):
                shutil.copyfile(arguments.golden / "adapters" / kind / case / name, out / name)
            found = deltas(arguments.golden, kind, case)
            lines = [f"{json.dumps(site)}: {json.dumps(values)}" for site, values in sorted(found.items())]
            (out / "deltas.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
            print(kind, case, len(found))


if __name__ == "__main__":
    main()
