"""Describe the model that trains, its batches, and the machine that it trains on."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.rows import REPOSITORY
from examples.common.byte_gpt import ByteGPT, Shape

LARGEST_SLOT = 100_000_000
"""Number of parameters of the largest staging slot that ``accelerator_bytes`` allows for."""


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
    def flops(self) -> float:
        """Return the floating-point operations of one step on one rank.

        There are 6 per parameter and token, and those of attention (arXiv 2204.02311, appendix B).
        """
        attention = 12 * self.layers * self.width * self.context
        return self.tokens * (6 * self.parameters + attention)

    @property
    def tokens(self) -> int:
        """Return the number of tokens of one step on one rank."""
        return self.context * self.micro_batch * self.accumulation


@contextmanager
def measured_profile(*, quick: bool) -> Iterator[Path]:
    """Measure this machine's profile as users do, and yield its file, which is deleted at the end.

    ``deep-opt-states profile`` runs in a process of its own. Raise ``CalledProcessError`` if it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        command = [sys.executable, "-m", "deep_opt_states.cli", "profile", "--output", str(path)]
        command += ["--quick"] if quick else []
        # Errors still appear, since the command prints them on stderr.
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=REPOSITORY)
        yield path
