"""Check how much accelerator memory the optimizer may hold, given the memory that was free at the peak of each step."""

from __future__ import annotations

from deep_opt_states.zero.step.gpu_memory import OBSERVED_STEPS, GpuBudget

MARGIN = 100
HALF = MARGIN // 2


class BudgetedTraining:
    """A training run that needs some of ``total`` bytes itself, and in which the optimizer holds all that it may."""

    def __init__(self, needs: int | None = None, *, limit: int | None = None) -> None:
        self.budget = GpuBudget(start_bytes=limit or 0, margin_bytes=MARGIN, fills=limit is None)
        self.total, self.held, self.peak, self.retries = 1000, limit or 0, 0, 0
        if needs is not None:
            self.steps(*[needs] * OBSERVED_STEPS)

    def step(self, needs: int, *, evicts: bool = False) -> int:
        held = 0 if evicts else self.held
        self.peak = max(self.peak, needs + held)
        free = self.total - (needs if evicts else self.peak)
        self.budget.observe(free, self.retries, self.held, is_evicted=evicts)
        if evicts or self.held != self.budget.bytes:
            # The peak counts anew when the optimizer takes memory or releases it.
            self.peak = 0
        self.held = self.budget.bytes
        return self.budget.bytes

    def steps(self, *needs: int) -> list[int]:
        return [self.step(each) for each in needs]


def test_the_budget_is_once_all_that_is_free_after_the_observed_steps_less_the_margin() -> None:
    training = BudgetedTraining()
    for needs in (300, 500, 400)[: OBSERVED_STEPS - 1]:
        assert not training.budget.is_short_with(0), "the budget does not shrink after these steps"
        assert training.step(needs) == 0
    # The peak of all observed steps counts, and not the last one's.
    assert training.step(200) == 1000 - 500 - MARGIN
    training.total = 5000
    assert training.steps(*[10] * 20) == [400] * 20
    assert BudgetedTraining(950).held == 0, "less than the margin is free"


def test_what_rules_require_is_allowed_until_memory_is_short() -> None:
    for training in (BudgetedTraining(), BudgetedTraining(limit=0)):
        training.budget.require(300)
        training.held = 300
        assert training.steps(*[600] * 10, 680) == [300] * 10 + [1000 - 680 - MARGIN]


def test_memory_is_short_when_half_of_the_margin_is_taken() -> None:
    for more, allowed in ((HALF, 300), (HALF + 1, 300 - HALF - 1)):
        training = BudgetedTraining(600)
        # A forward is short of memory when the step will be.
        assert training.budget.is_short_with(MARGIN - more) == (allowed < 300)
        # After the first of these steps the margin is free again, so that the next one finds nothing to change.
        assert training.steps(600 + more, 600 + more) == [allowed] * 2


def test_a_retried_allocation_halves_what_is_held_or_forbids_everything_if_nothing_was() -> None:
    training = BudgetedTraining()
    training.retries = 7
    training.steps(*[600] * OBSERVED_STEPS)
    assert training.held == 300, "retries before the budget grew do not count"
    for allowed in (150, 75, 37):
        training.retries += 1
        assert training.steps(600, 600) == [allowed] * 2, "a retry counts once"
    training = BudgetedTraining(600)
    training.retries += 1
    # A retry before the memory is released is none without it.
    training.budget.count_retries(training.retries, training.held)
    assert training.step(650, evicts=True) == 150
    training.retries += 1
    assert training.step(990, evicts=True) == 0


def test_a_peak_without_our_states_shows_what_a_larger_input_leaves() -> None:
    training = BudgetedTraining(200)
    assert training.held == 700
    assert training.step(200 + HALF, evicts=True) == 700, "there is enough memory"
    # The peak with our states was 900. Without them the peak is below that, and it is the need of training itself.
    assert training.step(800, evicts=True) == 1000 - 800 - MARGIN
    assert training.step(800 + HALF + 1) == 1000 - 800 - HALF - 1 - MARGIN


def test_a_budget_of_the_user_holds_from_the_start_and_only_shrinks() -> None:
    training = BudgetedTraining(limit=400)
    assert training.steps(*[100] * 10, 700, *[100] * 10) == [400] * 10 + [200] * 11
    for limit, allowed in ((600, 200), (100, 100), (150, 100), (-5, 0), (100, 0)):
        training.budget.limit(limit)
        assert training.budget.bytes == allowed
