"""State typical configs for ZeRO-1 and ZeRO-2 that offload the optimizer, key by key.

- ``LLAMA_FACTORY``: ``examples/deepspeed/ds_z2_offload_config.json`` of hiyouga/LLaMA-Factory, commit
  1d6e8b218240c154638f9bdcb76a1a089c27891b, without two blocks of monitoring that DeepSpeed ignores.
- ``MS_SWIFT``: ``swift/config/zero2_offload.json`` of modelscope/ms-swift, commit
  a542b7a4433e91a68408c84bd35c7848887d4727.
- ``TRANSFORMERS``: the example for ZeRO-2 in the documentation of Hugging Face's Trainer, with the optimizer and the
  scheduler that its configs have.
- ``CPU_OFFLOAD``: the key of 2020, which DeepSpeed still reads.
- ``MIXED``: one that has keys of ZeRO-3 as well, for ZeRO-1.
"""

from __future__ import annotations

from typing import Any

from tests.software_gpu.published_configs.published import AUTO
from tests.software_gpu.published_configs.published import LLAMA_FACTORY as LLAMA_FACTORY_STAGE_3

ON_CPU = {"device": "cpu", "pin_memory": True}

LLAMA_FACTORY: dict[str, Any] = {
    **LLAMA_FACTORY_STAGE_3,
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": ON_CPU,
        "allgather_partitions": True,
        "allgather_bucket_size": 5e8,
        "overlap_comm": False,
        "reduce_scatter": True,
        "reduce_bucket_size": 5e8,
        "contiguous_gradients": True,
        "round_robin_gradients": True,
    },
}

MS_SWIFT: dict[str, Any] = {
    **{key: value for key, value in LLAMA_FACTORY.items() if key != "zero_allow_untested_optimizer"},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": ON_CPU,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": False,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
    },
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}

TRANSFORMERS: dict[str, Any] = {
    **LLAMA_FACTORY,
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), AUTO)},
    "scheduler": {
        "type": "WarmupLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), AUTO),
    },
    "zero_optimization": {**LLAMA_FACTORY["zero_optimization"], "overlap_comm": True},
}

CPU_OFFLOAD: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    "fp16": {"enabled": False},
    "zero_optimization": {"stage": 2, "cpu_offload": True, "contiguous_gradients": True, "overlap_comm": True},
}

MIXED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 1,
        "offload_optimizer": {"device": "none"},
        "sub_group_size": 1e9,
        "stage3_prefetch_bucket_size": 5e8,
        "stage3_gather_16bit_weights_on_model_save": False,
        "ignore_unused_parameters": True,
        "elastic_checkpoint": True,
    },
}

CONFIGS = {
    "LLaMA-Factory": LLAMA_FACTORY,
    "ms-swift": MS_SWIFT,
    "transformers": TRANSFORMERS,
    "cpu_offload": CPU_OFFLOAD,
    "mixed": MIXED,
}
