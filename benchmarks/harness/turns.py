"""Arms take turns: each turn is a fresh engine on the same model, seed and text, for some iterations.

One engine lives at a time, so that the largest model that stock offload holds can be measured; and since every turn
does the same, the bits at its end can be compared with any other's.
"""

from __future__ import annotations

import gc
import hashlib
import logging
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
from benchmarks.harness.ablated import process_as_it_was
from benchmarks.harness.arms import Arm
from benchmarks.harness.setting import Setting
from benchmarks.harness.sizes import Effort
from deep_opt_states.report.comparison import Compared
from examples.byte_gpt import ByteGPT, StdlibText
from perf_model.prediction.memory import Where
from perf_model.prediction.timeline import Phase
from perf_model.schedule.placement import Placement
from perf_model.schedule.workload import Workload

SEED = 17
WARM_UP = 3
"""Iterations: the first ones build what DeepSpeed builds lazily, and its trace. One more follows those that count:
beside its forward the last update goes on."""


@dataclass
class Turn:
    """Seconds by iteration, without those that warm up.

    ``forward_s`` and ``backward_s`` are of all micro-batches of an iteration; what they wait for the update before is
    not in them, but in that update's ``exposed_s``, with all of ``step()``. ``hidden_s`` is of our arms only.
    """

    arm: Arm
    setting: Setting
    plan: str = ""
    workload: Workload | None = None
    streams: bool = False
    """Whether the plan updates anything on the accelerator."""
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
    turn = Turn(arm, setting)
    waits = Waits()
    before_bytes = psutil.Process().memory_info().rss
    with engine_of(arm, setting) as engine:
        turn.settings = arm.check(engine)
        if arm.block is not None:
            plan = engine.optimizer.plan
            turn.plan, turn.workload = str(plan), plan.workload
            turn.streams = any(its is not Placement.CPU for its in plan.placements)
            waits.watch(engine.optimizer)
        _train(turn, engine, setting, warm_up + iterations + 1, before_bytes, waits)
        turn.digest = _digest(engine)
        if turn.plan:
            turn.compared = engine.optimizer.report.compared()
    # The last update is told when the engine is destroyed.
    waits.account(turn)
    for name in ("forward_s", "backward_s", "step_s", "iteration_s", "exposed_s", "hidden_s"):
        setattr(turn, name, getattr(turn, name)[warm_up:-1])
    return turn


class Waits:
    """What each update made the model wait after ``step()`` had returned, by phase of the next iteration; and what of
    it went on beside the model."""

    def __init__(self) -> None:
        self._exposure: Any = None
        self._in_step: list[int] = []
        """Waits of each update by the time that ``step()`` has returned."""
        self._by_forward: list[int] = []
        """And by the end of the next forward."""
        self._in_forward_s: list[float] = []
        self._in_backward_s: list[float] = []
        self._hidden_s: list[float] = []

    def watch(self, optimizer: Any) -> None:
        self._exposure, report = optimizer._exposure, optimizer.report
        updated = report.updated

        def noted(phases: Any, timeline: Callable[[], Any]) -> None:
            waits_s = [span.end_s - span.start_s for span in phases if span.phase is Phase.EXPOSED]
            self._note(waits_s)
            self._hidden_s.append(timeline().hidden_s(sum(waits_s)))
            updated(phases, timeline)

        report.updated = noted

    def stepped(self) -> None:
        if self._exposure is not None:
            self._in_step.append(self._exposure.count)

    def forwarded(self) -> None:
        """Of a step's first micro-batch: its backward begins with the end of the last update."""
        if len(self._by_forward) < len(self._in_step):
            self._by_forward.append(self._exposure.count)

    def _note(self, waits_s: list[float]) -> None:
        """Of the next update that is told."""
        update = len(self._in_forward_s)
        in_step = self._in_step[update]
        # No forward comes after the last one.
        by_forward = (*self._by_forward, in_step)[update]
        self._in_forward_s.append(sum(waits_s[in_step:by_forward]))
        self._in_backward_s.append(sum(waits_s[by_forward:]))

    def account(self, turn: Turn) -> None:
        """Waits are taken from the phase that they are in, of the next iteration."""
        none = [0.0] * len(turn.step_s)
        all_waits = (turn.step_s, self._in_forward_s or none, self._in_backward_s or none)
        turn.exposed_s = [sum(waits_s) for waits_s in zip(*all_waits, strict=True)]
        turn.hidden_s = self._hidden_s
        for phase_s, waits_s in ((turn.forward_s, self._in_forward_s), (turn.backward_s, self._in_backward_s)):
            for iteration, wait_s in enumerate(waits_s[:-1], start=1):
                phase_s[iteration] -= wait_s


def attempt(arm: Arm, setting: Setting, iterations: int, warm_up: int = WARM_UP) -> Turn | str:
    """Or what went wrong, in a line."""
    try:
        return take_turn(arm, setting, iterations, warm_up)
    except Exception as error:
        logging.getLogger(__name__).exception(arm.name)
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


@dataclass
class Ran:
    """``turns`` by arm, of those that ran to the end; of the others what went wrong."""

    setting: Setting
    turns: dict[str, list[Turn]]
    failed: dict[str, str] = field(default_factory=dict)


def take_turns(arms: Sequence[Arm], setting: Setting, effort: Effort) -> Ran:
    """One a round, in an order that alternates; after one turn of the first that nobody counts: files, allocators,
    compilers. An arm that fails does not keep the others from running."""
    attempt(arms[0], setting, effort.iterations)
    ran = Ran(setting, {arm.name: [] for arm in arms})
    for number in range(effort.rounds):
        for arm in arms if number % 2 == 0 else reversed(arms):
            if arm.name in ran.turns:
                turn = attempt(arm, setting, effort.iterations)
                if isinstance(turn, Turn):
                    ran.turns[arm.name].append(turn)
                else:
                    ran.failed[arm.name] = turn
                    del ran.turns[arm.name]
    return ran


@contextmanager
def engine_of(arm: Arm, setting: Setting) -> Iterator[Any]:
    """At the end its memory is given back, and the process runs where it did before."""
    with process_as_it_was(), arm.around():
        if torch.cuda.is_available():
            torch.cuda.reset_peak_host_memory_stats()
        torch.manual_seed(SEED)
        with torch.device(get_accelerator().current_device_name()):
            model = ByteGPT(setting.shape)
        config = arm.configure(setting)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        try:
            yield engine
        finally:
            tensors = list(_tensors_of(engine))
            _end_workers(engine.optimizer)
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
            # No arm has less room, or finds memory locked, for those before it.
            get_accelerator().empty_cache()
            if torch.cuda.is_available():
                torch._C._host_emptyCache()


def _end_workers(optimizer: Any) -> None:
    """Processes that SuperOffload and ZenFlow leave behind, with their states."""
    if (worker := getattr(optimizer, "superoffload_cpu_optimizer", None)) is not None:
        worker.close()
    if (process := getattr(optimizer, "process", None)) is not None:
        process.terminate()
        process.join()


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
    for master in optimizer.fp32_partitioned_groups_flat:
        # ZenFlow's.
        yield from getattr(master, "overlap_grad", ())
        if (stale := getattr(master, "stale_param", None)) is not None:
            yield stale
    for name, its in vars(optimizer).items():
        if torch.is_tensor(its) and name.endswith("buffer"):
            yield its


def _train(turn: Turn, engine: Any, setting: Setting, iterations: int, before_bytes: int, waits: Waits) -> None:
    accelerator, clock = get_accelerator(), Clock()
    moments: list[list[Any]] = []
    losses = []
    accelerator.reset_peak_memory_stats()
    start = clock.now()
    for step in range(iterations):
        marks = [clock.now()]
        for micro in range(setting.accumulation):
            inputs, targets = batch_of(engine, setting, step * setting.accumulation + micro)
            marks.append(clock.now())
            loss = engine(inputs, targets)
            marks.append(clock.now())
            waits.forwarded()
            engine.backward(loss)
            marks.append(clock.now())
            losses.append(loss.detach())
            engine.step()
        marks.append(clock.now())
        waits.stepped()
        moments.append(marks)
    # What goes on beside the next forward ends in this arm's turn, and is told.
    if turn.plan:
        _ = engine.optimizer.state
    accelerator.synchronize()
    turn.host_bytes = psutil.Process().memory_info().rss - before_bytes
    turn.pinned_bytes = _pinned_bytes(turn, engine)
    turn.gpu_peak_bytes = accelerator.max_memory_allocated() or 0
    turn.losses = [float(loss) for loss in losses]
    ends = [start, *(marks[-1] for marks in moments)]
    for before, marks in zip(ends, moments, strict=False):
        phases = [clock.seconds(start, end) for start, end in pairwise(marks)]
        turn.forward_s.append(sum(phases[1:-1:3]))
        turn.backward_s.append(sum(phases[2:-1:3]))
        turn.step_s.append(phases[-1])
        # From one step's end to the next's: what an update leaves to the next forward counts.
        turn.iteration_s.append(clock.seconds(before, marks[-1]))


def _pinned_bytes(turn: Turn, engine: Any) -> int:
    """What PyTorch's allocator of page-locked memory had at most, and our slab, which does not come from there."""
    if not torch.cuda.is_available():
        return 0
    slab = 0
    if turn.plan:
        slab = sum(its.each_bytes for its in engine.optimizer.ledger.reserved if its.where is Where.PINNED)
    return slab + int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))


def _digest(engine: Any) -> str:
    """Whatever the sub-groups: parameter by parameter. A collective."""
    digest = hashlib.sha256()
    for param in engine.module.parameters():
        full = deepspeed.utils.safe_get_full_fp32_param(param)
        digest.update(full.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
