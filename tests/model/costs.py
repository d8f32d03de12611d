"""Cost models and plans for tests. They describe no measured machine."""

from __future__ import annotations

from hypothesis import strategies as st

from perf_model.planner import PlannedUpdate, plan_units
from perf_model.prediction.cost import CostModel, Resource, traffic_by_action
from perf_model.prediction.memory import DEFAULT_SETUP, Budgets, TrainingSetup
from perf_model.prediction.overlap_windows import Windows
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload

PLENTY = 1e15


def cost(
    *,
    cpu: float = 1e9,
    gpu: float = 1e12,
    h2d: float = 12e9,
    d2h: float = 12e9,
    both: float = PLENTY,
    dram: float = PLENTY,
    latency: float = 0.0,
) -> CostModel:
    """Return a cost model: by default, only the CPU and each direction of the link are bottlenecks."""
    links = {Resource.H2D: h2d, Resource.D2H: d2h, Resource.BOTH: both}
    return CostModel.from_rates(
        cpu_adam_params_per_s=cpu,
        gpu_adam_params_per_s=gpu,
        capacities={**links, Resource.PAGEABLE: PLENTY, Resource.DRAM: dram},
        traffic=traffic_by_action(),
        copy_latency_s=latency,
    )


costs = st.builds(
    cost,
    cpu=st.floats(1e8, 1e10),
    gpu=st.floats(1e10, 1e12),
    h2d=st.floats(1e9, 5e11),
    d2h=st.floats(1e9, 5e11),
    both=st.floats(1e9, 1e12),
    dram=st.floats(1e10, 1e12),
    latency=st.floats(0, 1e-4),
)


def plan_of(
    *placements: Placement, num_slots: int = 1, numel: int = 10**9, eager: frozenset[int] = frozenset()
) -> UpdatePlan:
    workload = Workload.from_numels([numel] * len(placements))
    return UpdatePlan(workload=workload, placements=placements, num_slots=num_slots, eager=eager)


windows = st.builds(Windows, backward_s=st.floats(0, 1), forward_s=st.floats(0, 1))
NO_WINDOWS = Windows()
UNLIMITED = Budgets()


def plan_updates(
    workload: Workload,
    cost: CostModel,
    budgets: Budgets = UNLIMITED,
    windows: Windows = NO_WINDOWS,
    setup: TrainingSetup = DEFAULT_SETUP,
) -> PlannedUpdate:
    return plan_units(lambda size: workload, [1], cost, budgets, windows, setup)
