"""Run variants interleaved: each run is a fresh engine on the same model, seed and text, for some iterations.

Only one engine exists at a time, so that the largest model that stock offloading can hold can be measured. Since every
run does the same, its bits at the end can be compared with any other run's.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
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
from benchmarks.harness.overrides import deterministic_algorithms, restored_process, without_updates
from benchmarks.harness.setting import Repetitions, TrainingSetting, trains_on_gpu
from benchmarks.harness.variants import Variant
from deep_opt_states.zero.step.gpu_memory import FIRST_STEPS, PLANNED_STEPS
from examples.common.byte_gpt import ByteGPT, StdlibText
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

    ``forward_s`` and ``backward_s`` are the sums over all micro-batches of an iteration. They include the time
    for which they wait for the last update, or are slowed down by it.
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
    losses: list[float] = field(default_factory=list)
    digest: str = ""
    """Hash of the fp32 master weights, the same on all ranks."""
    gpu_peak_bytes: int = 0
    host_bytes: int = 0
    """Growth of this process's resident memory from before the engine was built until training is over."""
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
    """Return the number of iterations before the ones that count: on a GPU, the plan follows their times."""
    return ADAPTING if trains_on_gpu() else WARM_UP


def run_variant(variant: Variant, setting: TrainingSetting, iterations: int) -> EngineRun:
    """Train with a fresh engine and return the measurements.

    Raise ``AssertionError`` if the engine is not the variant's, or if another plan is adopted while iterations count.
    """
    warm_up = warm_up_iterations()
    run = EngineRun(variant, setting)
    before_bytes = psutil.Process().memory_info().rss
    with engine_for(variant, setting) as engine:
        run.configuration = variant.verify(engine)
        plans = _train(run, engine, setting, warm_up + iterations + 1, before_bytes)
        run.digest = weights_digest(engine)
        if variant.measures_cost:
            base = EngineRun(variant, setting)
            with without_updates():
                plans += _train(base, engine, setting, 1 + iterations, before_bytes)
            run.without_updates_s = base.iteration_s[1:]
        if plans:
            run.plan = plans[warm_up]
            if others := [str(other) for other in plans[warm_up:-1] if other is not run.plan]:
                raise AssertionError(f"{variant.name}: {run.plan} was replaced by {others} while iterations counted")
    for name in ("forward_s", "backward_s", "step_s", "iteration_s"):
        setattr(run, name, getattr(run, name)[warm_up:-1])
    return run


def try_run(variant: Variant, setting: TrainingSetting, iterations: int) -> EngineRun | str:
    """Return the measurements of ``run_variant``, or the error in one line if the run fails."""
    try:
        return run_variant(variant, setting, iterations)
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
                # Resizing also frees the memory of all views. The slab of our variants is free already.
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
    run: EngineRun, engine: Any, setting: TrainingSetting, iterations: int, before_bytes: int
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
            engine.backward(loss)
            marks.append(clock.now())
            losses.append(loss.detach())
            engine.step()
        marks.append(clock.now())
        if is_planned:
            plans.append(engine.optimizer.plan)
        moments.append(marks)
    # Reading the state waits for a deferred update, so that it ends within this run.
    if is_planned:
        _ = engine.optimizer.state
    accelerator.synchronize()
    run.host_bytes = psutil.Process().memory_info().rss - before_bytes
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


def weights_digest(engine: Any) -> str:
    """Return a hash of the fp32 parameters, one after the other, so that sub-groups do not matter. A collective."""
    digest = hashlib.sha256()
    for param in engine.module.parameters():
        full = deepspeed.utils.safe_get_full_fp32_param(param)
        digest.update(full.detach().float().cpu().contiguous().numpy())
    return digest.hexdigest()[:16]
