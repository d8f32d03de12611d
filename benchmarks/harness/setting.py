"""Describe the model that trains and its batches, and choose them and the repetitions by the kind of accelerator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from deep_opt_states.host import machine
from examples.common.byte_gpt import ByteGPT, Shape

LARGEST_SLOT = 100_000_000
"""Number of parameters of the largest staging slot that ``accelerator_bytes`` allows for."""

HOST_BYTES_PER_PARAM = 26
"""Bytes per parameter that host memory must have: stock's 18, plus the model and its temporaries if the CPU trains."""


def trains_on_gpu() -> bool:
    """Return whether DeepSpeed's accelerator is a GPU: with ``DS_ACCELERATOR=cpu``, a machine with one may not."""
    return bool(get_accelerator().device_name() == "cuda")


@dataclass(frozen=True, kw_only=True)
class TrainingSetting:
    """A model and its batches: ``context`` bytes per sequence, ``micro_batch`` sequences per micro-batch, and
    ``accumulation`` micro-batches per step."""

    layers: int
    width: int
    context: int
    micro_batch: int
    accumulation: int = 1
    sub_group_size: int = 100_000_000

    @property
    def shape(self) -> Shape:
        """Return the model's shape, with 64 elements per attention head."""
        return Shape(layers=self.layers, width=self.width, heads=self.width // 64, context=self.context)

    @property
    def parameters(self) -> int:
        """Count the model's parameters."""
        with torch.device("meta"):
            return sum(param.numel() for param in ByteGPT(self.shape).parameters())

    @property
    def config(self) -> dict[str, Any]:
        """Return the part of DeepSpeed's config that all variants share."""
        return {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            "steps_per_print": 10**9,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "zero_optimization": {"sub_group_size": self.sub_group_size},
        }

    @property
    def accelerator_bytes(self) -> int:
        """Return the accelerator memory that a variant may use for its updates, in addition to the model's memory.

        The amount is two slots of a sub-group and the 16-bit gradients of all parameters. Slots of larger sub-groups
        get no more than ``LARGEST_SLOT``: with all states on the accelerator there would be no offloading.
        """
        slots = 2 * 12 * min(self.sub_group_size, self.parameters, LARGEST_SLOT)
        return slots + 2 * self.parameters

    @property
    def tokens(self) -> int:
        """Return the number of tokens of one step on one rank."""
        return self.context * self.micro_batch * self.accumulation


QUICK = TrainingSetting(layers=2, width=128, context=64, micro_batch=2, sub_group_size=100_000)
"""A model that only shows that a benchmark runs."""

ON_CPU = TrainingSetting(layers=4, width=1024, context=64, micro_batch=1, sub_group_size=10_000_000)
"""51.0 M parameters."""

ON_GPU = TrainingSetting(layers=20, width=2048, context=2048, micro_batch=1, sub_group_size=100_000_000)
"""1.0 B parameters."""

LARGER_ON_CPU = [replace(ON_CPU, layers=layers, width=width) for layers, width in ((18, 1024), (12, 2048), (24, 2048))]
"""227 and 605 M parameters, and 1.2 B."""

LARGER_ON_GPU = [replace(ON_GPU, layers=layers, width=width) for layers, width in ((28, 2560), (32, 3200), (32, 4608))]
"""2.2, 3.9 and 8.2 B parameters."""


def default_setting(*, quick: bool) -> TrainingSetting:
    """Return the setting that most benchmarks use on this accelerator."""
    if quick:
        return QUICK
    return ON_GPU if trains_on_gpu() else ON_CPU


def larger_settings() -> list[TrainingSetting]:
    """Return larger models, up to one whose stock offloading does not fit into this machine's memory."""
    return LARGER_ON_GPU if trains_on_gpu() else LARGER_ON_CPU


def with_default_sub_groups(setting: TrainingSetting) -> TrainingSetting:
    """Return ``setting`` with DeepSpeed's default sub-group size: a billion parameters."""
    return replace(setting, sub_group_size=DeepSpeedZeroConfig().sub_group_size)


def fits_host_memory(setting: TrainingSetting) -> bool:
    """Return whether stock offloading of this model fits into the host memory of this machine."""
    return HOST_BYTES_PER_PARAM * setting.parameters < machine.memory().usable_bytes


@dataclass(frozen=True, kw_only=True)
class Repetitions:
    """How often each variant runs: once per round, with ``iterations`` counted iterations per run."""

    iterations: int
    rounds: int


def repetitions(*, quick: bool) -> Repetitions:
    """Return the usual number of rounds and iterations for this accelerator."""
    if quick:
        return Repetitions(iterations=2, rounds=1)
    # If the CPU trains, runs differ more than iterations do: other processes also use the memory bandwidth.
    # On a GPU, creating an engine of a billion parameters takes most of a run: a run took 28 s on an H100. ZenFlow
    # updates all parameters in every fourth iteration only.
    return Repetitions(iterations=6, rounds=2) if trains_on_gpu() else Repetitions(iterations=3, rounds=8)


def fewest_repetitions(*, quick: bool) -> Repetitions:
    """Return the number of rounds and iterations for settings that take long."""
    return repetitions(quick=quick) if quick else Repetitions(iterations=3, rounds=2)
