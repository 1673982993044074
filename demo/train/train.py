#!/usr/bin/env python3
"""Trains one demo adapter with PEFT and writes it in bf16.

    python train.py STYLE --gguf FILE.gguf --data DATA_DIR --out ADAPTER_DIR

Runs on one CPU thread. The prompt part of every example is the chat template's
own text, default system message included; the loss covers the answer and the
end-of-turn token only.
"""

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

BASE_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]

# One entry per adapter; between them they cover plain scaling, rank-stabilised
# scaling, a per-module alpha, and full and partial sets of modules.
STYLES = {
    "pirate": dict(target_modules=ATTENTION + MLP, lora_alpha=16),
    "json": dict(target_modules=ATTENTION, lora_alpha=16),
    "telegram": dict(target_modules=ATTENTION + MLP, lora_alpha=16, use_rslora=True),
    "butler": dict(target_modules=["q_proj", "v_proj"], lora_alpha=16, alpha_pattern={"v_proj": 32}),
}


def examples(tok, path: Path) -> list:
    """Token ids of each example and the length of its prompt part."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        turns = [{"role": "user", "content": row["question"]}]
        prompt = tok.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        head = tok(prompt, add_special_tokens=False)["input_ids"]
        tail = tok(row["answer"], add_special_tokens=False)["input_ids"]
        found.append((head + tail + [tok.eos_token_id], len(head)))
    return found


def batch_loss(net, batch: list, pad: int) -> torch.Tensor:
    """Mean cross-entropy per answer token; the head runs on answer positions only."""
    width = max(len(ids) for ids, _ in batch)
    ids = torch.full((len(batch), width), pad)
    mask = torch.zeros_like(ids)
    wanted = torch.zeros_like(ids, dtype=torch.bool)
    for i, (row, start) in enumerate(batch):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = 1
        wanted[i, start - 1 : len(row) - 1] = True
    causal = net.get_base_model()
    hidden = causal.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    logits = causal.lm_head(hidden[wanted])
    target = ids.roll(-1, dims=1)[wanted]
    return torch.nn.functional.cross_entropy(logits, target)


def tidy(directory: Path) -> None:
    """Stores the weights in bf16 and leaves only what a reader of the adapter needs."""
    weights = directory / "adapter_model.safetensors"
    tensors = {k: v.to(torch.bfloat16).contiguous() for k, v in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    config_path = directory / "adapter_config.json"
    config = json.loads(config_path.read_text())
    config["base_model_name_or_path"] = BASE_NAME
    config["target_modules"] = sorted(config["target_modules"])
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    readme = directory / "README.md"
    if readme.exists():
        readme.unlink()


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("style", choices=sorted(STYLES))
    ap.add_argument("--gguf", type=Path, required=True)
    ap.add_argument("--data", type=Path, required=True, help="folder that make_data.py filled")
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--steps", type=int, default=120)
    ap.add_argument("--batch", type=int, default=4)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--warmup", type=int, default=10)
    ap.add_argument("--seed", type=int, default=7)
    args = ap.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    order = random.Random(args.seed)

    where = dict(pretrained_model_name_or_path=args.gguf.parent, gguf_file=args.gguf.name)
    tok = AutoTokenizer.from_pretrained(**where)
    base = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    net = get_peft_model(base, LoraConfig(r=8, lora_dropout=0.0, task_type="CAUSAL_LM", **STYLES[args.style]))
    net.train()
    params = [p for p in net.parameters() if p.requires_grad]
    print(f"{args.style}: {sum(p.numel() for p in params)} trained numbers", flush=True)

    data = examples(tok, args.data / f"{args.style}.jsonl")
    opt = torch.optim.AdamW(params, lr=args.lr, weight_decay=0.0)

    def rate(step: int) -> float:
        if step < args.warmup:
            return (step + 1) / args.warmup
        done = (step - args.warmup) / max(1, args.steps - args.warmup)
        return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))

    schedule = torch.optim.lr_scheduler.LambdaLR(opt, rate)
    queue, recent, began = [], [], time.time()
    for step in range(args.steps):
        if len(queue) < args.batch:
            queue = order.sample(data, len(data))
        batch, queue = queue[: args.batch], queue[args.batch :]
        loss = batch_loss(net, batch, tok.pad_token_id)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()
        schedule.step()
        opt.zero_grad(set_to_none=True)
        recent.append(loss.item())
        if step == 0 or (step + 1) % 10 == 0:
            mean = sum(recent[-10:]) / len(recent[-10:])
            print(f"step {step + 1:4d}  loss {mean:.4f}  {time.time() - began:.0f} s", flush=True)

    net.save_pretrained(args.out)
    tidy(args.out)


if __name__ == "__main__":
    main()
