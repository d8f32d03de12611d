"""Choose a placement per unit that minimises exposed update time within the memory budgets.

The planner follows these principles:

1. **The simulation decides.** The best plan is the one with the least simulated exposed time. Of plans that expose
   equally little, it is the one with the least update time, exposed and hidden together.
2. **The search depends on forward.** Without a forward window it does not matter where in the order a unit of a
   placement is, so only the shares of the placements are searched (``placement_search.py``). In a window of forward the
   places matter, too (``window_search.py``).
3. **Be deterministic.** Nothing depends on the clock, and chance has a fixed seed, so every rank finds the same plan.

``unit_sizes.py`` also chooses the size of the units.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from perf_model.prediction.cost import CostModel
from perf_model.prediction.memory import DEFAULT_SETUP, MemoryUse, TrainingSetup, memory_of
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.simulate import Simulator
from perf_model.prediction.timeline import Timeline
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.simple_placements import keep_fixed, place_all
from perf_model.schedule.workload import Workload
from perf_model.search.bounds import Bound, sharpest_exposed_bound, work_bound
from perf_model.search.budgets import Budgets, DoesNotFit
from perf_model.search.capacity import ResidentCapacity
from perf_model.search.placement_search import EXHAUSTIVE_UP_TO, PlacementSearch
from perf_model.search.use_order import arrange, map_back
from perf_model.search.window_search import WindowSearch


@dataclass(frozen=True, kw_only=True)
class PlannedUpdate:
    """A plan and its prediction.

    ``timeline`` is the simulated update, of which ``exposed_s`` seconds are exposed. No plan can beat the bounds:
    ``bound`` is of all the work, exposed and hidden together, and ``exposed_bound`` of the exposed time.
    ``simulations`` counts the plans that were simulated to find this one.
    """

    plan: UpdatePlan
    timeline: Timeline
    exposed_s: float
    memory: MemoryUse
    bound: Bound
    exposed_bound: Bound
    simulations: int = 0

    @property
    def update_s(self) -> float:
        """Return the seconds of the update, exposed and hidden together."""
        return self.timeline.active_s

    @property
    def ratio_to_bound(self) -> float:
        """Return the update time as a multiple of its lower bound."""
        return self.update_s / self.bound.seconds

    @property
    def ratio_to_exposed_bound(self) -> float:
        """Return the exposed time as a multiple of its lower bound."""
        return self.exposed_s / self.exposed_bound.seconds


def plan_updates(
    workload: Workload,
    cost: CostModel,
    budgets: Budgets | None = None,
    windows: Windows | None = None,
    setup: TrainingSetup = DEFAULT_SETUP,
) -> PlannedUpdate:
    """Return the best plan found, with its prediction. Units whose placement is fixed keep it.

    ``budgets`` None means unlimited memory, and ``windows`` None means that nothing can be hidden. Raise ``DoesNotFit``
    if no plan fits, and ``ValueError`` for a workload without units or a fixed placement that the machine cannot have.
    """
    if not workload.units:
        raise ValueError("A workload to plan for has at least one unit, found none.")
    budgets, windows = budgets or Budgets(), windows or Windows()
    require_memory(workload, cost, budgets, setup)
    arranged, in_order = arrange(workload, windows.first_use), replace(windows, first_use=None)
    plan, simulations = None, 0
    if order_matters(workload, cost, windows):
        search = WindowSearch(arranged, cost, budgets, in_order, setup)
        search.explore()
        search.narrow()
        search.refine()
        plan, simulations = search.result(), search.simulated
    if plan is None:
        placement_search = PlacementSearch(arranged, cost, budgets, in_order, setup)
        plan = placement_search.run()
        simulations += placement_search.simulated
    found = evaluate(map_back(plan, workload, windows.first_use), cost, budgets, windows, setup)
    return replace(found, simulations=simulations)


def require_memory(workload: Workload, cost: CostModel, budgets: Budgets, setup: TrainingSetup) -> None:
    """Raise ``DoesNotFit`` if not even the plan with the least memory fits.

    Host memory is the same for every plan. The plan with the least memory of the accelerator updates everything on the
    CPU, except for the units whose placement is fixed. Raise ``ValueError`` if the machine cannot have one of these.
    """
    for unit in workload.units:
        if unit.fixed is not None and unit.fixed not in cost.placements:
            raise ValueError(
                f"{unit.fixed.value} needs a rate of Adam on the accelerator, found none: {unit.label}.\n"
                f"The profile has the reason at gpu_adam_params_per_s. Find what is missing: deep-opt-states doctor. "
                f"Measure without other load on the machine: deep-opt-states profile."
            )
    least = keep_fixed(workload, place_all(workload, Placement.CPU))
    missing = budgets.missing(memory_of(UpdatePlan(workload=workload, placements=least, num_slots=1), setup))
    if missing:
        fixed = {placement.value for placement in least if placement is not Placement.CPU}
        remedy = f"Let fewer units be {' or '.join(sorted(fixed))}, or use more ranks." if fixed else "Use more ranks."
        raise DoesNotFit(missing, remedy)


def order_matters(workload: Workload, cost: CostModel, windows: Windows) -> bool:
    """Return whether ``WindowSearch`` is to plan: forward overlaps, and there are too many units to try all."""
    return windows.forward_s > 0.0 and not cost.blocks and len(workload.units) > EXHAUSTIVE_UP_TO


def evaluate(
    plan: UpdatePlan, cost: CostModel, budgets: Budgets, windows: Windows, setup: TrainingSetup
) -> PlannedUpdate:
    """Return the prediction of ``plan``, which need not come from the planner."""
    timeline = Simulator(cost, windows).run(plan.schedule, plan.workload)
    workload, capacity = plan.workload, ResidentCapacity.from_gpu_bytes(plan.workload, budgets.gpu_bytes, setup)
    return PlannedUpdate(
        plan=plan,
        timeline=timeline,
        exposed_s=windows.exposed_s(timeline, workload, cost),
        memory=memory_of(plan, setup),
        bound=work_bound(workload.numel, cost, capacity),
        exposed_bound=sharpest_exposed_bound(workload, cost, windows, capacity),
    )
