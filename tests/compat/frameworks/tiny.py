"""Write a tiny Qwen2 with random weights, its tokenizer and training data, with the transformers of a framework.

tiny.py FOLDER
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EXAMPLES = 40


def write_model(folder: Path) -> None:
    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIALS[0],
        eos_token=SPECIALS[2],
        additional_special_tokens=[SPECIALS[1]],
        chat_template=CHAT_TEMPLATE,
    )
    fast.save_pretrained(folder)
    torch.manual_seed(11)
    config = Qwen2Config(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=0,
    )
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(folder)


def write_data(folder: Path) -> None:
    code = Path(argparse.__file__).read_text(encoding="utf-8").splitlines()
    lines = [line.strip() for line in code if len(line.strip()) > 20][:EXAMPLES]
    pairs = [(line[:10], line[10:80]) for line in lines]
    chats = [_chat(left, right) for left, right in pairs]
    alpaca = [{"instruction": left, "input": "", "output": right} for left, right in pairs]
    preferred = [{"instruction": left, "input": "", "chosen": right, "rejected": right[::-1]} for left, right in pairs]
    rejected = [{**chat, "rejected_response": right[::-1]} for chat, (_, right) in zip(chats, pairs, strict=True)]
    both = [
        {"chosen": _chat(left, right)["messages"], "rejected": _chat(left, right[::-1])["messages"]}
        for left, right in pairs
    ]
    files = {"chat": chats, "alpaca": alpaca, "preferred": preferred, "rejected": rejected, "both": both}
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    # LLaMA-Factory finds its data by this file.
    described = {
        "alpaca": {"file_name": "alpaca.jsonl"},
        "preferred": {
            "file_name": "preferred.jsonl",
            "ranking": True,
            "columns": {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"},
        },
    }
    (folder / "dataset_info.json").write_text(json.dumps(described), encoding="utf-8")


def _chat(left: str, right: str) -> dict[str, list[dict[str, str]]]:
    return {"messages": [{"role": "user", "content": left}, {"role": "assistant", "content": right}]}


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    write_model(target / "model")
    write_data(target)
