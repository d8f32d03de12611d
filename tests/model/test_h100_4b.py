"""Compare predictions with a training run of 4 billion parameters on an H100, which is not reproduced within the aims.

The aims are 10 % of the iteration, and 30 % or 20 ms of the exposed time. No slowdown is in the predictions. With the
slowdown of the first steps of that run, exposed times are predicted 96 to 100 % too short. The report
of 2026-11-29 lists all of them.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from perf_model.planner import evaluate, in_forward_order
from perf_model.prediction.cost import CostModel
from perf_model.prediction.hardware import HardwareProfile
from perf_model.prediction.memory import DEFAULT_SETUP
from perf_model.prediction.overlap_windows import Windows
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload

DATA = Path(__file__).parents[2] / "benchmarks/data"
NUMEL, UNITS = 4_022_000_000, 117
ROWS = {row["arm"]: row for row in csv.DictReader((DATA / "h100_4b.csv").open())}
ERRORS = {
    "8 GB at micro-batch 1": (-0.17, -0.25),
    "8 GB at micro-batch 4": (-0.12, -0.30),
    "empty block at micro-batch 1": (-0.10, -1.0),
}
"""The errors of the iteration and of the exposed time."""


def placements(cpu_share: float, streamed_share: float) -> tuple[Placement, ...]:
    """Return the shares of the run: residents first, and units of the CPU evenly among the streamed ones."""
    residents = round((1 - cpu_share - streamed_share) * UNITS)
    placed = [Placement.RESIDENT] * residents
    for position in range(UNITS - residents):
        expected = (position + 1) * cpu_share / max(cpu_share + streamed_share, 1e-9)
        is_due = placed.count(Placement.CPU) + 0.5 < expected
        placed.append(Placement.CPU if is_due else Placement.STREAMED)
    return tuple(placed)


@pytest.mark.parametrize("arm", ROWS)
def test_errors_of_the_predicted_iteration_and_exposed_time_are_as_stated(arm: str) -> None:
    row = {name: float(value) for name, value in ROWS[arm].items() if name != "arm"}
    cost = CostModel.from_profile(HardwareProfile.read(DATA / "h100_profile.json"))
    placed = placements(row["cpu_share"], row["streamed_share"])
    workload = Workload.from_numels([NUMEL // UNITS] * UNITS)
    plan = in_forward_order(UpdatePlan(workload=workload, placements=placed, num_slots=2), None)
    windows = Windows(backward_s=row["backward_s"], forward_s=row["forward_s"])
    added = evaluate(plan, cost, windows, DEFAULT_SETUP).added
    iteration_s = row["backward_s"] + row["step_s"] + row["forward_s"] + added.total_s
    found = iteration_s / row["iteration_s"] - 1, added.exposed_s / row["exposed_s"] - 1
    assert found == pytest.approx(ERRORS[arm], abs=0.02)
