"""Run variants interleaved: each run is a fresh engine on the same model, seed and text, for some iterations.

Only one engine exists at a time, so that the largest model that stock offloading can hold can be measured. Since every
run does the same, its bits at the end can be compared with those of any other run.
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
from benchmarks.harness.bf16_products import are_computed_in_fp32, compute_in_fp32
from benchmarks.harness.device import trains_on_gpu
from benchmarks.harness.overrides import deterministic_algorithms, restored_process, without_updates
from benchmarks.harness.setting import TrainingSetting
from benchmarks.harness.sizes import Repetitions
from benchmarks.harness.variants import Variant
from deep_opt_states.report.record import ComparisonRow
from deep_opt_states.zero.step.gpu_memory import FIRST_STEPS, PLANNED_STEPS
from examples.common.byte_gpt import ByteGPT, StdlibText
from perf_model.prediction.memory import MemoryKind
from perf_model.prediction.timeline import Phase
from perf_model.schedule.plan import UpdatePlan

SEED = 17
WARM_UP = 3
"""Iterations at the start that are not counted, in which DeepSpeed builds its lazy state and its trace. One more
uncounted iteration follows at the end, since the last counted update continues during its forward."""

ADAPTING = FIRST_STEPS + PLANNED_STEPS + 2
"""The same on a GPU, where the plugin plans for the measured windows and the free memory, and reconsiders the plan."""


@dataclass
class EngineRun:
    """The measurements of one run of a variant: seconds per iteration, without those that warm up.

    ``forward_s`` and ``backward_s`` are the sums over all micro-batches of an iteration. The time that they wait for
    the update before is not in them. It is in that update's ``exposed_s``, together with all of ``step()``.
    ``hidden_s`` exists for our variants only.
    """

    variant: Variant
    setting: TrainingSetting
    plan: UpdatePlan | None = None
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    iteration_s: list[float] = field(default_factory=list)
    without_updates_s: list[float] = field(default_factory=list)
    """Seconds per iteration of the same engine without updates, if the variant measures the cost of the update."""
    exposed_s: list[float] = field(default_factory=list)
    hidden_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    digest: str = ""
    """Hash of the fp32 master weights, the same on all ranks."""
    gpu_peak_bytes: int = 0
    host_bytes: int = 0
    """Growth of this process's resident memory from before the engine was built until training is over."""
    compared: list[ComparisonRow] = field(default_factory=list)
    """Predicted and measured times, if the plugin predicts: with a plan, or with a profile in the config."""
    pinned_bytes: int = 0
    """Page-locked memory of this process, including DeepSpeed's."""
    configuration: str = ""
    """The description that ``Variant.verify`` returned."""

    def same_bits_as(self, other: EngineRun) -> bool:
        """Return whether all losses and the final master weights are bit-identical."""
        return self.digest == other.digest and self.losses == other.losses

    @property
    def median_s(self) -> float:
        """Return the median of the iterations, in seconds."""
        return median(self.iteration_s)

    @property
    def cost_s(self) -> float:
        """Return the cost of the update: by how many seconds it prolongs the median iteration."""
        return self.median_s - median(self.without_updates_s)


class StreamClock:
    """A clock on the model's stream: reading it does not wait for the accelerator between two phases."""

    def __init__(self) -> None:
        self._accelerator = get_accelerator()
        self._synchronous = self._accelerator.is_synchronized_device()

    def now(self) -> Any:
        """Return the current moment: an event on the model's stream, or a number of seconds if there is no stream."""
        if self._synchronous:
            return time.perf_counter()
        event = self._accelerator.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two moments. Block until the second one has passed."""
        if self._synchronous:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def warm_up_iterations() -> int:
    """Return the number of iterations before the ones that count: on a GPU, the plan follows what they measure."""
    return ADAPTING if trains_on_gpu() else WARM_UP


def run_variant(variant: Variant, setting: TrainingSetting, iterations: int, *, any_plan: bool = False) -> EngineRun:
    """Train with a fresh engine and return the measurements.

    With ``any_plan``, all iterations but the first count, whichever plan runs. Raise ``AssertionError`` if the engine
    is not the variant's, or, without ``any_plan``, if another plan is adopted while iterations count.
    """
    warm_up = 1 if any_plan else warm_up_iterations()
    run = EngineRun(variant, setting)
    waits = ExposedWaits()
    before_bytes = psutil.Process().memory_info().rss
    with engine_for(variant, setting) as engine:
        run.configuration = variant.verify(engine)
        if variant.block is not None:
            waits.watch(engine.optimizer)
        plans = _train(run, engine, setting, warm_up + iterations + 1, before_bytes, waits)
        run.digest = weights_digest(engine)
        if variant.measures_cost:
            base = EngineRun(variant, setting)
            with without_updates():
                plans += _train(base, engine, setting, 1 + iterations, before_bytes, ExposedWaits())
            run.without_updates_s = base.iteration_s[1:]
        if plans:
            run.plan = plans[warm_up]
            others = [str(other) for other in plans[warm_up:-1] if other is not run.plan]
            if others and not any_plan:
                raise AssertionError(f"{variant.name}: {run.plan} was replaced by {others} while iterations counted")
            run.compared = engine.optimizer.report.comparison()
    # The last update is reported when the engine is destroyed.
    waits.account(run)
    for name in ("forward_s", "backward_s", "step_s", "iteration_s", "exposed_s", "hidden_s"):
        setattr(run, name, getattr(run, name)[warm_up:-1])
    return run


class ExposedWaits:
    """The time that the model waited for each update after ``step()`` had returned, by phase of the next iteration,
    and the time that each update ran concurrently with the model."""

    def __init__(self) -> None:
        self._exposure: Any = None
        self._in_step: list[int] = []
        """Number of waits for each update when ``step()`` returned."""
        self._by_forward: list[int] = []
        """Number of waits for each update at the end of the next forward."""
        self._in_forward_s: list[float] = []
        self._in_backward_s: list[float] = []
        self._hidden_s: list[float] = []

    def watch(self, optimizer: Any) -> None:
        """Record every update that ``optimizer`` reports from now on, and pass the report on."""
        self._exposure, report = optimizer._running.exposure, optimizer.report
        updated = report.updated

        def record(phases: Any, timeline: Callable[[], Any]) -> None:
            waits_s = [span.end_s - span.start_s for span in phases if span.phase is Phase.EXPOSED]
            self._add(waits_s)
            self._hidden_s.append(timeline().hidden_s(sum(waits_s)))
            updated(phases, timeline)

        report.updated = record

    def after_step(self) -> None:
        """Count the waits so far, once ``step()`` has returned."""
        if self._exposure is not None:
            self._in_step.append(self._exposure.waits.count)

    def after_forward(self) -> None:
        """Count the waits so far after the step's first forward: the next backward begins with the update's end."""
        if len(self._by_forward) < len(self._in_step):
            self._by_forward.append(self._exposure.waits.count)

    def _add(self, waits_s: list[float]) -> None:
        """Split the waits for the next reported update between forward and backward."""
        update = len(self._in_forward_s)
        in_step = self._in_step[update]
        # No forward comes after the last one.
        by_forward = (*self._by_forward, in_step)[update]
        self._in_forward_s.append(sum(waits_s[in_step:by_forward]))
        self._in_backward_s.append(sum(waits_s[by_forward:]))

    def account(self, run: EngineRun) -> None:
        """Set the exposed and hidden times of ``run``, and subtract each wait from its phase of the next iteration."""
        none = [0.0] * len(run.step_s)
        all_waits = (run.step_s, self._in_forward_s or none, self._in_backward_s or none)
        run.exposed_s = [sum(waits_s) for waits_s in zip(*all_waits, strict=True)]
        run.hidden_s = self._hidden_s
        for phase_s, waits_s in ((run.forward_s, self._in_forward_s), (run.backward_s, self._in_backward_s)):
            for iteration, wait_s in enumerate(waits_s[:-1], start=1):
                phase_s[iteration] -= wait_s


def try_run(variant: Variant, setting: TrainingSetting, iterations: int, *, any_plan: bool = False) -> EngineRun | str:
    """Return the measurements of ``run_variant``, or the error in one line if the run fails."""
    try:
        return run_variant(variant, setting, iterations, any_plan=any_plan)
    except Exception as error:
        logging.getLogger(__name__).exception(variant.name)
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


@dataclass
class InterleavedRuns:
    """The runs of each variant that completed all of its runs, and the errors of the others, by variant name."""

    setting: TrainingSetting
    completed: dict[str, list[EngineRun]]
    errors: dict[str, str] = field(default_factory=dict)


def run_interleaved(variants: Sequence[Variant], setting: TrainingSetting, repetitions: Repetitions) -> InterleavedRuns:
    """Run each variant once per round, in an order that alternates from round to round.

    On the CPU, the first variant runs once before the first round without being counted, to warm up files, allocators
    and compilers. On a GPU, the first iterations of each run do that. If a variant fails, the others still run.
    """
    if not trains_on_gpu():
        try_run(variants[0], setting, iterations=1)
    runs = InterleavedRuns(setting, {variant.name: [] for variant in variants})
    for number in range(repetitions.rounds):
        for variant in variants if number % 2 == 0 else reversed(variants):
            if variant.name in runs.completed:
                run = try_run(variant, setting, repetitions.iterations)
                if isinstance(run, EngineRun):
                    runs.completed[variant.name].append(run)
                else:
                    runs.errors[variant.name] = run
                    del runs.completed[variant.name]
    return runs


@contextmanager
def engine_for(variant: Variant, setting: TrainingSetting) -> Iterator[Any]:
    """Yield a fresh engine. At the end, free its memory and let the process run on its former cores."""
    if are_computed_in_fp32():
        compute_in_fp32()
    with restored_process(), deterministic_algorithms(), variant.overrides():
        if torch.cuda.is_available():
            torch.cuda.reset_peak_host_memory_stats()
        torch.manual_seed(SEED)
        with torch.device(get_accelerator().current_device_name()):
            model = ByteGPT(setting.shape)
        config = variant.config_for(setting)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        try:
            yield engine
        finally:
            tensors = list(_large_tensors(engine))
            _end_workers(engine.optimizer)
            engine.destroy()
            # DeepSpeed 0.19.8 keeps destroyed engines alive: one gigabyte per run with 50 M parameters.
            for tensor in tensors:
                tensor.grad = None
                storage = tensor.untyped_storage()
                # Resizing frees the memory of all views, too. The slab of our variants is free already.
                if storage.resizable():
                    storage.resize_(0)
            del engine, tensors
            gc.collect()
            # The next variant must not find less free memory, or pinned memory, because of this one.
            get_accelerator().empty_cache()
            if torch.cuda.is_available():
                torch._C._host_emptyCache()


def _end_workers(optimizer: Any) -> None:
    """End the processes that SuperOffload and ZenFlow leave behind, which hold their states."""
    if (worker := getattr(optimizer, "superoffload_cpu_optimizer", None)) is not None:
        worker.close()
    if (process := getattr(optimizer, "process", None)) is not None:
        process.terminate()
        process.join()


def batch_for(engine: Any, setting: TrainingSetting, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of micro-batch ``number`` of this rank: real text, on the engine's device."""
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


def _large_tensors(engine: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters, the optimizer states and the buffers of an engine."""
    optimizer = engine.optimizer
    yield from engine.module.parameters()
    yield from optimizer.fp32_partitioned_groups_flat
    yield from optimizer.fp16_partitioned_groups_flat
    for state in optimizer.state.values():
        yield from (entry for entry in state.values() if torch.is_tensor(entry))
    for master in optimizer.fp32_partitioned_groups_flat:
        # These attributes are ZenFlow's.
        yield from getattr(master, "overlap_grad", ())
        if (stale := getattr(master, "stale_param", None)) is not None:
            yield stale
    for name, attribute in vars(optimizer).items():
        if torch.is_tensor(attribute) and name.endswith("buffer"):
            yield attribute


def _train(
    run: EngineRun, engine: Any, setting: TrainingSetting, iterations: int, before_bytes: int, waits: ExposedWaits
) -> list[UpdatePlan]:
    """Train, and return the plan of each iteration; none if the variant has no plan."""
    is_planned = run.variant.block is not None
    plans: list[UpdatePlan] = []
    accelerator, clock = get_accelerator(), StreamClock()
    moments: list[list[Any]] = []
    losses = []
    accelerator.reset_peak_memory_stats()
    start = clock.now()
    for step in range(iterations):
        marks = [clock.now()]
        for micro in range(setting.accumulation):
            inputs, targets = batch_for(engine, setting, step * setting.accumulation + micro)
            marks.append(clock.now())
            loss = engine(inputs, targets)
            marks.append(clock.now())
            waits.after_forward()
            engine.backward(loss)
            marks.append(clock.now())
            losses.append(loss.detach())
            engine.step()
        marks.append(clock.now())
        if is_planned:
            plans.append(engine.optimizer.plan)
        waits.after_step()
        moments.append(marks)
    # Reading the state waits for a deferred update, so that it ends and is reported within this run.
    if is_planned:
        _ = engine.optimizer.state
    accelerator.synchronize()
    run.host_bytes = psutil.Process().memory_info().rss - before_bytes
    run.pinned_bytes = _pinned_bytes(run, engine)
    run.gpu_peak_bytes = accelerator.max_memory_allocated() or 0
    run.losses = [float(loss) for loss in losses]
    ends = [start, *(marks[-1] for marks in moments)]
    for before, marks in zip(ends, moments, strict=False):
        phases = [clock.seconds(start, end) for start, end in pairwise(marks)]
        run.forward_s.append(sum(phases[1:-1:3]))
        run.backward_s.append(sum(phases[2:-1:3]))
        run.step_s.append(phases[-1])
        # An iteration lasts from the end of one step to the end of the next, so that time counts in which an update
        # delays the next forward.
        run.iteration_s.append(clock.seconds(before, marks[-1]))
    return plans


def _pinned_bytes(run: EngineRun, engine: Any) -> int:
    """Return the peak of PyTorch's pinned allocator plus our slab, which is allocated outside of it."""
    if not torch.cuda.is_available():
        return 0
    slab = 0
    if run.variant.block is not None:
        reserved = engine.optimizer.accounting_device.reserved
        slab = sum(reservation.each_bytes for reservation in reserved if reservation.kind is MemoryKind.PINNED)
    return slab + int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))


def weights_digest(engine: Any) -> str:
    """Return a hash of the fp32 parameters, one after the other, so that sub-groups do not matter. A collective."""
    digest = hashlib.sha256()
    for param in engine.module.parameters():
        full = deepspeed.utils.safe_get_full_fp32_param(param)
        digest.update(full.detach().float().cpu().contiguous().numpy())
    return digest.hexdigest()[:16]
