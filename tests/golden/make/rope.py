#!/usr/bin/env python3
"""Tiny random models for rotary scaling and for attention details that are easy to misread.

    python rope.py [--out ../rope]

Each case is a model folder as transformers saves it plus golden.safetensors with
`input_ids` and float32 `logits`. Nothing is written unless the feature under test
visibly changes the logits.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

HERE = Path(__file__).resolve().parent
KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
COMMON = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=2,
    attn_implementation="eager",
)
PLAIN = dict(rope_type="default", rope_theta=10000.0)

# kind, config on top of COMMON, how it is saved, and the config values of a reader
# that got the feature wrong (its logits must differ).
CASES = {
    "llama3": dict(
        kind="llama",
        config=dict(
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=10000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            )
        ),
        wrong=dict(rope_parameters=PLAIN),
    ),
    "linear": dict(
        kind="llama",
        config=dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0), tie_word_embeddings=True),
        wrong=dict(rope_parameters=PLAIN),
        old_spelling="type",
    ),
    "dynamic": dict(
        kind="llama",
        config=dict(
            max_position_embeddings=8,
            rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0),
            tie_word_embeddings=True,
        ),
        wrong=dict(rope_parameters=PLAIN),
        other_lengths=[6, 12],
    ),
    "yarn": dict(
        kind="qwen3",
        config=dict(
            head_dim=16,
            rope_parameters=dict(
                rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32
            ),
            tie_word_embeddings=True,
        ),
        wrong=dict(rope_parameters=PLAIN),
    ),
    "yarn_options": dict(
        kind="llama",
        config=dict(
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=10000.0,
                factor=4.0,
                original_max_position_embeddings=64,
                attention_factor=1.25,
                beta_fast=8.0,
                beta_slow=0.5,
                truncate=False,
            ),
            tie_word_embeddings=True,
        ),
        wrong=dict(
            rope_parameters=dict(
                rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64
            )
        ),
    ),
    "llama3_v4_config": dict(
        kind="llama",
        config=dict(
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=50000.0,
                factor=4.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=24,
            ),
            tie_word_embeddings=True,
        ),
        wrong=dict(rope_parameters=dict(rope_type="default", rope_theta=50000.0)),
        old_spelling="rope_type",
    ),
    "bias_bf16": dict(
        kind="llama",
        config=dict(
            attention_bias=True,
            mlp_bias=True,
            rope_parameters=dict(rope_type="default", rope_theta=500000.0),
            rms_norm_eps=0.01,
        ),
        wrong=dict(rms_norm_eps=1e-6),
        dtype=torch.bfloat16,
    ),
    "head_dim_sharded": dict(
        kind="qwen3",
        config=dict(head_dim=24, rope_parameters=dict(rope_type="default", rope_theta=1000000.0)),
        wrong=dict(rope_parameters=PLAIN),
        shard="160KB",
    ),
    "qwen2_window_off": dict(
        kind="qwen2",
        config=dict(
            use_sliding_window=False,
            sliding_window=4,
            max_window_layers=1,
            rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
            tie_word_embeddings=True,
        ),
        wrong=dict(use_sliding_window=True),
        # transformers 5 clears the unused window on saving; files written by version 4 keep it
        edit=dict(sliding_window=4, layer_types=None),
    ),
}


def fill(net, seed):
    """Random weights everywhere, with queries and keys large enough for peaked attention."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(net.named_parameters()):
            noise = torch.randn(p.shape, generator=g)
            if name.endswith("norm.weight"):
                p.copy_(1 + 0.25 * noise)
            elif name.endswith("bias"):
                p.copy_(0.3 * noise)
            elif "embed_tokens" in name:
                p.copy_(0.5 * noise)
            else:
                gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.2
                p.copy_(gain * noise / p.shape[1] ** 0.5)


def build(kind, config):
    make_config, make_net = KINDS[kind]
    return make_net(make_config(**config)).eval()


@torch.no_grad()
def run(net, ids):
    return net(input_ids=ids, use_cache=False).logits.float().contiguous()


def spell_old(path, type_key):
    """Rewrites config.json the way transformers 4 wrote it."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    rope[type_key] = rope.pop("rope_type")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.57.6"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def edit_config(path, changes):
    """Sets keys of config.json; a key given as None is removed."""
    config = json.loads(path.read_text()) | changes
    config = {k: v for k, v in config.items() if not (k in changes and v is None)}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def make(name, spec, seed, out):
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    config = COMMON | spec["config"]
    net = build(spec["kind"], config)
    fill(net, seed)
    if "dtype" in spec:
        net.to(spec["dtype"])
    net.save_pretrained(folder, max_shard_size=spec.get("shard", "1GB"))
    (folder / "generation_config.json").unlink(missing_ok=True)

    def load(**more):
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", **more
        ).eval()

    g = torch.Generator().manual_seed(seed + 1000)
    ids = torch.randint(3, 128, (2, 24), generator=g)
    tensors = {"input_ids": ids, "logits": run(load(), ids)}
    if "old_spelling" in spec:
        spell_old(folder / "config.json", spec["old_spelling"])
        assert torch.equal(run(load(), ids), tensors["logits"]), "the old spelling changed the logits"
    if "edit" in spec:
        edit_config(folder / "config.json", spec["edit"])
        assert torch.equal(run(load(), ids), tensors["logits"]), "the edited config changed the logits"
    for n in spec.get("other_lengths", []):
        tensors[f"length{n}.input_ids"] = ids[:, :n].contiguous()
        tensors[f"length{n}.logits"] = run(load(), ids[:, :n])

    wrong = build(spec["kind"], config | spec["wrong"])
    wrong.load_state_dict(load().state_dict())
    gap = (run(wrong, ids) - tensors["logits"]).abs().max().item()
    assert gap > 0.05, f"{name}: a wrong reading changes the logits by {gap} only"
    exact = run(load().double(), ids) if "dynamic" not in name else tensors["logits"]
    noise = (exact - tensors["logits"]).abs().max().item()
    save_file(tensors, folder / "golden.safetensors")
    for f in folder.iterdir():
        f.chmod(0o644)
    size = sum(f.stat().st_size for f in folder.iterdir())
    peak = tensors["logits"].abs().max().item()
    print(f"{name:18s} {size:7d} bytes, logits up to {peak:.1f}, wrong reading {gap:.2f}, rounding {noise:.1e}")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", type=Path, default=HERE.parent / "rope")
    args = ap.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    for seed, (name, spec) in enumerate(CASES.items()):
        make(name, spec, seed, args.out)


if __name__ == "__main__":
    main()
