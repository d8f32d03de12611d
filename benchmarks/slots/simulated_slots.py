"""Simulate what slots would gain that exist only while the activations' memory is free, in the planner's settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.harness.rows import Row
from benchmarks.planner.window_settings import COUNT, WindowSetting, window_settings
from benchmarks.slots.phase_curve import ActivationMemory, exposed_with_activation_memory_s
from perf_model.planner import UNIT_SIZES, plan_units
from perf_model.prediction.memory import memory_of
from perf_model.prediction.simulate import Simulator
from perf_model.presets.machines import MACHINES
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan, place_all, place_by_stride
from perf_model.schedule.workload import Workload
from perf_model.training_run.micro_batch import GradientPath

DEFAULT_SLOTS = 2
"""The default of ``num_slots`` until the free memory is known, for placements that leave nothing to the planner."""

DEFAULT_SIZE = 50_000_000
"""The default of ``unit_size`` for these placements, in parameters."""

FIXED: dict[str, Callable[[Workload], tuple[Placement, ...]]] = {
    "all streamed": partial(place_all, placement=Placement.STREAMED),
    "stride 2": partial(place_by_stride, stride=2),
}

MORE_SLOTS = (1, 2, 4, 6, 10, 14, 22, 30, 46, 62, 94, 126, 254)
"""The numbers of slots to add. More are not always better, because transfers slow each other and the CPU down."""

SHARES = (0.1, 0.25, 0.5, 1.0)
"""The shares of the activations' memory to use, for the same reason."""

AT_PEAK = "SIMULATED gain of slots in memory that is free at the peak"
IN_PHASES = "SIMULATED gain of slots in the activations' memory"

MUCH, MATERIAL = 0.2, 0.01
"""The shares of the exposed time and of the iteration from which a gain is counted."""


@dataclass(frozen=True, kw_only=True)
class SimulatedSlots:
    """The exposed seconds of a plan in one setting, of iterations that take ``iteration_s`` with the plan as it is.

    ``at_peak_s``: with as many slots as are best, in the memory that is free even at the peak. ``in_phases_s``: with
    slots in the activations' memory besides.
    """

    micro_batch: int
    iteration_s: float
    exposed_s: float
    at_peak_s: float
    in_phases_s: float


def simulated_rows(*, quick: bool) -> Iterator[Row]:
    """Yield the gains by placement, recomputation and micro-batch.

    Only planned updates are simulated without recomputation.
    """
    count = 4 if quick else COUNT
    for recompute in (True, False):
        settings = window_settings(count, recompute=recompute)
        plans = {"planned": [_simulate(setting, _planned(setting)) for setting in settings]}
        for name, place in FIXED.items() if recompute else ():
            fixed = [(setting, _with_default_slots(setting, place)) for setting in settings]
            plans[name] = [_simulate(setting, plan) for setting, plan in fixed if _fits(setting, plan)]
        for name, found in plans.items():
            for micro_batch in sorted({slots.micro_batch for slots in found}):
                chosen = [slots for slots in found if slots.micro_batch == micro_batch]
                labels = {"settings": len(chosen), "micro_batch": micro_batch, "recompute": recompute}
                yield from _rows(chosen, name, labels)


def _rows(found: list[SimulatedSlots], variant: str, labels: Mapping[str, object]) -> Iterator[Row]:
    gains = {IN_PHASES: [(each.at_peak_s, each.in_phases_s) for each in found]}
    if variant in FIXED:
        # The planner has chosen the number of slots.
        gains = {AT_PEAK: [(each.exposed_s, each.at_peak_s) for each in found], **gains}
    row = partial(Row, variant=variant, setting=labels)
    for gain, pairs in gains.items():
        exposed = [1.0 - after / before if before else 0.0 for before, after in pairs]
        iteration = [(before - after) / each.iteration_s for (before, after), each in zip(pairs, found, strict=True)]
        for whole, shares, enough in (("exposed time", exposed, MUCH), ("iteration", iteration, MATERIAL)):
            yield row(quantity=f"{gain}, of the {whole}", unit="share", samples=shares)
            yield row(quantity=f"{gain}, largest, of the {whole}", unit="share", samples=[max(shares)])
            counted = f"{sum(share >= enough for share in shares)} of {len(shares)}"
            yield row(quantity=f"{gain}, settings with at least {enough:.0%} of the {whole}", value=counted)


def _planned(setting: WindowSetting) -> UpdatePlan:
    _, planned = plan_units(
        setting.workload, UNIT_SIZES, setting.cost, setting.budgets, setting.windows, setting.job.setup
    )
    return planned.plan


def _with_default_slots(setting: WindowSetting, place: Callable[[Workload], tuple[Placement, ...]]) -> UpdatePlan:
    workload = setting.workload(DEFAULT_SIZE)
    return UpdatePlan(workload=workload, placements=place(workload), num_slots=DEFAULT_SLOTS)


def _fits(setting: WindowSetting, plan: UpdatePlan) -> bool:
    return not setting.budgets.missing(memory_of(plan, setting.job.setup))


def _simulate(setting: WindowSetting, plan: UpdatePlan) -> SimulatedSlots:
    """Return the least exposed seconds of the placements of ``plan``."""
    simulator, memory = Simulator(setting.cost, setting.windows), ActivationMemory.from_job(setting.job)
    streamed = plan.placements.count(Placement.STREAMED)

    def exposed_s(candidate: UpdatePlan, share: float = 0.0) -> float:
        return exposed_with_activation_memory_s(candidate, simulator, memory.share(share))

    at_peak = {plan: exposed_s(plan)}
    for number in MORE_SLOTS:
        candidate = replace(plan, num_slots=plan.num_slots + number)
        if candidate.num_slots > streamed or not _fits(setting, candidate):
            break
        at_peak[candidate] = exposed_s(candidate)
    best = min(at_peak, key=lambda candidate: at_peak[candidate])
    in_phases_s = [exposed_s(best, share) for share in SHARES] if streamed else []
    profile = MACHINES[setting.machine].profile(setting.job.ranks_on_node)
    backward_s = max(setting.windows.backward_s, GradientPath.for_plan(plan).seconds(profile)[0])
    return SimulatedSlots(
        micro_batch=setting.micro_batch,
        iteration_s=setting.windows.forward_s + backward_s + at_peak[plan],
        exposed_s=at_peak[plan],
        at_peak_s=at_peak[best],
        in_phases_s=min([at_peak[best], *in_phases_s]),
    )
