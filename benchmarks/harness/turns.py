"""Arms take turns: each turn is a fresh engine on the same model, seed and text, for some iterations.

One engine lives at a time, so that the largest model that stock offload holds can be measured; and since every turn
does the same, the bits at its end can be compared with any other's.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from statistics import median
from typing import Any

import deepspeed
import psutil
import torch
from deepspeed.accelerator import get_accelerator

import deep_opt_states  # noqa: F401 (activates where the package is not installed)
from benchmarks.harness.arms import OURS, Arm
from benchmarks.harness.setting import Setting
from benchmarks.harness.sizes import Effort
from deep_opt_states.report.comparison import Compared
from examples.byte_gpt import ByteGPT, StdlibText
from perf_model.memory import Where
from perf_model.timeline import Phase, seconds_of

SEED = 17
WARM_UP = 3
"""Iterations: the first ones build what DeepSpeed builds lazily, and its trace."""


@dataclass
class Turn:
    """Seconds by iteration, without those that warm up.

    ``forward_s`` and ``backward_s`` are of all micro-batches of an iteration. ``exposed_s`` and ``hidden_s`` are of the
    update, of our arms only.
    """

    arm: Arm
    parameters: int = 0
    plan: str = ""
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    iteration_s: list[float] = field(default_factory=list)
    exposed_s: list[float] = field(default_factory=list)
    hidden_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    digest: str = ""
    """Of the fp32 master weights, the same on all ranks."""
    gpu_peak_bytes: int = 0
    host_bytes: int = 0
    """That this process has more when training is over than before it built the engine."""
    compared: list[Compared] = field(default_factory=list)
    """Predicted and measured, where the plugin predicts: with a plan, or a profile in the config."""
    pinned_bytes: int = 0
    """Page-locked by this process, or by DeepSpeed in it."""
    settings: str = ""
    """What says that the arm is what it is called."""

    def same_bits_as(self, other: Turn) -> bool:
        return self.digest == other.digest and self.losses == other.losses

    @property
    def median_s(self) -> float:
        return median(self.iteration_s)


class Clock:
    """Moments of the model's stream: no wait between the phases of an iteration."""

    def __init__(self) -> None:
        self._accelerator = get_accelerator()
        self._synchronous = self._accelerator.is_synchronized_device()

    def now(self) -> Any:
        if self._synchronous:
            return time.perf_counter()
        event = self._accelerator.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        if self._synchronous:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def take_turn(arm: Arm, setting: Setting, iterations: int, warm_up: int = WARM_UP) -> Turn:
    """Raises ``AssertionError`` if the engine is not the arm's."""
    turn = Turn(arm)
    before_bytes = psutil.Process().memory_info().rss
    with engine_of(arm, setting) as engine:
        _describe(turn, engine)
        _train(turn, engine, setting, iterations, warm_up, before_bytes)
        turn.digest = _digest(engine)
        if turn.plan:
            turn.compared = engine.optimizer.report.compared()
    return turn


def take_turns(arms: Sequence[Arm], setting: Setting, effort: Effort) -> dict[str, list[Turn]]:
    """By arm, one a round, in an order that alternates; after one turn of the first that nobody counts: files,
    allocators, compilers."""
    take_turn(arms[0], setting, effort.iterations)
    ran: dict[str, list[Turn]] = {arm.name: [] for arm in arms}
    for number in range(effort.rounds):
        for arm in arms if number % 2 == 0 else reversed(arms):
            ran[arm.name].append(take_turn(arm, setting, effort.iterations))
    return ran


@contextmanager
def engine_of(arm: Arm, setting: Setting) -> Iterator[Any]:
    """At the end its memory is given back."""
    with arm.around():
        torch.manual_seed(SEED)
        with torch.device(get_accelerator().current_device_name()):
            model = ByteGPT(setting.shape)
        config = arm.configure(setting.config)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        try:
            yield engine
        finally:
            tensors = list(_tensors_of(engine))
            engine.destroy()
            # DeepSpeed 0.19.8 keeps engines alive that are destroyed: a gigabyte a turn, for 50 M parameters.
            for tensor in tensors:
                tensor.grad = None
                storage = tensor.untyped_storage()
                # With all that are views of it. The slab of ours is given back already.
                if storage.resizable():
                    storage.resize_(0)
            del engine, tensors
            gc.collect()


def batch_of(engine: Any, setting: Setting, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Real text, inputs and targets; counted in micro-batches."""
    inputs, targets = _text().batch(
        seed=SEED,
        step=number,
        rank=torch.distributed.get_rank(),
        batch_size=setting.micro_batch,
        context=setting.context,
    )
    return inputs.to(engine.device), targets.to(engine.device)


@cache
def _text() -> StdlibText:
    return StdlibText()


def _tensors_of(engine: Any) -> Iterator[torch.Tensor]:
    """What is large."""
    optimizer = engine.optimizer
    yield from engine.module.parameters()
    yield from optimizer.fp32_partitioned_groups_flat
    yield from optimizer.fp16_partitioned_groups_flat
    for state in optimizer.state.values():
        yield from (its for its in state.values() if torch.is_tensor(its))
    for name, its in vars(optimizer).items():
        if torch.is_tensor(its) and name.endswith("buffer"):
            yield its


def _describe(turn: Turn, engine: Any) -> None:
    optimizer = engine.optimizer
    found = type(optimizer).__name__
    assert found == turn.arm.optimizer_class, f"{turn.arm.name}: the optimizer is {found}"
    turn.parameters = sum(param.ds_numel for param in engine.module.parameters())
    offload = engine.zero_offload_optimizer()
    turn.settings = f"{found} over {type(optimizer.optimizer).__name__}, overlap_comm {engine.zero_overlap_comm()}"
    if offload is not None:
        turn.settings += (
            f", pin_memory {offload.pin_memory}, ratio {offload.ratio}, super_offload {offload.super_offload}"
        )
    if found == OURS:
        turn.plan = str(optimizer.plan)


def _train(turn: Turn, engine: Any, setting: Setting, iterations: int, warm_up: int, before_bytes: int) -> None:
    accelerator = get_accelerator()
    if turn.plan:
        _watch(turn, engine.optimizer.report, skip=warm_up)
    clock = Clock()
    moments: list[list[Any]] = []
    losses = []
    accelerator.reset_peak_memory_stats()
    for step in range(warm_up + iterations):
        marks = [clock.now()]
        for micro in range(setting.accumulation):
            inputs, targets = batch_of(engine, setting, step * setting.accumulation + micro)
            marks.append(clock.now())
            loss = engine(inputs, targets)
            marks.append(clock.now())
            engine.backward(loss)
            marks.append(clock.now())
            losses.append(loss.detach())
            engine.step()
        marks.append(clock.now())
        moments.append(marks)
    # What goes on beside the next forward ends in this arm's turn, and is told.
    if turn.plan:
        _ = engine.optimizer.state
    accelerator.synchronize()
    turn.host_bytes = psutil.Process().memory_info().rss - before_bytes
    turn.pinned_bytes = _pinned_bytes(turn, engine)
    turn.gpu_peak_bytes = accelerator.max_memory_allocated() or 0
    turn.losses = [float(loss) for loss in losses]
    for number, marks in enumerate(moments[warm_up:], start=warm_up):
        phases = [clock.seconds(start, end) for start, end in pairwise(marks)]
        turn.forward_s.append(sum(phases[1:-1:3]))
        turn.backward_s.append(sum(phases[2:-1:3]))
        turn.step_s.append(phases[-1])
        # From one step's end to the next's: what an update leaves to the next forward counts.
        turn.iteration_s.append(clock.seconds(moments[number - 1][-1], marks[-1]))


def _pinned_bytes(turn: Turn, engine: Any) -> int:
    """What PyTorch's allocator of page-locked memory has had at most, and our slab, which does not come from there."""
    if not torch.cuda.is_available():
        return 0
    slab = 0
    if turn.plan:
        slab = sum(its.each_bytes for its in engine.optimizer.ledger.reserved if its.where is Where.PINNED)
    return slab + int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))


def _watch(turn: Turn, report: Any, skip: int) -> None:
    updated = report.updated
    count = 0

    def noted(phases: Any, timeline: Callable[[], Any]) -> None:
        nonlocal count
        count += 1
        if count > skip:
            exposed_s = seconds_of(Phase.EXPOSED, phases)
            turn.exposed_s.append(exposed_s)
            turn.hidden_s.append(timeline().hidden_s(exposed_s))
        updated(phases, timeline)

    report.updated = noted


def _digest(engine: Any) -> str:
    """Whatever the sub-groups: parameter by parameter. A collective."""
    digest = hashlib.sha256()
    for param in engine.module.parameters():
        full = deepspeed.utils.safe_get_full_fp32_param(param)
        digest.update(full.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
