"""Train with different numbers of slots on EMULATED machines, in turns, and record when training's memory is in use.

The seconds are those of the machines of ``benchmarks/emulated``. The units are as small as those that the planner
chooses. A slot takes no memory from anything else here, so the arms show what more slots would gain at no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from benchmarks import emulated
from benchmarks.emulated.arms import SHARED
from benchmarks.emulated.prediction import predict, windows_of
from benchmarks.emulated.run import EmulatedRun, load_average
from benchmarks.emulated.turns import WARM_UP, Arm, Turns, train_in_turns
from benchmarks.harness.interleaved_runs import batch_for, engine_for
from benchmarks.harness.rows import Row
from benchmarks.harness.targets import EMULATED_BIT_IDENTICAL
from benchmarks.harness.variants import STOCK, Variant, ours
from perf_model.plan_request import PlanRequest, SizedPlan
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.timeline import Span, Timeline
from perf_model.schedule.action import ActionKind
from perf_model.training_run.training_memory import DEFAULT_SIZES
from tests.software_gpu import device

RUNS = tuple(run for run in emulated.RUNS if run.micro_batch == 1)

UNITS = 64
"""The number of units. On the machines with 4 GPUs, each stands for 23 M parameters."""

MANY = 10**6
"""A number of slots that is larger than that of the streamed units, so that each of these has a slot."""

FIXED: dict[str, dict[str, Any]] = {
    "all streamed": {"placement": "streamed"},
    "stride 2": {"placement": "stride", "update_stride": 2},
}
SLOTS = (2, 4, 8, MANY)
TIMES_PLANNED = (1, 2, MANY)
"""The numbers of slots of the planned arms, as multiples of the plan's."""

QUICK = (STOCK.name, "all streamed, 2 slots", "all streamed, a slot per unit")

EXPOSED = "EMULATED exposed"
ITERATION = "EMULATED iteration"
FEWER_EXPOSED = f"{EXPOSED}, less than with the fewest slots"
FEWER_EXPOSED_PREDICTED = f"{FEWER_EXPOSED}, predicted"
PREFETCHED = "EMULATED share of the streamed states prefetched before the decision"
WAIT_BEFORE = "EMULATED time before the decision without a prefetch, although units are left"
WAIT_AFTER = "EMULATED time after the decision in which prefetches wait for a slot"
IN_USE = "EMULATED training's memory in use, between its least (0) and its peak (1)"


def emulated_rows(*, quick: bool) -> Iterator[Row]:
    """Yield the rows of all runs."""
    emulated.start_device()
    turns = Turns(turns=1, iterations=2) if quick else Turns(turns=2, iterations=3)
    for run in RUNS[:1] if quick else RUNS:
        yield from _rows_of_run(run, turns, only=QUICK if quick else None)
        yield from _memory_rows(run)


def arms_of(run: EmulatedRun, profile: Path) -> list[Variant]:
    """Return the arms of ``run``: stock, and each placement with the fewest slots first.

    ``profile`` is the file with which the plugin plans.
    """
    block = {**SHARED, "unit_size": -(-run.small.parameters // UNITS)}
    arms = [STOCK]
    for name, placement in FIXED.items():
        arms += [ours(f"{name}, {_slots(count)}", num_slots=count, **block, **placement) for count in SLOTS]
    memory = {"gpu_memory_gb": run.gpu_memory_gb, "gpu_memory_margin_gb": 0.1}
    planned = {"placement": "planned", "profile": str(profile), **block, **memory}
    for times in TIMES_PLANNED:
        name = "a slot per unit" if times == MANY else f"{times} x the plan's slots"
        arms.append(replace(ours(f"planned, {name}", **planned), overrides=_planned_with(run, times)))
    return [replace(arm, zero=run.zero) for arm in arms]


def _slots(count: int) -> str:
    return "a slot per unit" if count == MANY else f"{count} slots"


def _planned_with(run: EmulatedRun, times: int) -> Callable[[], AbstractContextManager[object]]:
    """Return a context in which a plan is made for the windows of ``run``, and then gets ``times`` as many slots."""
    plan_of = PlanRequest.plan
    windows = windows_of(run)
    # The planner has the rates of the machine and the units of the small model.
    per_s = 1 / (run.slowdown * run.scale)
    windows = Windows(backward_s=windows.backward_s * per_s, forward_s=windows.forward_s * per_s)

    def plan(request: PlanRequest) -> SizedPlan:
        found = plan_of(replace(request, windows=windows))
        more = replace(found.plan, num_slots=times * found.plan.num_slots)
        return replace(found, planned=replace(found.planned, plan=more))

    return lambda: mock.patch.object(PlanRequest, "plan", plan)


def _rows_of_run(run: EmulatedRun, turns: Turns, *, only: Sequence[str] | None) -> Iterator[Row]:
    with run.profile_for_planning() as profile, run.emulated() as passes:
        load = load_average()
        variants = [arm for arm in arms_of(run, profile) if only is None or arm.name in only]
        stock, *arms = train_in_turns(run, variants, passes, turns)
    fewest: dict[str, Arm] = {}
    for arm in arms:
        first = fewest.setdefault(arm.variant.name.split(",")[0], arm)
        yield from _rows(run, arm, first, stock)
    labels: dict[str, Any] = {"variant": "all arms", "setting": run.labels}
    loads = [load, load_average()]
    yield Row(quantity="load of this machine during the EMULATED run", unit="threads", samples=loads, **labels)


def _rows(run: EmulatedRun, arm: Arm, fewest: Arm, stock: Arm) -> Iterator[Row]:
    labels: dict[str, Any] = {"variant": arm.variant.name, "setting": run.labels}
    predicted_s, least_s = (predict(run, each.numels, each.plan, windows_of(run)).exposed_s for each in (arm, fewest))
    exposed_s = [update.exposed_s for update in arm.updates]
    yield Row(quantity=EXPOSED, unit="s", samples=exposed_s, **labels)
    yield Row(quantity=f"{EXPOSED}, predicted", unit="s", samples=[predicted_s], **labels)
    if arm is not fewest:
        before_s = median(update.exposed_s for update in fewest.updates)
        yield Row(quantity=FEWER_EXPOSED, unit="share", samples=[1 - each / before_s for each in exposed_s], **labels)
        yield Row(quantity=FEWER_EXPOSED_PREDICTED, unit="share", samples=[1 - predicted_s / least_s], **labels)
    yield Row(quantity=ITERATION, unit="s", samples=arm.iteration_s, **labels)
    numels = {unit.index: unit.numel for unit in arm.plan.workload.units} if arm.plan is not None else {}
    for quantity, unit, measure in (
        (PREFETCHED, "share", lambda timeline: prefetched_share(timeline, numels)),
        (WAIT_BEFORE, "s", idle_before_decision_s),
        (WAIT_AFTER, "s", waits_for_slots_s),
    ):
        yield Row(quantity=quantity, unit=unit, samples=list(map(measure, arm.timelines)), **labels)
    yield Row(quantity="longest lag of this machine in an EMULATED iteration", unit="s", samples=arm.lag_s, **labels)
    same = (arm.losses, arm.digest) == (stock.losses, stock.digest)
    yield Row(quantity=EMULATED_BIT_IDENTICAL, value=same, claimed=True, **labels)
    yield Row(quantity="plan (EMULATED)", value=str(arm.plan), **labels)


def prefetched_share(timeline: Timeline, numels: dict[int, int]) -> float:
    """Return the share of the streamed states, of units of these lengths, that are in slots at the decision."""
    prefetches = _prefetches(timeline)
    before = sum(numels[span.action.unit] for span in prefetches if span.end_s <= 0.0)
    return before / sum(numels[span.action.unit] for span in prefetches) if prefetches else 0.0


def idle_before_decision_s(timeline: Timeline) -> float:
    """Return the seconds before the decision in which no unit is prefetched, although some are not in a slot yet."""
    prefetches = _prefetches(timeline)
    begun = [span for span in prefetches if span.start_s < 0.0]
    if not begun or len(begun) == len(prefetches):
        return 0.0
    return max(0.0, -begun[-1].end_s)


def waits_for_slots_s(timeline: Timeline) -> float:
    """Return the seconds after the decision in which the next prefetch waits for the flush that frees its slot.

    Slots are used in turns, so a prefetch waits for the flush of the unit that is as many places before as there are
    slots.
    """
    prefetches = _prefetches(timeline)
    flushed_s = sorted(span.end_s for span in timeline.spans if span.action.kind is ActionKind.FLUSH_STATES)
    num_slots = len({span.action.slot for span in prefetches})
    idle_from_s = [max(0.0, span.end_s) for span in prefetches[num_slots - 1 : -1]]
    return sum(max(0.0, free_s - idle_s) for free_s, idle_s in zip(flushed_s, idle_from_s, strict=False))


def _prefetches(timeline: Timeline) -> list[Span]:
    spans = [span for span in timeline.spans if span.action.kind is ActionKind.PREFETCH]
    return sorted(spans, key=lambda span: span.start_s)


def _memory_rows(run: EmulatedRun) -> Iterator[Row]:
    """Yield how much of training's memory is in use after each layer of forward and backward, and after ``step()``.

    The small model recomputes nothing. DeepSpeed keeps as much of it gathered as its default keeps of the run's model.
    """
    live = round(DEFAULT_SIZES.max_live / (run.scale * run.ranks))
    zero = {**run.zero, "stage3_max_live_parameters": live, "stage3_max_reuse_distance": live}
    variant = replace(STOCK, zero=zero)
    points: list[tuple[str, int]] = []
    with run.emulated() as passes, ExitStack() as stack:
        passes.take_time = False
        engine = stack.enter_context(engine_for(variant, run.small))
        blocks = engine.module.blocks

        def record(name: str) -> Callable[..., None]:
            return lambda *_: points.append((name, device.memory_allocated()))

        for number, block in enumerate(blocks, start=1):
            of_all = f"layer {number} of {len(blocks)}"
            block.register_forward_hook(record(f"forward, after {of_all}"))
            block.register_full_backward_hook(record(f"backward, after {of_all}"))
        for iteration in range(WARM_UP + 1):
            points.clear()
            record("before forward")()
            loss = engine(*batch_for(engine, run.small, iteration))
            record("after the loss")()
            engine.backward(loss)
            record("at the decision")()
            engine.step()
        del loss, blocks, engine
    least, peak = (limit(size for _, size in points) for limit in (min, max))
    for name, size in points:
        share = (size - least) / (peak - least)
        yield Row(variant=name, quantity=IN_USE, unit="share", samples=[share], setting=run.labels)
