"""Translate a config for ZeRO-1 or ZeRO-2 into one for ZeRO-3, and state what changes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from deep_opt_states.config import Unsupported
from deep_opt_states.names import CONFIG_KEY, PARAGRAPH

NOT_IN_STAGE_3 = {
    "allgather_partitions",
    "allgather_bucket_size",
    "cpu_offload",
    "cpu_offload_use_pin_memory",
    "elastic_checkpoint",
    "ignore_unused_parameters",
    "legacy_stage1",
    "round_robin_gradients",
    "use_multi_rank_bucket_allreduce",
}
"""The keys of ``zero_optimization`` that ZeRO-3 refuses or does not read."""


def refuse_older_stage(config: Mapping[str, Any]) -> None:
    """Raise ``Unsupported`` if a config is for ZeRO-1 or ZeRO-2, with the config for ZeRO-3 after an empty line."""
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict) or zero.get("stage") not in (1, 2):
        return
    host = "stays at" if _offloads_optimizer(zero) else "grows, by the optimizer states of the GPUs, to"
    raise Unsupported(
        f'"{CONFIG_KEY}" is enabled, but this configuration is not supported:\n'
        f"zero_optimization.stage: must be 3, found {zero['stage']}.\n"
        'Interleaved offloading works on the sub-groups of ZeRO-3: set "stage": 3, as in the config below, or '
        f'"enabled": false in "{CONFIG_KEY}".{PARAGRAPH}'
        "What changes, by arithmetic: each GPU holds its share of the 16-bit parameters, which are 2 GB per billion, "
        "and gathers the others in forward and in backward: up to 4 GB per billion and micro-batch, nothing on one "
        f'GPU. Host memory {host} 16 GB per billion. The page "Sizes that people train" lists predicted seconds.'
        f"{PARAGRAPH}{json.dumps(as_stage_3(config), indent=2, default=str)}"
    )


def as_stage_3(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config for ZeRO-1 or ZeRO-2 as one for ZeRO-3 that offloads the optimizer, with all other keys."""
    zero = {key: value for key, value in config["zero_optimization"].items() if key not in NOT_IN_STAGE_3}
    zero["stage"] = 3
    if not _offloads_optimizer(zero):
        zero["offload_optimizer"] = {"device": "cpu"}
    # ZeRO-2 keeps whole parameters, which scripts save.
    zero.setdefault("stage3_gather_16bit_weights_on_model_save", True)
    return {**config, "zero_optimization": zero}


def _offloads_optimizer(zero: Mapping[str, Any]) -> bool:
    offload = zero.get("offload_optimizer")
    return isinstance(offload, dict) and offload.get("device") in ("cpu", "nvme")
