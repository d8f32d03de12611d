"""Check the text of actions, which the fingerprint of a plan covers."""

from __future__ import annotations

from perf_model.schedule.action import Action, ActionKind


def test_actions_are_written_in_the_documented_format() -> None:
    assert str(Action(ActionKind.PREFETCH, 3)) == "PREFETCH 3"
    assert str(Action(ActionKind.PREFETCH, 3, 0, ("FLUSH_STATES 1",))) == "PREFETCH 3 slot 0 after FLUSH_STATES 1"
