"""Writes ../adapter_files: one small adapter as torch writes it, in every form that a directory can hold.

    python adapter_files.py
"""

import collections
import pathlib
import struct

import numpy
import torch
from safetensors.torch import save_file

ROOT = pathlib.Path(__file__).parent.parent / "adapter_files"
torch.set_num_threads(1)
torch.manual_seed(7)


def config(directory):
    (directory / "adapter_config.json").write_text(
        '{\n  "lora_alpha": 8,\n  "peft_type": "LORA",\n  "r": 4,\n  "target_modules": ["q_proj", "v_proj"]\n}\n'
    )


def tensors(dtypes=(torch.float32, torch.float32)):
    out = {}
    for module, features in [("q_proj", 8), ("v_proj", 4)]:
        name = f"base_model.model.model.layers.0.self_attn.{module}"
        out[f"{name}.lora_A.weight"] = torch.randn(4, 8, dtype=torch.float64).to(dtypes[0])
        out[f"{name}.lora_B.weight"] = torch.randn(features, 4, dtype=torch.float64).to(dtypes[1])
    return out


def case(name, state, **options):
    """The state in one directory as a pickle and as safetensors, for comparison."""
    directory = ROOT / "torch" / name
    directory.mkdir(parents=True, exist_ok=True)
    config(directory)
    torch.save(state, directory / "adapter_model.bin", **options)
    plain = {key: value.detach().contiguous().clone() for key, value in state.items()}
    save_file(plain, directory / "expected.safetensors")


case("plain", tensors())
case("mixed", tensors((torch.bfloat16, torch.float16)))
case("float64", tensors((torch.float64, torch.float32)))
case("ordered", collections.OrderedDict(tensors()))
case("protocol_4", tensors(), pickle_protocol=4)
case("old_torch", tensors(), _use_new_zipfile_serialization=False)

parameters = {name: torch.nn.Parameter(value) for name, value in tensors().items()}
case("parameters", parameters)

# A state dictionary of modules carries the versions of its modules.
module = torch.nn.Module()
for name, value in tensors().items():
    parent = module
    for part in name.split(".")[:-1]:
        if not hasattr(parent, part):
            parent.add_module(part, torch.nn.Module())
        parent = getattr(parent, part)
    parent.weight = torch.nn.Parameter(value)
case("state_dict", module.state_dict())

# Views: transposed ones are dense; slices of one storage lie one after the other.
case("transposed", {name: value.t().contiguous().t() for name, value in tensors().items()})
block = torch.randn(20, 8)
views = {}
for index, (name, value) in enumerate(tensors().items()):
    first = 4 * index
    rows = block.reshape(-1)[first * 8 : first * 8 + value.numel()]
    views[name] = rows.reshape(value.shape)
case("views", views)
case("strided", {name: torch.randn(value.shape[0], 2 * value.shape[1])[:, ::2] for name, value in tensors().items()})
