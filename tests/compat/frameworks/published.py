"""State the ZeRO-3 offload configs that LLaMA-Factory and axolotl publish.

The settings match the files, key by key, and were compared with the files when they were written here. The files
themselves are not copied; both projects have the Apache-2.0 licence. The Trainer fills in what is ``"auto"``.

- ``LLAMA_FACTORY``: ``examples/deepspeed/ds_z3_offload_config.json`` of hiyouga/LLaMA-Factory, commit
  98ea0e8109298ddad5a539a17e0078bdcc3a9f43. It also offloads the parameters.
- ``AXOLOTL``: ``deepspeed_configs/zero3_bf16_cpuoffload_all.json`` of axolotl-ai-cloud/axolotl, commit
  1377ccc3e46bdc1c8b01a9c23da57446b85aa1d5. It also offloads the parameters, and makes each parameter a sub-group.
"""

from __future__ import annotations

from typing import Any

AUTO = "auto"

_BATCH = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), AUTO
)
_ON_CPU = {"device": "cpu", "pin_memory": True}
_ZERO_3 = {
    "stage": 3,
    "offload_optimizer": _ON_CPU,
    "offload_param": _ON_CPU,
    "contiguous_gradients": True,
    "reduce_bucket_size": AUTO,
    "stage3_prefetch_bucket_size": AUTO,
    "stage3_param_persistence_threshold": AUTO,
}

LLAMA_FACTORY: dict[str, Any] = {
    **_BATCH,
    "zero_allow_untested_optimizer": True,
    "fp16": {
        "enabled": AUTO,
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": AUTO},
    "zero_optimization": {
        **_ZERO_3,
        "overlap_comm": False,
        "sub_group_size": 1e9,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}

AXOLOTL: dict[str, Any] = {
    **_BATCH,
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {
        **_ZERO_3,
        "overlap_comm": True,
        "sub_group_size": 0,
        "max_live_parameters": 0,
        "max_reuse_distance": 0,
        "gather_16bit_weights_on_model_save": True,
    },
    "bf16": {"enabled": True},
    "wall_clock_breakdown": False,
}
