"""Emulate one rank that trains Llama-3-8B on a node with H100s, scaled to a Llama of some million parameters.

**The run.** Llama-3-8B on 1 or 4 GPUs of one node, micro-batches of one sequence of 2,048 tokens, and recomputed
activations. LLaMA-Factory recomputes by default. The machine is the preset ``h100-pcie5``, whose host memory and cores
are divided by the ranks of the node. Gathers between GPUs take no time, as in ``Job``.

**The scale.** One parameter of the small model stands for ``scale`` parameters of the rank. Everything that is counted
in parameters is divided by it: the link, host memory, Adam on CPU and GPU, the memory of the GPU, the gigabytes of the
block's default margin, the unit sizes that the planner chooses from, and the numbers of parameters that a config names,
as 1e9. So copies and updates of the small model take the time of the run's, and as large a share of the GPU's memory.

The numbers that the Trainer fills in for ``"auto"`` follow from the small model's width. They are in the same ratio to
a layer as those of the run, since both models have the same shape: 3.5 times the width in the feed-forward layers, and
a fourth of the heads for keys and values. The small model has fewer layers.

**Forward** takes the time of the run's matrix products, by the rate of operations that makes it so. Recomputation and
backward follow from it. All other kernels take no time.

**The slowdown.** All emulated seconds are multiplied by it, so that the Python code, which runs at the speed of this
machine, takes a small part of them. It makes the plugin's iteration no faster, and as it adds the same to both arms, it
makes the ratio smaller.

**Two sizes are not scaled.** The allocator's segments of 2 and 20 MiB are a larger share of the small GPU, and the
small model has a vocabulary of bytes: the run's is 13 % of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.emulated.host_passes import HostPasses
from benchmarks.emulated.run import EmulatedRun, SmallModel
from perf_model.training_run.job import Job
from perf_model.training_run.micro_batch import PARAM_BYTES
from tests.software_gpu import settings
from tests.software_gpu.hugging_face import trainer_on_device

BYTES = 256
"""The vocabulary of the small model."""

COUNTS_OF_A_RANK = ("sub_group_size",)
COUNTS_OF_ALL_RANKS = (
    "max_live_parameters",
    "max_reuse_distance",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
)
"""The numbers of parameters in a published config."""


@dataclass(frozen=True, kw_only=True)
class SmallLlama(SmallModel):
    """The Llama that trains for real, with attention heads of 64 elements."""

    layers: int = 3
    width: int = 512
    context: int = 16

    @property
    def llama(self) -> LlamaConfig:
        """Return the shape, with Llama-3's ratios."""
        heads = self.width // 64
        return LlamaConfig(
            vocab_size=BYTES,
            hidden_size=self.width,
            intermediate_size=7 * self.width // 2,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 4),
            max_position_embeddings=self.context,
            use_cache=False,
            tie_word_embeddings=False,
        )

    @cached_property
    def parameters(self) -> int:
        """Count the model's parameters."""
        with torch.device("meta"):
            return sum(param.numel() for param in AutoModelForCausalLM.from_config(self.llama).parameters())

    @property
    def forward_flops(self) -> float:
        """Return the operations of the matrix products of forward."""
        products = self.parameters - BYTES * self.width
        attention = 2 * self.layers * self.width * self.context
        return 2.0 * self.tokens * (products + attention)


@dataclass(frozen=True, kw_only=True)
class H100Run(EmulatedRun):
    """A training run of Llama-3-8B on ``ranks`` H100s of one node."""

    machine: str = "h100-pcie5"
    model: str = "Llama-3-8B"
    small: SmallLlama = field(default_factory=SmallLlama)

    busy_s: float = 3.0
    """Emulated seconds of the arithmetic and of the copies of parameters and gradients, which decide the slowdown."""

    @classmethod
    def scaled_for(cls, ranks: int) -> H100Run:
        """Return the run with a small model for which one of its parameters stands for about 190 of a rank.

        One rank has all parameters of the run, and needs the larger small model, whose Python code takes longer.
        """
        if ranks == 1:
            return cls(ranks=ranks, small=SmallLlama(layers=8, width=640), busy_s=5.0)
        return cls(ranks=ranks)

    @cached_property
    def job(self) -> Job:
        """Return the run as ``perf_model`` describes it, with recomputed activations."""
        return replace(super().job, recompute=True)

    @cached_property
    def slowdown(self) -> float:
        """Return how many emulated seconds one second of the machine takes."""
        partition_bytes = PARAM_BYTES * self.job.shape.numel / self.ranks
        # Offloaded parameters are copied up in forward and in backward, and gradients down.
        copies_s = 3 * partition_bytes / self.profile.rate("h2d_bytes_per_s")
        return self.busy_s / (self.forward_s + self.backward_s + copies_s)

    def scaled(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return a published config with its numbers of parameters scaled, and all else unchanged."""
        zero = dict(config["zero_optimization"])
        for keys, scale in ((COUNTS_OF_A_RANK, self.scale), (COUNTS_OF_ALL_RANKS, self.scale * self.ranks)):
            for key in keys:
                if key in zero:
                    zero[key] = round(zero[key] / scale)
        return {**config, "zero_optimization": zero}

    @contextmanager
    def trained_by_trainer(self) -> Iterator[HostPasses]:
        """Emulate the machine inside this context, in which Hugging Face's Trainer trains."""
        memory = settings.changed(memory_bytes=self.memory_bytes)
        with self.planned_by_plugin() as passes, memory, trainer_on_device():
            yield passes
