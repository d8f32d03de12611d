"""Gradients that the caller drops before they are complete are not part of any update."""

from __future__ import annotations

from tests.launch import run_ranks


def test_dropped_gradients_are_neither_applied_nor_mixed_with_later_ones() -> None:
    (finished,) = run_ranks(1, ["-m", "tests.zero.gradients.dropped_gradient_ranks"], timeout_s=200)
    assert finished.returncode == 0, finished.output[-4000:]
    found = finished.answers()
    windows = [answer for answer in found if "abandoned" in answer]
    attempts = [answer for answer in found if "outcome" in answer]
    assert (len(windows), len(attempts)) == (4, 9)
    for window in windows:
        assert window["abandoned"] == window["undisturbed"], window
        assert window["abandoned"]["updated with zero"], window
        assert window["abandoned"]["norm"] > 0, window
    for attempt in attempts:
        # The failed backward has left gradients in the bucket. Stock reduces them together with the next ones.
        assert attempt["outcome"] == ("undisturbed" if attempt["block"] else "AssertionError"), attempt
