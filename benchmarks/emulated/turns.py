"""Interleave all arms of a run on an EMULATED machine, and measure emulated seconds.

All engines coexist. They warm up without emulated time, except those for which the plugin plans: their plan
follows its measurements, and then stays. Then each arm trains for a few iterations in every turn,
and the first iteration of a turn is not counted, since it follows no update that it could overlap with.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest import mock

import torch

from benchmarks.emulated.host_passes import HostPasses
from benchmarks.emulated.run import EmulatedRun
from benchmarks.harness.interleaved_runs import ADAPTING, batch_for, engine_for, weights_digest
from benchmarks.harness.overrides import without_updates
from benchmarks.harness.variants import Variant
from deep_opt_states.report.record import MeasuredUpdate
from deep_opt_states.zero.step.gpu_memory import GpuMemory
from perf_model.prediction.timeline import PhaseSpan, Timeline
from perf_model.schedule.plan import UpdatePlan
from tests.software_gpu import device, settings

WARM_UP = ADAPTING
"""Iterations before the turns, in which DeepSpeed records the order of its modules, and the plugin plans twice."""

COMPUTING_STREAM = 0
PHASES = ("forward", "backward", "step")


@dataclass(frozen=True, kw_only=True)
class Turns:
    """The number of turns, and of counted iterations of each arm in each turn."""

    turns: int
    iterations: int


@dataclass
class Arm:
    """One arm, with the measurements of its counted iterations in emulated seconds.

    ``without_updates_s`` are iterations of the same engine without updates, if ``variant.measures_cost``.

    ``updates`` are those that the plugin has reported, with their ``timelines`` and the ``phases`` of the model during
    them; stock has none. ``lag_s`` is the longest time in an iteration by which this machine was behind the emulated
    one.
    """

    variant: Variant
    engine: Any
    passes: HostPasses
    numels: list[int]
    configuration: str
    plan: UpdatePlan | None = None
    iteration_s: list[float] = field(default_factory=list)
    without_updates_s: list[float] = field(default_factory=list)
    forward_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    updates: list[MeasuredUpdate] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)
    phases: list[Sequence[PhaseSpan]] = field(default_factory=list)
    lag_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    digest: str = ""
    """Hash of the fp32 master weights at the end."""
    _reported: list[tuple[MeasuredUpdate, Timeline, Sequence[PhaseSpan]]] = field(default_factory=list)
    _trained: int = 0
    """The number of iterations so far."""

    @classmethod
    def create(cls, variant: Variant, engine: Any, passes: HostPasses) -> Arm:
        """Return the arm of ``engine``. Raise ``AssertionError`` if that is not the variant's."""
        numels = [partition.numel() for partition in engine.optimizer.fp16_partitioned_groups_flat]
        arm = cls(variant, engine, passes, numels, variant.verify(engine))
        if variant.block is not None:
            report = engine.optimizer.report
            updated = report.updated

            def record(phases: Any, timeline: Any) -> None:
                measured = timeline()
                arm._reported.append((MeasuredUpdate.from_timeline(measured, phases), measured, phases))
                updated(phases, timeline)

            report.updated = record
        return arm

    @property
    def kept_plan(self) -> bool:
        """Return whether all counted updates executed the plan, and the CPU did not update everything meanwhile."""
        kinds = set() if self.plan is None else {action.kind for action in self.plan.schedule.actions}
        return all({kind for kind, kind_s in update.by_kind.items() if kind_s > 0} == kinds for update in self.updates)

    @property
    def costs_s(self) -> list[float]:
        """Return the cost of the update, by pairs of an iteration and one without updates."""
        pairs = zip(self.iteration_s, self.without_updates_s, strict=True)
        return [iteration_s - without_s for iteration_s, without_s in pairs]

    def train(self, setting: Any, iterations: int) -> None:
        """Train for some iterations. Each phase ends with a mark on the computing stream."""
        device.launch(lambda: None, "mark")
        losses = []
        for _ in range(iterations):
            inputs, targets = batch_for(self.engine, setting, self._trained)
            self._trained += 1
            loss = self.engine(inputs, targets)
            device.launch(lambda: None, "mark")
            self.engine.backward(loss)
            device.launch(lambda: None, "mark")
            losses.append(loss.detach())
            self.engine.step()
            device.launch(lambda: None, "mark")
            self.lag_s.append(device.take_lag_s())
        if self.variant.block is not None:
            # Let the last update end, and be reported.
            self.engine.optimizer._update.wait()
            self.engine.optimizer._update.report()
        device.synchronize()
        self.losses += [float(loss) for loss in losses]

    def warm_up(self, setting: Any) -> None:
        """Train without counting anything, in emulated time only if the plugin plans. All arms train as many steps."""
        if self.variant.block is not None and self.variant.block.get("placement", "planned") == "planned":
            self.passes.take_time = True
            self.train(setting, WARM_UP)
            self.passes.take_time = False
        else:
            with settings.changed(rates=settings.MachineRates()):
                self.train(setting, WARM_UP)
        device.take_spans()
        if self.variant.block is not None:
            self.plan = self.engine.optimizer.plan
        self.lag_s.clear()
        self._reported.clear()

    def take_turn(self, setting: Any, iterations: int) -> None:
        """Train for one iteration that is not counted, and then for ``iterations`` that are."""
        device.take_spans()
        device.take_lag_s()
        uncounted = len(self.lag_s)
        self.train(setting, 1 + iterations)
        del self.lag_s[uncounted]
        # No forward followed the last update.
        for update, timeline, phases in self._reported[:-1]:
            self.updates.append(update)
            self.timelines.append(timeline)
            self.phases.append(phases)
        self._reported.clear()
        marks = _marks()
        ends_s = marks[:: len(PHASES)]
        for iteration, (start_s, end_s) in list(enumerate(pairwise(ends_s), start=1))[1:]:
            self.iteration_s.append(end_s - start_s)
            self.forward_s.append(marks[iteration * len(PHASES) - 2] - start_s)
            self.step_s.append(end_s - marks[iteration * len(PHASES) - 1])

    def take_turn_without_updates(self, setting: Any, iterations: int) -> None:
        """Do the same without updates, and measure the iterations only. The weights stay as they are."""
        device.take_spans()
        with without_updates():
            self.train(setting, 1 + iterations)
        for samples in (self.lag_s, self.losses):
            del samples[-(1 + iterations) :]
        ends_s = _marks()[:: len(PHASES)]
        self.without_updates_s += [end_s - start_s for start_s, end_s in pairwise(ends_s)][1:]


def _marks() -> list[float]:
    """Return the moments of the marks on the computing stream since the last call."""
    return [span.start_s for span in device.take_spans() if span.stream == COMPUTING_STREAM and span.name == "mark"]


def train_in_turns(run: EmulatedRun, variants: Sequence[Variant], passes: HostPasses, turns: Turns) -> list[Arm]:
    """Return the arms with their measurements. The order alternates from turn to turn."""
    with ExitStack() as engines:
        passes.take_time = False
        arms = []
        for variant in variants:
            # DeepSpeed formats every parameter for its log, which takes most of the time to create an engine.
            with (
                settings.changed(rates=settings.MachineRates()),
                mock.patch.object(torch.nn.Parameter, "__repr__", object.__repr__),
            ):
                engine = engines.enter_context(engine_for(variant, run.small))
            arms.append(Arm.create(variant, engine, passes))
            arms[-1].warm_up(run.small)
        # The turns of one arm must all run the same plan. The memory of engines that were created later would evict it.
        engines.enter_context(mock.patch.object(GpuMemory, "_plan", return_value=False))
        engines.enter_context(mock.patch.object(GpuMemory, "evict"))
        passes.take_time = True
        for turn in range(turns.turns):
            for arm in arms if turn % 2 == 0 else reversed(arms):
                arm.take_turn(run.small, turns.iterations)
        # After all updates: Adam's step count goes on for ours and not for stock.
        costed = [arm for arm in arms if arm.variant.measures_cost]
        for turn in range(turns.turns):
            for arm in costed if turn % 2 == 0 else reversed(costed):
                arm.take_turn_without_updates(run.small, turns.iterations)
        passes.take_time = False
        with settings.changed(rates=settings.MachineRates()):
            for arm in arms:
                assert arm.kept_plan, f"{arm.variant.name}: another plan than {arm.plan} was executed"
                arm.digest = weights_digest(arm.engine)
                del arm.engine
    return arms
