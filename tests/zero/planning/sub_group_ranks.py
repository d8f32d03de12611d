"""Create engines of a small Llama and print the sub-groups that DeepSpeed makes. Arguments: sub-group sizes."""

from __future__ import annotations

import sys

import deepspeed
import torch.distributed as dist
import transformers

from tests.launch import answer
from tests.zero.process_group import process_group

CONFIG = transformers.LlamaConfig(
    hidden_size=48,
    intermediate_size=100,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    vocab_size=211,
)


def main(sizes: list[int]) -> None:
    for size in sizes:
        model = transformers.AutoModelForCausalLM.from_config(CONFIG)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "sub_group_size": size},
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        if dist.get_rank() == 0:
            answer([flat.numel() for flat in engine.optimizer.fp32_partitioned_groups_flat])
        engine.destroy()


if __name__ == "__main__":
    with process_group():
        main([int(size) for size in sys.argv[1:]])
