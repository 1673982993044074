"""Writes ../mlx from adapters that mlx-lm trained: their files as they are, and their logits as safetensors.

    python mlx.py FOLDER

FOLDER holds `llama/<case>/` with adapters.safetensors, adapter_config.json and golden.npz.
"""

import pathlib
import shutil
import sys

import numpy
from safetensors.numpy import save_file

OUT = pathlib.Path(__file__).parent.parent / "mlx"

for case in ["default", "keys_1layer", "dora", "embed"]:
    source, target = pathlib.Path(sys.argv[1]) / "llama" / case, OUT / "llama" / case
    target.mkdir(parents=True, exist_ok=True)
    for name in ["adapters.safetensors", "adapter_config.json"]:
        shutil.copy(source / name, target / name)
    golden = numpy.load(source / "golden.npz")
    save_file({name: numpy.ascontiguousarray(golden[name]) for name in golden}, target / "golden.safetensors")
