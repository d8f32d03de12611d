"""Test the predictions of the published runs, and that they are fitted to other runs than they predict."""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.published import rounded
from benchmarks.published.comparison import (
    LINE,
    MODEL,
    MODELS,
    NODES,
    PER_PARAMETER,
    RULES_OF_PLAN,
    STRIDES,
    RunComparison,
    compare,
)
from benchmarks.published.runs import MeasuredRun, read_runs
from perf_model.presets.comparison import LARGER_MODELS

# Run on one worker of pytest-xdist, so that each comparison is made only once.
pytestmark = pytest.mark.xdist_group("published runs")

SPLITS = {"strides": STRIDES, "models": MODELS, "nodes": NODES}


@cache
def published() -> list[MeasuredRun]:
    return read_runs()


@cache
def compared(split: str) -> RunComparison:
    return compare(published(), SPLITS[split])


@pytest.mark.parametrize("split", SPLITS)
def test_a_published_setting_is_fitted_or_predicted_and_never_both(split: str) -> None:
    settings: dict[bool, set[object]] = {True: set(), False: set()}
    for prediction in compared(split).predictions:
        settings[prediction.fitted].add(prediction.run.trained)
    assert not settings[True] & settings[False]


@pytest.mark.parametrize(
    ("split", "quantity", "rule", "expected"),
    [
        ("strides", "update", LINE, (22, 0.028, 0.065)),
        ("models", "update", PER_PARAMETER, (60, 0.04, 0.10)),
        ("strides", "iteration", None, (22, 0.08, 0.20)),
        ("models", "iteration", None, (60, 0.08, 0.20)),
        ("nodes", "iteration", PER_PARAMETER, (3, 0.045, 0.085)),
    ],
)
def test_published_times_are_predicted_within_the_aims_and_better_than_by_a_simple_rule(
    split: str, quantity: str, rule: str | None, expected: tuple[int, float, float]
) -> None:
    comparison = compared(split)
    count, median, p90 = rounded(comparison.errors_of(quantity, MODEL, where=MODEL if split != "nodes" else rule))
    assert count == expected[0]
    assert median <= expected[1]
    assert p90 <= expected[2]
    if rule is not None:
        ours, theirs = (rounded(comparison.errors_of(quantity, name, where=rule)) for name in (MODEL, rule))
        assert ours[0] == theirs[0]
        assert ours[1] < theirs[1]


def test_the_rules_of_plan_at_the_same_rates_predict_published_updates_less_well() -> None:
    """Check the figures of the report of 2026-11-29: a simulated update, and gradients that backward hides."""
    found = [
        rounded(compared(split).errors_of(quantity, RULES_OF_PLAN, where=RULES_OF_PLAN))
        for split in ("strides", "models")
        for quantity in ("update", "iteration")
    ]
    assert found == [(22, 0.063, 0.170), (22, 0.022, 0.050), (60, 0.028, 0.151), (45, 0.038, 0.167)]
    assert found[-1] == LARGER_MODELS, "the errors that plan prints"
