"""Adapters that combine what the other golden cases have one at a time: magnitudes of DoRA on a base that the
initialisation changed. Writes ../adapters_combined; the logits are those of PEFT after it has read its own file again."""

import pathlib
import shutil

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

HERE = pathlib.Path(__file__).resolve().parent.parent
MODEL = HERE / "models" / "llama"


def base():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def main():
    input_ids = load_file(HERE / "adapters/llama/qv/golden.safetensors")["input_ids"]
    for seed, init in enumerate(["pissa", "olora"]):
        torch.manual_seed(seed)
        out = HERE / "adapters_combined" / "llama" / f"dora_{init}"
        shutil.rmtree(out, ignore_errors=True)
        targets = ["q_proj", "o_proj", "up_proj"]
        config = LoraConfig(r=3, lora_alpha=4.5, target_modules=targets, init_lora_weights=init, use_dora=True)
        model = get_peft_model(base(), config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_magnitude" in name:
                    parameter.mul_(torch.empty_like(parameter).uniform_(0.7, 1.4))
                elif "lora_" in name:
                    parameter.add_(0.1 * torch.randn_like(parameter))
            trained = model(input_ids).logits
        model.peft_config["default"].base_model_name_or_path = "models/llama"
        model.save_pretrained(out)
        with torch.no_grad():
            logits = PeftModel.from_pretrained(base(), out).eval()(input_ids).logits
            plain = base()(input_ids).logits
        print(init, "reload", (logits - trained).abs().max().item(), "effect", (logits - plain).abs().max().item())
        save_file({"input_ids": input_ids, "logits_adapter": logits}, out / "golden.safetensors")
        (out / "README.md").unlink(missing_ok=True)


main()
