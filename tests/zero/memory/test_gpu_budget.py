"""Check how much accelerator memory the optimizer may hold, given the memory that was free at the peak of each step."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from unittest import mock

import pytest

from deep_opt_states.zero.step.gpu_memory import OBSERVED_STEPS, GpuBudget

MARGIN = 100


@dataclass
class BudgetedTraining:
    """A training that needs some of ``total`` bytes for itself, and in which the optimizer holds all that it may."""

    budget: GpuBudget
    total: int = 1000
    held: int = 0
    peak: int = 0
    retries: int = 0
    budgets: list[int] = field(default_factory=list)

    def step(self, needs: int, *, evicts: bool = False) -> int:
        """Train one step that ``needs`` so many bytes, and return the budget afterwards."""
        held = 0 if evicts else self.held
        self.peak = max(self.peak, needs + held)
        free = self.total - (needs if evicts else self.peak)
        self.budget.observe(free, self.retries, self.held, is_evicted=evicts)
        self.budgets.append(self.budget.bytes)
        if evicts or self.held != self.budget.bytes:
            # The peak counts anew when the optimizer takes memory or gives it back.
            self.peak = 0
        self.held = self.budget.bytes
        return self.budget.bytes


def filling(start: int = 0) -> BudgetedTraining:
    return BudgetedTraining(GpuBudget(start_bytes=start, margin_bytes=MARGIN, fills=True))


def limited(limit: int) -> BudgetedTraining:
    return BudgetedTraining(GpuBudget(start_bytes=limit, margin_bytes=MARGIN, fills=False), held=limit)


def test_nothing_is_allowed_before_the_observed_steps_and_then_all_that_is_free_less_the_margin() -> None:
    training = filling()
    for needs in (300, 500, 400)[: OBSERVED_STEPS - 1]:
        assert training.step(needs) == 0
    # The peak of all observed steps counts, and not that of the last.
    assert training.step(200) == 1000 - 500 - MARGIN


@pytest.mark.parametrize("start", [filling, partial(limited, 0)], ids=["fills the GPU", "limit of 0"])
def test_what_rules_require_is_allowed_until_memory_is_short(start: Callable[[], BudgetedTraining]) -> None:
    training = start()
    training.budget.require(300)
    training.held = 300
    assert [training.step(600) for _ in range(10)] == [300] * 10
    assert training.step(680) == 1000 - 680 - MARGIN


def test_memory_that_is_not_held_yet_follows_every_growth_of_the_need() -> None:
    """Check the steps between the first budget and the first plan that uses it."""
    budget = GpuBudget(start_bytes=0, margin_bytes=MARGIN, fills=True)
    for needs, allowed in ((300, 0), (300, 0), (300, 600), (301, 599), (700, 200), (300, 200), (950, 0), (300, 0)):
        budget.observe(1000 - needs, 0, 0)
        assert budget.bytes == allowed
    budget = GpuBudget(start_bytes=0, margin_bytes=MARGIN, fills=True)
    for _ in range(OBSERVED_STEPS):
        budget.observe(700, 0, 0)
    # A plan holds a part of the 600 bytes: that part is kept until half of the margin is taken.
    budget.observe(1000 - 545 - 400, 0, 400)
    assert budget.bytes == 400


def test_memory_that_grows_after_an_eviction_makes_memory_short() -> None:
    training = filling()
    for _ in range(OBSERVED_STEPS):
        training.step(200)
    assert training.held == 700
    # A longer input: everything is given back, and less fits afterwards.
    assert training.step(600, evicts=True) == 300
    assert training.step(600 + MARGIN // 2) == 300
    assert training.step(600 + MARGIN // 2 + 1) == 1000 - 600 - MARGIN // 2 - 1 - MARGIN


def test_the_budget_grows_once_only() -> None:
    training = filling()
    for _ in range(OBSERVED_STEPS):
        training.step(600)
    training.total = 5000
    assert [training.step(10) for _ in range(20)] == [300] * 20


def test_no_memory_is_used_where_less_than_the_margin_is_free() -> None:
    training = filling()
    assert [training.step(950) for _ in range(10)] == [0] * 10


@pytest.mark.parametrize(("more", "allowed"), [(MARGIN // 2, 300), (MARGIN // 2 + 1, 300 - MARGIN // 2 - 1)])
def test_memory_is_short_when_half_of_the_margin_is_taken(more: int, allowed: int) -> None:
    training = filling()
    for _ in range(OBSERVED_STEPS):
        training.step(600)
    assert training.step(600 + more) == allowed
    # The margin is free again, so that the next step finds nothing to change.
    assert training.step(600 + more) == allowed


def test_a_retried_allocation_halves_what_is_held() -> None:
    training = filling()
    training.retries = 7
    for _ in range(OBSERVED_STEPS):
        training.step(600)
    assert training.held == 300, "retries before the budget grew do not count"
    found = []
    for _ in range(3):
        training.retries += 1
        found.append(training.step(600))
        assert training.step(600) == found[-1], "a retry counts once"
    assert found == [150, 75, 37]


def test_a_retried_allocation_while_nothing_was_held_forbids_everything() -> None:
    training = filling()
    for _ in range(OBSERVED_STEPS):
        training.step(600)
    training.retries += 1
    assert training.step(990, evicts=True) == 0


def test_retries_before_the_memory_is_given_back_do_not_count_as_retries_without_it() -> None:
    training = filling()
    for _ in range(OBSERVED_STEPS):
        training.step(600)
    training.retries += 1
    training.budget.count_retries(training.retries, training.held)
    assert training.step(650, evicts=True) == 150
    assert training.step(650) == 150


def test_a_forward_is_short_of_memory_when_the_step_will_be() -> None:
    training = filling()
    for _ in range(OBSERVED_STEPS - 1):
        assert not training.budget.is_short_with(0), "the budget does not shrink after these steps"
        training.step(600)
    training.step(600)
    for free, is_short in ((MARGIN // 2, False), (MARGIN // 2 - 1, True)):
        assert training.budget.is_short_with(free) == is_short
        assert (training.step(1000 - training.held - free) < 300) == is_short


def test_a_peak_without_our_states_shows_what_a_larger_input_leaves() -> None:
    training = filling()
    for _ in range(OBSERVED_STEPS):
        training.step(200)
    assert training.held == 700
    # The peak with our states was 900. Without them the peak is below that, and it is the need of training itself.
    assert training.step(800, evicts=True) == 1000 - 800 - MARGIN
    assert training.step(800) == 100


def test_a_peak_without_our_states_changes_nothing_if_there_is_enough_memory() -> None:
    training = filling()
    for _ in range(OBSERVED_STEPS):
        training.step(200)
    assert training.step(200 + MARGIN // 2, evicts=True) == 700


def test_a_budget_of_the_user_holds_from_the_start_and_only_shrinks() -> None:
    training = limited(400)
    assert training.budget.bytes == 400
    assert [training.step(100) for _ in range(10)] == [400] * 10
    assert training.step(700) == 200
    assert [training.step(100) for _ in range(10)] == [200] * 10


def test_a_limit_is_never_negative_and_never_raised() -> None:
    budget = GpuBudget(start_bytes=500, margin_bytes=MARGIN, fills=False)
    for limit, allowed in ((600, 500), (300, 300), (400, 300), (-5, 0), (100, 0)):
        budget.limit(limit)
        assert budget.bytes == allowed


@pytest.mark.parametrize("seed", range(200))
def test_in_random_trainings_the_budget_is_free_memory_and_only_shrinks(seed: int) -> None:
    chance = random.Random(seed)
    training = filling() if chance.random() < 0.7 else limited(chance.randrange(800))
    base = chance.randrange(1000)
    for number in range(60):
        training.retries += chance.random() < 0.05
        evicts = chance.random() < 0.2
        needs = max(0, min(base + chance.randrange(-300, 300), 1000 if evicts else 1000 - training.held))
        training.step(needs, evicts=evicts)
        assert training.budgets[-1] >= 0
        if number >= OBSERVED_STEPS:
            assert training.budgets[-1] <= training.budgets[-2]
            assert training.budgets[-1] + needs <= 1000, "the next plan may hold memory that was not free in this step"


@pytest.mark.parametrize("seed", range(20))
def test_free_memory_that_varies_by_less_than_half_of_the_margin_changes_nothing(seed: int) -> None:
    chance = random.Random(seed)
    training = filling()
    for _ in range(OBSERVED_STEPS):
        training.step(500)
    for _ in range(50):
        training.step(500 + chance.randrange(-300, MARGIN // 2), evicts=chance.random() < 0.1)
    assert set(training.budgets[OBSERVED_STEPS - 1 :]) == {1000 - 500 - MARGIN}


def every_random_training() -> None:
    for seed in range(200):
        test_in_random_trainings_the_budget_is_free_memory_and_only_shrinks(seed)


@pytest.mark.parametrize(
    "check",
    [
        test_a_retried_allocation_halves_what_is_held,
        test_a_retried_allocation_while_nothing_was_held_forbids_everything,
        test_a_peak_without_our_states_shows_what_a_larger_input_leaves,
        test_a_budget_of_the_user_holds_from_the_start_and_only_shrinks,
        test_a_limit_is_never_negative_and_never_raised,
        every_random_training,
    ],
)
def test_without_a_limit_after_an_allocation_that_fails_a_check_fails(check: Callable[[], None]) -> None:
    with mock.patch.object(GpuBudget, "limit", return_value=None), pytest.raises(AssertionError):
        check()
