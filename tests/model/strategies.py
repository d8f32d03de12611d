"""What hypothesis draws: workloads, placements, slot counts."""

from __future__ import annotations

from hypothesis import strategies as st

from perf_model.placement import Placement
from perf_model.plan import UpdatePlan
from perf_model.workload import Workload

numels = st.lists(st.integers(1, 10**6), min_size=1, max_size=12)


@st.composite
def plans(draw: st.DrawFn) -> UpdatePlan:
    workload = Workload.of(draw(numels))
    count = len(workload.sub_groups)
    placements = draw(st.lists(st.sampled_from(Placement), min_size=count, max_size=count))
    return UpdatePlan(workload=workload, placements=tuple(placements), num_slots=draw(st.integers(1, 6)))
