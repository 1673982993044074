"""Makes small byte-level BPE tokenizers, each as `tokenizer.json` and as GGUF metadata, and cases.json with what the
Python `tokenizers` package gives for them. The patterns are those of transformers (`convert_slow_tokenizer.py`).

Run in this folder: python make.py
"""

import json

from gguf import GGUFWriter
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2

LLAMA3 = TikTokenConverter.__init__.__defaults__
LLAMA3 = next(value for value in LLAMA3 if isinstance(value, str) and "{1,3}" in value)

TEXT = ["the quick brown fox isn't there", "I'LL count 1234567 and 12 34", "naïve café e\u0301 Å", "a  b\n\n  c\t\td",
        "don't won't we've they're", "x = y + 10; // ok!!", "日本語 テスト", "hello hello world world 2024 100"] * 3
CASES = TEXT[:8] + ["", " ", "\n", " \n \n x", "I'D 've 1234", "<|im_start|>user<|im_end|>", "a<tool>b", "\u00c5\u0301 é",
                    "€ 😀\u200d👍", "\t tab \r\n crlf", "12345 67890", "l'été", "zebra zebra"]

def split(pattern):
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])

PRE = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                       pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    "llama-bpe": split(LLAMA3),
    "qwen2": split(QWEN2),
}

cases = {}
for name, pre in PRE.items():
    tokenizer = Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    special = ["<|end|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(
        vocab_size=340, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    # A word that no merge reaches: one token where merges are ignored for whole words, several elsewhere.
    patched = json.loads(tokenizer.to_str())
    patched["model"]["vocab"]["zebra"] = len(patched["model"]["vocab"])
    tokenizer = Tokenizer.from_str(json.dumps(patched))
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    add_bos = name == "llama-bpe"
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    data = json.loads(tokenizer.to_str())
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.get)
    kinds = [3 if token in special else 4 if token == "<tool>" else 1 for token in tokens]

    writer = GGUFWriter(f"{name}.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in data["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(add_bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    cases[name] = [{"text": text, "ids": tokenizer.encode(text).ids,
                    "decoded": tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=True)} for text in CASES]
    if name == "qwen2":
        tokenizer.save("tokenizer.json", pretty=False)
with open("cases.json", "w") as file:
    json.dump(cases, file, ensure_ascii=False)
    file.write("\n")
