"""State the ZeRO-3 offload configs that LLaMA-Factory, axolotl, ms-swift and OpenRLHF publish.

The settings are those of the files, key by key, and were compared with the files when they were written here. The files
themselves are not copied; all these projects have the Apache-2.0 licence. The Trainer fills in what is ``"auto"``.

- ``LLAMA_FACTORY``: ``examples/deepspeed/ds_z3_offload_config.json`` of hiyouga/LLaMA-Factory, commit
  98ea0e8109298ddad5a539a17e0078bdcc3a9f43. It offloads the parameters, too.
- ``LLAMA_FACTORY_PARTIAL``: ``examples/deepspeed/ds_z3_partial_offload_config.json`` of the same project, commit
  1348cc9a50b02eb2f7fa717b170ac47956ed6ae1. It offloads the optimizer alone.
- ``AXOLOTL``: ``deepspeed_configs/zero3_bf16_cpuoffload_all.json`` of axolotl-ai-cloud/axolotl, commit
  1377ccc3e46bdc1c8b01a9c23da57446b85aa1d5. It offloads the parameters, too, and makes each parameter a sub-group.
- ``MS_SWIFT``: ``swift/config/zero3_offload.json`` of modelscope/ms-swift, commit
  b228e40f11f2a8f4b67761bc92597ccb5b4f1739. Its settings of ZeRO are those of ``LLAMA_FACTORY``.
- ``OPENRLHF``: the config that ``get_train_ds_config`` in ``openrlhf/utils/deepspeed/deepspeed_utils.py`` of
  OpenRLHF/OpenRLHF, commit 0a3fbcef054830110a33165744ee8499df218377, returns for ``--zero_stage 3 --adam_offload`` and
  defaults otherwise. OpenRLHF adds the batch sizes, and passes a ``DeepSpeedCPUAdam`` to ``deepspeed.initialize``.

Axolotl's ``zero3_bf16_cpuoffload_params.json`` keeps the optimizer states on the GPU. There is nothing to interleave,
and the plugin refuses it.
"""

from __future__ import annotations

from typing import Any

EMPTY_BLOCK = "{}"
"""The block that is added to a published config, as JSON."""

AUTO = "auto"

_BATCH = dict.fromkeys(
    (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    ),
    AUTO,
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

LLAMA_FACTORY_PARTIAL: dict[str, Any] = {
    **LLAMA_FACTORY,
    "zero_force_ds_cpu_optimizer": True,
    "zero_optimization": {
        **{key: value for key, value in LLAMA_FACTORY["zero_optimization"].items() if key != "offload_param"},
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
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

MS_SWIFT: dict[str, Any] = {
    **{key: value for key, value in LLAMA_FACTORY.items() if key != "zero_allow_untested_optimizer"},
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}

OPENRLHF: dict[str, Any] = {
    "steps_per_print": 100,
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "none"},
        "offload_optimizer": _ON_CPU,
        **dict.fromkeys(
            (
                "sub_group_size",
                "stage3_max_live_parameters",
                "stage3_max_reuse_distance",
                "stage3_param_persistence_threshold",
                "stage3_prefetch_bucket_size",
                "reduce_bucket_size",
            ),
            AUTO,
        ),
        "zero_hpz_partition_size": 1,
        "zero_quantized_weights": False,
        "zero_quantized_gradients": False,
        "reduce_scatter": True,
    },
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "wall_clock_breakdown": False,
    "data_types": {"grad_accum_dtype": None},
    "checkpoint": {"load_universal": False},
    "compile": {"deepcompile": False},
    "tensor_parallel": {"autotp_size": 1},
}

PUBLISHED = {"LLaMA-Factory": LLAMA_FACTORY, "LLaMA-Factory, partial": LLAMA_FACTORY_PARTIAL, "axolotl": AXOLOTL}
