"""Test the errors of the rules of ``plan`` for published runs, and that no run is fitted and predicted."""

from __future__ import annotations

from benchmarks.published import rounded
from benchmarks.published.comparison import MODELS, RULES_OF_PLAN, STRIDES, compare
from benchmarks.published.runs import read_runs
from perf_model.presets.comparison import LARGER_MODELS


def test_the_rules_of_plan_predict_published_settings_that_were_not_fitted_with_the_errors_that_it_prints() -> None:
    """Check the figures of the report of 2026-11-29: a simulated update, and gradients that backward hides."""
    errors = []
    for split in (STRIDES, MODELS):
        compared = compare(read_runs(), split)
        for quantity in ("update", "iteration"):
            errors.append(rounded(compared.errors_of(quantity, RULES_OF_PLAN, where=RULES_OF_PLAN)))
        fitted, predicted = (
            {found.run.trained for found in compared.predictions if found.fitted is is_fitted}
            for is_fitted in (True, False)
        )
        assert not fitted & predicted
    assert errors == [(22, 0.063, 0.170), (22, 0.022, 0.050), (60, 0.028, 0.151), (45, 0.038, 0.167)]
    assert errors[-1] == LARGER_MODELS
