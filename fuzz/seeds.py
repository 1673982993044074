"""Makes fuzz/seeds from the golden data: one file for each case that is small enough.

    python3 fuzz/seeds.py        (from the root of the repository)
"""

import json
import pathlib
import shutil
import struct
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent
GOLDEN = ROOT.parent / "tests" / "golden"
MAX_BYTES = 16 << 10
MAX_CONFIG_BYTES = 4 << 10


def put(target: str, name: str, data: bytes, limit: int = MAX_BYTES) -> None:
    if len(data) <= limit:
        (ROOT / "seeds" / target / name).write_bytes(data)


def case(path: pathlib.Path) -> str:
    return "_".join(path.relative_to(GOLDEN).parts)


def shortened(weights: bytes) -> bytes:
    """The header and the first bytes of the data: reading it is as much of the reader as the whole file is."""
    end = 8 + int.from_bytes(weights[:8], "little")
    return weights[: end + 64]


def safetensors(tensors: dict[str, list[int]], dtypes: tuple[str, ...] = ("BF16",)) -> bytes:
    """A safetensors file of zeros; the tensors take turns with the dtypes."""
    header, end = {}, 0
    for index, (name, shape) in enumerate(tensors.items()):
        begin, dtype = end, dtypes[index % len(dtypes)]
        num_bytes = {"F8_E4M3": 1, "F8_E5M2": 1, "BF16": 2}[dtype]
        for size in shape:
            num_bytes *= size
        end += num_bytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def put_safetensors() -> None:
    prefix = "base_model.model.model.layers.0"
    peft = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    # Hidden size 8, two experts 4 wide, rank 2.
    stacked = {
        f"{prefix}.mlp.experts.base_layer.lora_A.weight": [4, 8],
        f"{prefix}.mlp.experts.base_layer.lora_B.weight": [8, 4],
        f"{prefix}.mlp.experts.lora_A.weight": [4, 4],
        f"{prefix}.mlp.experts.lora_B.weight": [8, 4],
    }
    parameters = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "peft_version": "0.21.0"}
    unsloth = {"auto_mapping": {"unsloth_fixed": True, "base_model_class": "Qwen3MoeForCausalLM"}}
    swapped = {
        f"{prefix}.mlp.experts.lora_A.weight": [4, 8],
        f"{prefix}.mlp.experts.lora_B.weight": [4, 4],
        f"{prefix}.self_attn.q_proj.lora_A.weight": [2, 8],
        f"{prefix}.self_attn.q_proj.lora_B.weight": [8, 2],
    }
    four_bits = {
        f"{prefix}.mlp.experts.gate_up_projs.1.lora_A.weight": [2, 8],
        f"{prefix}.mlp.experts.gate_up_projs.1.lora_B.weight": [8, 2],
        f"{prefix}.mlp.experts.down_projs.1.lora_A.weight": [2, 4],
        f"{prefix}.mlp.experts.down_projs.1.lora_B.weight": [8, 2],
    }
    mlx = {"fine_tune_type": "lora", "lora_parameters": {"rank": 2, "scale": 2.5}}
    mlx_tensors = {
        "model.layers.0.self_attn.q_proj.lora_a": [8, 2],
        "model.layers.0.self_attn.q_proj.lora_b": [2, 8],
        "model.layers.0.mlp.switch_mlp.up_proj.lora_a": [3, 2, 8],
        "model.layers.0.mlp.switch_mlp.up_proj.lora_b": [3, 8, 2],
    }
    for name, config, tensors in [
        ("stacked", peft | parameters, stacked),
        ("stacked_unsloth", peft | parameters | unsloth, stacked),
        ("stacked_swapped", peft | {"target_parameters": ["down_proj"], "peft_version": "0.18.0"}, swapped),
        ("four_bits", peft, four_bits),
        ("mlx", mlx, mlx_tensors),
    ]:
        put("safetensors", name, json.dumps(config).encode() + b"\n----\n" + safetensors(tensors))
    dense = {name: shape for name, shape in swapped.items() if "self_attn" in name}
    eight_bits = safetensors(dense, ("F8_E4M3", "F8_E5M2"))
    put("safetensors", "eight_bits", json.dumps(peft).encode() + b"\n----\n" + eight_bits)


def gguf_text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def gguf(architecture: str, keys: list[tuple[str, bytes]], tensors: list[tuple[str, list[int], int]]) -> bytes:
    """A GGUF adapter of zeros; values of keys and sizes as they stand in the file."""
    keys = [
        ("general.architecture", struct.pack("<I", 8) + gguf_text(architecture)),
        ("general.type", struct.pack("<I", 8) + gguf_text("adapter")),
        ("adapter.type", struct.pack("<I", 8) + gguf_text("lora")),
        ("adapter.lora.alpha", struct.pack("<If", 6, 8.0)),
        *keys,
    ]
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    out += b"".join(gguf_text(key) + value for key, value in keys)
    offset = 0
    for name, sizes, kind in tensors:
        out += gguf_text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
        num_bytes = {0: 4, 1: 2, 30: 2}[kind]
        for size in sizes:
            num_bytes *= size
        offset += -(-num_bytes // 32) * 32
    return out + bytes(-len(out) % 32 + offset)


def gguf_pair(name: str, out: int, rank: int, in_: int, kind: int = 0, experts: int = 0) -> list[tuple[str, list[int], int]]:
    stack = [experts] if experts else []
    return [(f"{name}.weight.lora_a", [in_, rank, *stack], kind), (f"{name}.weight.lora_b", [rank, out, *stack], kind)]


def put_gguf() -> None:
    tokens = ("adapter.alora.invocation_tokens", struct.pack("<IIQII", 9, 4, 2, 7, 9))
    alignment = ("general.alignment", struct.pack("<II", 4, 32))
    tags = ("general.tags", struct.pack("<IIQ", 9, 8, 2) + gguf_text("a") + gguf_text("b"))
    dense = gguf_pair("blk.0.attn_q", 8, 2, 8) + gguf_pair("blk.0.attn_k", 4, 2, 8, 1) + gguf_pair("blk.0.ffn_down", 8, 1, 16, 30)
    moe = gguf_pair("blk.1.ffn_gate_exps", 4, 2, 8, 0, 3) + gguf_pair("blk.1.ffn_down_exps", 8, 2, 4, 0, 3)
    fused = gguf_pair("blk.1.ffn_gate_up_exps", 8, 2, 8, 0, 3) + gguf_pair("blk.1.ffn_gate_inp_shexp", 1, 2, 8)
    vocabulary = [("token_embd.weight.lora_a", [2, 16], 0), ("token_embd.weight.lora_b", [2, 8], 0)]
    norms = [("blk.0.attn_norm.weight", [8], 0), ("output_norm.weight", [8], 0)]
    put("gguf", "dense", gguf("llama", [alignment, tags], dense))
    put("gguf", "invocation", gguf("qwen3", [tokens], dense))
    put("gguf", "experts", gguf("qwen3moe", [], moe))
    put("gguf", "fused", gguf("qwen3next", [], fused + gguf_pair("blk.0.ssm_in", 8, 2, 8)))
    put("gguf", "vocabulary", gguf("llama", [], vocabulary + gguf_pair("output", 16, 2, 8) + norms))
    for path in sorted((GOLDEN / "gguf").rglob("*.gguf")):
        put("gguf", case(path), path.read_bytes())


def main() -> None:
    for target in ("config", "safetensors", "pickle", "gguf"):
        folder = ROOT / "seeds" / target
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    seen = set()
    for config in sorted(GOLDEN.rglob("adapter_config.json")):
        text, name = config.read_bytes(), case(config.parent)
        if text not in seen:
            put("config", f"{name}.json", text, MAX_CONFIG_BYTES)
            seen.add(text)
        weights = config.with_name("adapter_model.safetensors")
        if weights.exists():
            data = weights.read_bytes()
            put("safetensors", name, text + b"\n----\n" + (data if len(data) < 6 << 10 else shortened(data)))
        pickled = config.with_name("adapter_model.bin")
        if pickled.exists():
            put("pickle", f"{name}.bin", pickled.read_bytes())
            if zipfile.is_zipfile(pickled):
                with zipfile.ZipFile(pickled) as archive:
                    inner = [entry for entry in archive.namelist() if entry.endswith("/data.pkl")]
                    put("pickle", f"{name}.pkl", archive.read(inner[0]))
    torch = GOLDEN / "adapter_files" / "torch"
    for expected in sorted(torch.rglob("expected.safetensors")):
        put("safetensors", case(expected.parent), expected.read_bytes())
    put_safetensors()
    put_gguf()


if __name__ == "__main__":
    main()
