"""Test the sentence of the demo on whether the machine was too busy for EMULATED seconds."""

from __future__ import annotations

import pytest

from examples.common.demo_report import lag_sentence


@pytest.mark.parametrize(
    ("lag_s", "slowest_s", "text"), [(0.04, 2.0, "fast enough"), (0.3, 2.0, "too busy"), (0.0, 2.5, "too busy")]
)
def test_the_demo_says_whether_the_machine_was_too_busy(lag_s: float, slowest_s: float, text: str) -> None:
    arms = {"stock": {"iteration_s": [2.0, 2.02, slowest_s]}, "plugin": {"iteration_s": [1.0, 1.0]}}
    assert text in lag_sentence({"arms": arms, "lag_s": [0.0, lag_s]})
