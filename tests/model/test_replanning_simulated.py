"""Simulate training on machines whose rates change: the gain is recovered in time, and nothing flaps."""

from __future__ import annotations

from functools import cache

import pytest

from perf_model.plan_request import PlanRequest, SizedPlan
from perf_model.prediction.cost import Resource
from perf_model.replanning.measurements import FIRST_STEPS, WINDOW_STEPS
from perf_model.replanning.policy import LEAST_GAIN, QUIET_STEPS
from tests.model.simulated_training import Machine, SimulatedTraining, request_for

RUNS = {
    "Llama-3-8B on an H100": ("h100-pcie5", "Llama-3-8B", 1, 50_000_000, 40.0),
    "13B on 4 A100": ("a100-pcie4", "13B", 4, 50_000_000, 24.0),
    "20B on 4 H100": ("h100-pcie5", "20B", 4, 50_000_000, 25.0),
    "Llama-3-8B on a GH200": ("gh200", "Llama-3-8B", 1, 100_000_000, 30.0),
}
"""The arguments of ``request_for``: the last one is the GPU memory for states in GB."""

LINK = (Resource.H2D, Resource.D2H, Resource.BOTH)
CHANGES: dict[str, tuple[float, tuple[Resource, ...]]] = {
    "half of the cores": (0.5, (Resource.CPU,)),
    "half of the link": (0.5, LINK),
    "a third of one direction": (1 / 3, (Resource.H2D,)),
    "half of the memory bandwidth": (0.5, (Resource.DRAM,)),
    "twice the cores": (2.0, (Resource.CPU,)),
}

WITH_GAIN = (
    ("Llama-3-8B on an H100", "half of the cores", 200),
    ("13B on 4 A100", "half of the link", 242),
    ("20B on 4 H100", "a third of one direction", 234),
    ("13B on 4 A100", "a third of one direction", 249),
    ("20B on 4 H100", "half of the cores", 220),
    ("20B on 4 H100", "half of the link", 227),
    ("Llama-3-8B on a GH200", "half of the link", 212),
    ("Llama-3-8B on a GH200", "a third of one direction", 219),
)
"""The changes after which another plan exposes at least ``LEAST_GAIN`` less, each at another step of a window."""

WITHOUT_GAIN = (
    ("Llama-3-8B on an H100", "half of the memory bandwidth", 221),
    ("20B on 4 H100", "half of the memory bandwidth", 241),
    ("13B on 4 A100", "twice the cores", 213),
    ("Llama-3-8B on a GH200", "half of the cores", 205),
)
"""The changes after which no plan exposes that much less."""

IN_MAKE_TEST = 3


@cache
def request(run: str) -> PlanRequest:
    return request_for(*RUNS[run])


def changes_at(run: str, change: str, first: int, last: int = 10**9) -> SimulatedTraining:
    """Return a training run in which the machine is changed from step ``first`` to step ``last``."""
    usual = Machine(request(run).cost, request(run).windows)
    scale, resources = CHANGES[change]
    changed = usual.scaled(scale, *resources)
    return SimulatedTraining(request(run), lambda step: changed if first <= step <= last else usual)


@pytest.mark.parametrize(
    ("run", "change", "first"),
    [
        pytest.param(*case, marks=[pytest.mark.thorough] if number >= IN_MAKE_TEST else [])
        for number, case in enumerate(WITH_GAIN)
    ],
)
def test_nine_tenths_of_the_gain_are_recovered_within_two_windows(run: str, change: str, first: int) -> None:
    training = changes_at(run, change, first)
    training.run(first)
    old_s, best_s = training.exposed_s(), training.best_exposed_s()
    assert best_s < (1 - LEAST_GAIN) * old_s
    training.run(first + 2 * WINDOW_STEPS - 1)
    assert old_s - training.exposed_s() >= 0.9 * (old_s - best_s)
    assert len([step for step in training.decisions if step > FIRST_STEPS]) == 1
    (*_, decision) = training.decisions.values()
    assert decision.after_s == pytest.approx(training.exposed_s(), rel=0.1), "predicted with the measured rates"
    assert decision.before_s == pytest.approx(old_s, rel=0.1)


@pytest.mark.thorough
@pytest.mark.parametrize(("run", "change", "first"), WITHOUT_GAIN)
def test_a_change_after_which_no_plan_is_much_better_changes_nothing(run: str, change: str, first: int) -> None:
    training = changes_at(run, change, first)
    training.run(first)
    assert training.best_exposed_s() > (1 - LEAST_GAIN) * training.exposed_s()
    training.run(first + 4 * WINDOW_STEPS)
    assert training.decisions.keys() == {FIRST_STEPS}


@pytest.mark.parametrize("run", RUNS)
def test_noise_changes_nothing_in_a_thousand_steps(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that hardly anything is planned either."""
    training = SimulatedTraining(request(run), seed=1)
    training.run(FIRST_STEPS)
    planned = []
    plan = PlanRequest.plan

    def count_and_plan(asked: PlanRequest) -> SizedPlan:
        planned.append(asked)
        return plan(asked)

    monkeypatch.setattr(PlanRequest, "plan", count_and_plan)
    training.run(1000)
    assert training.decisions.keys() == {FIRST_STEPS}
    assert len(planned) <= 2


@pytest.mark.parametrize("steps", [1, 5, 20])
def test_a_transient_of_a_few_steps_changes_nothing(steps: int) -> None:
    run, change, _ = WITH_GAIN[1]
    training = changes_at(run, change, 140, 139 + steps)
    training.run(300)
    assert training.decisions.keys() == {FIRST_STEPS}


def test_the_plan_follows_a_machine_that_recovers() -> None:
    run, change, _ = WITH_GAIN[0]
    training = changes_at(run, change, 101, 400)
    training.run(FIRST_STEPS)
    usual_s = training.exposed_s()
    training.run(400)
    assert training.exposed_s() < 0.9 * training.exposed_s(training.decisions[FIRST_STEPS].chosen.plan)
    training.run(400 + 2 * WINDOW_STEPS)
    assert training.exposed_s() <= 1.02 * usual_s


@pytest.mark.thorough
def test_a_machine_that_changes_all_the_time_does_not_change_the_plan_each_time() -> None:
    """Check a machine that is slow for every other 150 steps: at first the plan follows, later it stays."""
    run, change, _ = WITH_GAIN[0]
    usual = Machine(request(run).cost, request(run).windows)
    scale, resources = CHANGES[change]
    changed = usual.scaled(scale, *resources)
    training = SimulatedTraining(request(run), lambda step: changed if step // 150 % 2 else usual)
    training.run(QUIET_STEPS)
    assert 2 <= len(training.decisions) - 1 <= 3, "of 6 changes of the machine"


def test_equal_measurements_lead_to_equal_decisions() -> None:
    run, change, first = WITH_GAIN[1]
    lines = []
    for _ in range(2):
        training = changes_at(run, change, first)
        training.run(first + 2 * WINDOW_STEPS)
        lines.append([(step, str(decision)) for step, decision in training.decisions.items()])
    assert lines[0] == lines[1]
    assert len(lines[0]) == 2
