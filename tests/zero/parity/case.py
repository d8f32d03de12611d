"""The parity case: a frozen value from which every rank makes the training with stock and with the plugin."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from perf_model.schedule.host_layout import KEYS_OF_STATES

CPU: dict[str, Any] = {"placement": "cpu"}
STREAMED = {"placement": "streamed", "unit_size": 300}
STREAMED_ONE_SLOT = {"placement": "streamed", "num_slots": 1}
STREAMED_MANY_SLOTS = {"placement": "streamed", "num_slots": 64}
STRIDE_2 = {"placement": "stride", "update_stride": 2, "unit_size": 700}
STRIDE_3 = {"placement": "stride", "update_stride": 3, "num_slots": 3, "unit_size": 500}
RESIDENT = {"placement": [{"match": "*", "states": "resident"}]}
STRIDE_OF_SUB_GROUPS = {"placement": "stride", "update_stride": 2}
WITHOUT_FORWARD_OVERLAP = {"overlap_forward": False}
WITHOUT_BACKWARD_OVERLAP = {"overlap_backward": False}
SERIAL = {**WITHOUT_FORWARD_OVERLAP, **WITHOUT_BACKWARD_OVERLAP}
"""Blocks without these keys overlap the update with forward and backward."""

NO_THROUGHPUT_TIMER = {"timers": {"throughput": {"enabled": False}}}
"""Disables the timer, which synchronizes the device twice per step from the third step on, and would hide races."""

EVERY_PLACEMENT = (CPU, STREAMED, STREAMED_ONE_SLOT, STREAMED_MANY_SLOTS, STRIDE_2, STRIDE_OF_SUB_GROUPS)


def not_deferred(block: dict[str, Any]) -> dict[str, Any]:
    return {**block, **WITHOUT_FORWARD_OVERLAP}


def eager(block: dict[str, Any]) -> dict[str, Any]:
    return {**block, "eager": True}


def by_name(rules: dict[str, str], **others: Any) -> dict[str, Any]:
    """Return the block with these rules by name, in order. A space separates the patterns of one rule."""
    matches = (patterns.split() if " " in patterns else patterns for patterns in rules)
    placement = [{"match": match, "states": states} for match, states in zip(matches, rules.values(), strict=True)]
    return {"placement": placement, **others}


def by_sub_group(*states: str) -> dict[str, Any]:
    """Return the block that places the sub-groups of a ``ParityNet``: a bias and the next layer's weight each."""
    names = ["layers.0.weight", *(f"layers.{i}.bias layers.{i + 1}.weight" for i in range(len(states) - 2)), "*"]
    return by_name(dict(zip(names, states, strict=True)))


@dataclass(frozen=True, kw_only=True)
class ParamGroup:
    """The hyperparameters of one param group. The trainable parameters are assigned to the groups round-robin."""

    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training run with stock, and the same run with the plugin once for each config block in ``blocks``.

    ``sub_group_size`` is for the whole model; it is divided by the number of ranks. ``states`` is a value of
    ``plan --states``. With ``disk``, the folder of ``nvme_path``, only the plugin offloads to it; stock uses the CPU.

    ``unused``: a layer never gets a gradient. ``sometimes``: one gets none in the micro-batches ``skips_sometimes`` of
    the whole run; ``zero_instead_of_skip`` replaces the missing gradients by zeros. ``uses_of_shared``: how often one
    layer is used under reentrant checkpointing. ``poisoned``: in these steps the loss is multiplied by the number.

    ``reload``: the number of steps before a checkpoint is saved, and before the same engine loads it, with the moments
    if ``load_optimizer_states``. ``resume``: one engine trains and saves, and a fresh engine continues.

    ``caller_accumulates``: DeepSpeed's ``managed_gradient_accumulation`` is off, and ``step()`` is the boundary.
    ``shares_host_memory``: model and states share memory, as on the CPU accelerator. Otherwise parameters are published
    as on a GPU. ``thorough``: only ``make test-all`` trains the case, which combines features of other cases.
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
    thorough: bool = False
    states: str = "fp32"
    disk: str = ""
    zero: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def ds_config(self, block: dict[str, Any] | None) -> dict[str, Any]:
        """Return the DeepSpeed config with the plugin's config block, or for stock if ``block`` is None."""
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
            config["bf16"] = {"enabled": True, **dict.fromkeys(KEYS_OF_STATES[self.states], True)}
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
            if self.disk:
                config["zero_optimization"]["offload_optimizer"] = {"device": "nvme", "nvme_path": self.disk}
        return config
