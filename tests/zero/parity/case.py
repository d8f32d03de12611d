"""What one parity case trains: a value that every rank and both arms read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

CPU = {"placement": "cpu"}
STREAMED = {"placement": "streamed"}
STREAMED_ONE_SLOT = {"placement": "streamed", "num_slots": 1}
STREAMED_MANY_SLOTS = {"placement": "streamed", "num_slots": 64}
STRIDE_2 = {"placement": "stride", "update_stride": 2}
STRIDE_3 = {"placement": "stride", "update_stride": 3, "num_slots": 3}
STRIDE_BEYOND = {"placement": "stride", "update_stride": 1000}
FRACTION = {"placement": "fraction", "gpu_fraction": 0.4}

AT_ONCE = {"overlap_forward": False}
NOT_AHEAD = {"overlap_backward": False}
SERIAL = {**AT_ONCE, **NOT_AHEAD}
"""Overlap is what blocks get that say nothing of it."""

EVERY_PLACEMENT = (CPU, STREAMED, STREAMED_ONE_SLOT, STREAMED_MANY_SLOTS, STRIDE_2, STRIDE_3, STRIDE_BEYOND, FRACTION)


@dataclass(frozen=True, kw_only=True)
class ParamGroup:
    """Hyperparameters of every ``of``-th parameter, counted from ``first``."""

    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01


@dataclass(frozen=True, kw_only=True)
class Case:
    """``blocks`` are the plugin's config blocks, one arm each, all compared with one stock arm.

    ``sub_group_size`` is of the whole model; a rank's partition is its share.

    ``unused`` layers never get a gradient. The ``sometimes`` layer gets none in the micro-batches of
    ``skips_sometimes``, counted over the whole run. In the steps of ``poisoned`` the loss is multiplied by that
    number (inf, nan, or a number that overflows fp16). ``reload`` = (save after this many steps, load after
    that many): an in-process reload, of the moments if ``load_optimizer_states``.
    ``resume``: trained by one engine, saved, and continued by a fresh one.
    ``caller_accumulates``: with DeepSpeed's managed_gradient_accumulation off, ``step()`` is the boundary.
    ``uses_of_shared``: how often a layer is used with reentrant checkpointing; its gradient arrives as often.
    ``shares_host_memory``, as the CPU accelerator does; without it parameters are published as on a GPU.
    """

    name: str
    blocks: tuple[dict[str, Any], ...]
    world_size: int = 1
    dtype: str = "bf16"
    steps: int = 8
    clip: float = 0.0
    accumulation: int = 1
    schedule: bool = True
    groups: tuple[ParamGroup, ...] = (ParamGroup(),)
    adamw: bool = True
    widths: tuple[int, ...] = (19, 53, 61, 47, 23)
    sub_group_size: int = 1000
    frozen: bool = False
    zero_init: bool = False
    unused: bool = False
    sometimes: bool = False
    skips_sometimes: frozenset[int] = frozenset()
    zero_instead_of_skip: bool = False
    poisoned: dict[int, float] = field(default_factory=dict)
    reload: tuple[int, int] | None = None
    load_optimizer_states: bool = True
    resume: bool = False
    caller_accumulates: bool = False
    uses_of_shared: int = 0
    offload_param: bool = False
    shares_host_memory: bool = False
    zero: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def ds_config(self, block: dict[str, Any] | None) -> dict[str, Any]:
        first = self.groups[0]
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": self.accumulation,
            "managed_gradient_accumulation": not self.caller_accumulates,
            "steps_per_print": 10**9,
            "gradient_clipping": self.clip,
            "optimizer": {
                "type": "AdamW" if self.adamw else "Adam",
                "params": {
                    "lr": first.lr,
                    "betas": list(first.betas),
                    "weight_decay": first.weight_decay,
                    "adam_w_mode": self.adamw,
                },
            },
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "sub_group_size": self.sub_group_size // self.world_size,
                "stage3_param_persistence_threshold": 50,
                "reduce_bucket_size": 4000,
                "stage3_prefetch_bucket_size": 4000,
                **({"offload_param": {"device": "cpu"}} if self.offload_param else {}),
                **self.zero,
            },
            **self.extra,
        }
        if self.dtype == "bf16":
            config["bf16"] = {"enabled": True}
        if self.dtype == "fp16":
            config["fp16"] = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 3, "hysteresis": 1}
        if self.schedule:
            config["scheduler"] = {
                "type": "WarmupDecayLR",
                "params": {
                    "warmup_min_lr": [group.lr / 30 for group in self.groups],
                    "warmup_max_lr": [group.lr for group in self.groups],
                    "warmup_num_steps": 3,
                    "total_num_steps": 3 * self.steps,
                },
            }
        if block is not None:
            config["deep_optimizer_states"] = block
        return config
