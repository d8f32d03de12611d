"""Gradients that the caller drops before they are complete are in no update."""

from __future__ import annotations

from tests.launch import run_ranks


def test_dropped_gradients_are_neither_applied_nor_taken_for_others() -> None:
    (finished,) = run_ranks(1, ["-m", "tests.zero.scripts.abandoned"], timeout_s=200)
    assert finished.returncode == 0, finished.output[-4000:]
    found = finished.answers()
    windows = [answer for answer in found if "abandoned" in answer]
    raised = [answer for answer in found if "raised" in answer]
    assert (len(windows), len(raised)) == (4, 6)
    for window in windows:
        assert window["abandoned"] == window["undisturbed"], window
        assert window["abandoned"]["updated with zero"], window
        assert window["abandoned"]["norm"] > 0, window
    for arm in raised:
        # As with stock, which comes first. Going on would reduce what the backward that raised has left behind.
        assert arm["raised"] == "AssertionError", arm
