"""Check how much accelerator memory the optimizer may hold, given the memory that was free at the peak of each step."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
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


def filling(needs: int | None = None) -> BudgetedTraining:
    """Return a training that may fill the GPU, after the observed steps if those have ``needs``."""
    training = BudgetedTraining(GpuBudget(start_bytes=0, margin_bytes=MARGIN, fills=True))
    for _ in range(0 if needs is None else OBSERVED_STEPS):
        training.step(needs or 0)
    return training


def limited(limit: int) -> BudgetedTraining:
    return BudgetedTraining(GpuBudget(start_bytes=limit, margin_bytes=MARGIN, fills=False), held=limit)


def test_the_budget_is_once_all_that_is_free_after_the_observed_steps_less_the_margin() -> None:
    training = filling()
    for needs in (300, 500, 400)[: OBSERVED_STEPS - 1]:
        assert not training.budget.is_short_with(0), "the budget does not shrink after these steps"
        assert training.step(needs) == 0
    # The peak of all observed steps counts, and not that of the last.
    assert training.step(200) == 1000 - 500 - MARGIN
    training.total = 5000
    assert [training.step(10) for _ in range(20)] == [400] * 20
    assert filling(950).held == 0, "less than the margin is free"


@pytest.mark.parametrize("training", [filling(), limited(0)], ids=["fills the GPU", "limit of 0"])
def test_what_rules_require_is_allowed_until_memory_is_short(training: BudgetedTraining) -> None:
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


@pytest.mark.parametrize(("more", "allowed"), [(MARGIN // 2, 300), (MARGIN // 2 + 1, 300 - MARGIN // 2 - 1)])
def test_memory_is_short_when_half_of_the_margin_is_taken(more: int, allowed: int) -> None:
    training = filling(600)
    # A forward is short of memory when the step will be.
    assert training.budget.is_short_with(MARGIN - more) == (allowed < 300)
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
    training = filling(600)
    training.retries += 1
    # A retry before the memory is given back is none without it.
    training.budget.count_retries(training.retries, training.held)
    assert training.step(650, evicts=True) == 150
    training.retries += 1
    assert training.step(990, evicts=True) == 0


def test_a_peak_without_our_states_shows_what_a_larger_input_leaves() -> None:
    training = filling(200)
    assert training.held == 700
    assert training.step(200 + MARGIN // 2, evicts=True) == 700, "there is enough memory"
    # The peak with our states was 900. Without them the peak is below that, and it is the need of training itself.
    assert training.step(800, evicts=True) == 1000 - 800 - MARGIN
    assert training.step(800 + MARGIN // 2 + 1) == 1000 - 800 - MARGIN // 2 - 1 - MARGIN


def test_a_budget_of_the_user_holds_from_the_start_and_only_shrinks() -> None:
    training = limited(400)
    assert [training.step(100) for _ in range(10)] == [400] * 10
    assert training.step(700) == 200
    assert [training.step(100) for _ in range(10)] == [200] * 10
    for limit, allowed in ((600, 200), (100, 100), (150, 100), (-5, 0), (100, 0)):
        training.budget.limit(limit)
        assert training.budget.bytes == allowed


@pytest.mark.parametrize("seed", range(20))
def test_in_random_trainings_the_budget_is_free_memory_and_only_shrinks(seed: int) -> None:
    chance = random.Random(seed)
    training = filling() if chance.random() < 0.7 else limited(chance.randrange(800))
    base = chance.randrange(1000)
    for number in range(600):
        training.retries += chance.random() < 0.05
        evicts = chance.random() < 0.2
        needs = max(0, min(base + chance.randrange(-300, 300), 1000 if evicts else 1000 - training.held))
        training.step(needs, evicts=evicts)
        assert training.budgets[-1] >= 0
        if number >= OBSERVED_STEPS:
            assert training.budgets[-1] <= training.budgets[-2]
            assert training.budgets[-1] + needs <= 1000, "the next plan may hold memory that was not free in this step"


def test_without_a_limit_after_an_allocation_that_fails_a_random_training_fails() -> None:
    with mock.patch.object(GpuBudget, "limit", return_value=None), pytest.raises(AssertionError):
        every_random_training()


def every_random_training() -> None:
    for seed in range(20):
        test_in_random_trainings_the_budget_is_free_memory_and_only_shrinks(seed)
