"""Train a model whose activations take as much memory as its inputs set, by size or by value, on a GPU of any size."""

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

EXPERTS = 256
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
    """The tokens of each micro-batch, of which the ``busiest`` expert gets some or all, perhaps in backward alone."""

    tokens: tuple[int, ...]
    busiest: int | None = None
    in_backward: bool = False


class KeepsActivations(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size_bytes: int, in_backward: bool) -> torch.Tensor:
        ctx.in_backward_bytes = size_bytes if in_backward else 0
        ctx.save_for_backward(torch.empty(0 if in_backward else size_bytes, dtype=torch.uint8, device=x.device))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        assert ctx.saved_tensors
        torch.empty(ctx.in_backward_bytes, dtype=torch.uint8, device=grads[0].device)
        return grads[0], None, None


class GrowingNet(torch.nn.Module):
    """Linear layers with experts, by token in ``tokens``. All experts have the capacity that the busiest one needs."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.in_backward = False
        pairs = zip(case.widths[:-1], case.widths[1:], strict=True)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(inputs, outputs) for inputs, outputs in pairs)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        size_bytes = int(tokens.cpu().bincount().max()) * BYTES_PER_TOKEN
        for layer in self.layers:
            x = KeepsActivations.apply(torch.nn.functional.gelu(layer(x)), size_bytes, self.in_backward)
        return (x.float() ** 2).mean()


@dataclass
class Seen:
    """The plan after each step, its units by placement, and whether its memory was evicted on this rank."""

    fingerprints: list[str] = field(default_factory=list)
    placed: list[dict[str, int]] = field(default_factory=list)
    evicted: list[bool] = field(default_factory=list)
    failed: list[bool] = field(default_factory=list)

    def add(self, running: RunningPlan) -> None:
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
    *,
    tries_again: bool = False,
) -> tuple[Record, Seen]:
    """Train on a GPU of this size. If ``tries_again``, a micro-batch without memory is trained once more."""
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
                model.in_backward = step.in_backward
                failed = False
                for position, tokens in enumerate(step.tokens):
                    inputs = batch(case, number * len(step.tokens) + position, tokens, step.busiest)
                    try:
                        losses.append(forward_and_backward(engine, inputs))
                    except torch.OutOfMemoryError:
                        if not tries_again:
                            raise
                        failed = True
                    # After the exception, whose traceback refers to activations.
                    if failed:
                        losses.append(forward_and_backward(engine, inputs))
                    engine.step()
                seen.failed.append(failed)
                if block is not None:
                    seen.add(engine.optimizer._running)
                if after_step is not None:
                    after_step(engine, number + 1)
            record.numbers["loss"] = [loss.item() for loss in losses]
            collect(engine.optimizer, record)
        finally:
            engine.destroy()
    return record, seen


def forward_and_backward(engine: Any, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = engine(*inputs)
    engine.backward(loss)
    return loss.detach()


def batch(case: Case, number: int, tokens: int, busiest: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs of so many tokens by rank and ``number``; the first expert receives ``busiest`` of them, or all."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    x = torch.randn(4, case.widths[0], generator=generator).to(DTYPES[case.dtype])
    experts = torch.arange(tokens) % (EXPERTS - 1) + 1
    experts[:busiest] = 0
    return on_accelerator(x), on_accelerator(experts.to(torch.uint8))


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
