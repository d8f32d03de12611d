"""Train a model whose activations take as much memory as its inputs set, on a GPU of any size."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist

from deep_opt_states.zero.start import planning
from deep_opt_states.zero.step.running_plan import RunningPlan
from perf_model.prediction.hardware import HardwareProfile, Measurement
from perf_model.presets.machines import MACHINES
from perf_model.schedule.placement import Placement
from tests.software_gpu import device
from tests.software_gpu.plugged import plugged
from tests.software_gpu.settings import GIB, Settings
from tests.zero.on_accelerator import on_accelerator
from tests.zero.parity.case import Case
from tests.zero.parity.training import DTYPES, Block, Record, collect

BYTES_PER_TOKEN = 8192
"""The activations that each layer keeps from forward to backward, per token."""

CACHED_TOGETHER = 256
"""The tokens for which a generation caches memory between two forwards."""

SLOWDOWN = 1e5
"""The factor between a machine and the one that the plans are made for: on that, no window hides an update."""

CASE = Case(
    name="growing inputs",
    blocks=({"unit_size": 1_000_000, "gpu_memory_margin_gb": 0.004},),
    steps=0,
    clip=0.5,
    schedule=False,
    widths=(64, 2000, 2000, 64),
    sub_group_size=10**9,
)


@dataclass(frozen=True)
class Step:
    """One step: the tokens of each micro-batch, those of an evaluation before it, and those generated before it."""

    tokens: tuple[int, ...]
    evaluated: int | None = None
    generated: int = 0


class KeepsActivations(torch.autograd.Function):
    """The identity, with memory that is in use from forward to backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size_bytes: int) -> torch.Tensor:
        ctx.save_for_backward(torch.empty(size_bytes, dtype=torch.uint8, device=x.device))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert ctx.saved_tensors
        return grads[0], None


class GrowingNet(torch.nn.Module):
    """Linear layers of the case's widths. ``tokens`` has as many elements as the activations have tokens."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        pairs = zip(case.widths[:-1], case.widths[1:], strict=True)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(inputs, outputs) for inputs, outputs in pairs)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of ``x``, of shape [batch, widths[0]]."""
        for layer in self.layers:
            x = KeepsActivations.apply(torch.nn.functional.gelu(layer(x)), tokens.numel() * BYTES_PER_TOKEN)
        return (x.float() ** 2).mean()


@dataclass
class Seen:
    """The plan of one training after each step, and whether its memory was evicted on this rank."""

    fingerprints: list[str] = field(default_factory=list)
    placed: list[dict[str, int]] = field(default_factory=list)
    """The units by placement."""
    evicted: list[bool] = field(default_factory=list)

    def add(self, running: RunningPlan) -> None:
        """Add the state after a step."""
        placements = running.plan.placements
        self.fingerprints.append(running.plan.fingerprint)
        self.placed.append({placement.value: placements.count(placement) for placement in Placement})
        self.evicted.append(running.is_evicted)


def train_on_gpu(
    steps: Sequence[Step],
    block: Block,
    memory_bytes: int = 4 * GIB,
    case: Case = CASE,
    after_step: Callable[[Any, int], object] | None = None,
) -> tuple[Record, Seen]:
    """Train on a GPU with ``memory_bytes``, and return the bits and what else was seen. Raise its out-of-memory error.

    ``after_step`` gets the engine and the number of steps that are done.
    """
    case = replace(case, accumulation=len(steps[0].tokens))
    record, seen = Record(), Seen()
    # After an error, DeepSpeed keeps references to tensors of the engine before this one.
    gc.collect()
    device.empty_cache()
    settings = Settings(memory_bytes=memory_bytes + device.memory_reserved())
    with plugged(settings), mock.patch.object(planning, "quick_profile", return_value=slow_profile()):
        device.reset_peak_memory_stats()
        torch.manual_seed(17)
        model = GrowingNet(case)
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=case.ds_config(block)
        )
        try:
            losses = []
            for number, step in enumerate(steps):
                if step.evaluated is not None:
                    with torch.no_grad():
                        losses.append(engine(*batch(case, 10_000 + number, step.evaluated)))
                losses += generate(engine, batch(case, 20_000 + number, 1), step.generated)
                for position, tokens in enumerate(step.tokens):
                    loss = engine(*batch(case, number * len(step.tokens) + position, tokens))
                    engine.backward(loss)
                    engine.step()
                    losses.append(loss.detach())
                    del loss
                if block is not None:
                    seen.add(engine.optimizer._running)
                if after_step is not None:
                    after_step(engine, number + 1)
            record.numbers["loss"] = [loss.item() for loss in losses]
            collect(engine.optimizer, record)
        finally:
            engine.destroy()
    return record, seen


def generate(engine: torch.nn.Module, inputs: tuple[torch.Tensor, torch.Tensor], tokens: int) -> list[torch.Tensor]:
    """Return the losses of forwards with one token each, while a cache grows for so many tokens.

    The cache is not an input of the model, like that of transformers, which is no tensor either.
    """
    cache, losses = [], []
    with torch.no_grad():
        for _ in range(0, tokens, CACHED_TOGETHER):
            losses.append(engine(*inputs))
            cache.append(torch.empty(CACHED_TOGETHER * BYTES_PER_TOKEN, dtype=torch.uint8, device=inputs[0].device))
    return losses


def memory_that_stock_needs(steps: Sequence[Step], case: Case = CASE) -> int:
    """Return the memory of a GPU on which stock just fits. For one rank only: an error is not agreed on.

    It is the least with which stock trains here, to 4 MiB, and 8 MiB that the engine before may have left in segments.
    """
    enough, too_small = 256, 0
    while enough - too_small > 4:
        tried = (enough + too_small) // 2
        try:
            train_on_gpu(steps, None, tried * 2**20, case)
            enough = tried
        except torch.OutOfMemoryError:
            too_small = tried
    return (enough + 8) * 2**20


def batch(case: Case, number: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs of so many tokens, the same whenever rank and ``number`` are the same."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    x = torch.randn(4, case.widths[0], generator=generator).to(DTYPES[case.dtype])
    return on_accelerator(x), on_accelerator(torch.zeros(tokens, dtype=torch.uint8))


def slow_profile() -> HardwareProfile:
    """Return the profile of a machine with an H100's ratios on which every update takes long."""
    profile = MACHINES["h100-pcie5"].profile(ranks=1)
    rates = {
        name: measurement if name == "copy_latency_s" else Measurement(samples=(profile.rate(name) / SLOWDOWN,))
        for name, measurement in profile.measurements.items()
    }
    # The rates are below those that are plausible.
    with mock.patch.object(HardwareProfile, "__post_init__", return_value=None):
        return replace(profile, measurements=rates, gpu_peak_flops=None)
