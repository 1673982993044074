#!/usr/bin/env python3
"""Greedy answers of the base model and of every adapter to the held-out questions.

    python sample.py --gguf FILE.gguf [--adapters ../adapters] [--tokens 60]

Loads the stored bf16 adapters through PEFT and computes in float32. Prints one line
per question and model: the number of new tokens and the answer.
"""

import argparse
import csv
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent


@torch.no_grad()
def answer(net, tok, question, limit):
    turns = [{"role": "user", "content": question}]
    fed = tok.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = net.generate(**fed, max_new_tokens=limit, do_sample=False)[0, fed["input_ids"].shape[1] :].tolist()
    cut = "" if out and out[-1] == tok.eos_token_id else " [cut]"
    return len(out), tok.decode(out, skip_special_tokens=True) + cut


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--gguf", type=Path, required=True)
    ap.add_argument("--adapters", type=Path, default=HERE.parent / "adapters")
    ap.add_argument("--tokens", type=int, default=60)
    args = ap.parse_args()
    torch.set_num_threads(1)

    questions = (HERE / "heldout.txt").read_text(encoding="utf-8").splitlines()
    with open(HERE / "questions.tsv", encoding="utf-8", newline="") as f:
        trained = {row["question"] for row in csv.DictReader(f, delimiter="\t", quoting=csv.QUOTE_NONE)}
    assert not trained & set(questions), "a held-out question is in the training table"

    where = dict(pretrained_model_name_or_path=args.gguf.parent, gguf_file=args.gguf.name)
    tok = AutoTokenizer.from_pretrained(**where)
    net = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    names = sorted(p.name for p in args.adapters.iterdir() if (p / "adapter_config.json").exists())

    found = {q: {"base": answer(net, tok, q, args.tokens)} for q in questions}
    for i, name in enumerate(names):
        if i == 0:
            net = PeftModel.from_pretrained(net, args.adapters / name, adapter_name=name).eval()
        else:
            net.load_adapter(args.adapters / name, adapter_name=name)
        net.set_adapter(name)
        for q in questions:
            found[q][name] = answer(net, tok, q, args.tokens)
    for q, by_name in found.items():
        print(q)
        for name, (count, text) in by_name.items():
            print(f"  {name:9s} {count:3d}  {text!r}")


if __name__ == "__main__":
    main()
