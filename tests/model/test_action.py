"""Check that actions are written as text and parsed again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf_model.schedule.action import Action, ActionKind

indices = st.integers(0, 10**6)
names = st.builds(lambda kind, index: f"{kind.value} {index}", st.sampled_from(ActionKind), indices)
actions = st.builds(
    Action,
    kind=st.sampled_from(ActionKind),
    unit=indices,
    slot=st.none() | indices,
    waits=st.lists(names, max_size=3).map(tuple),
)


@given(actions)
def test_written_action_is_parsed_to_the_same_action(action: Action) -> None:
    assert Action.parse(str(action)) == action


def test_actions_are_written_in_the_documented_format() -> None:
    assert str(Action(ActionKind.PREFETCH, 3)) == "PREFETCH 3"
    assert str(Action(ActionKind.PREFETCH, 3, 0, ("FLUSH_STATES 1",))) == "PREFETCH 3 slot 0 after FLUSH_STATES 1"


@pytest.mark.parametrize("text", ["", "FETCH 3", "PREFETCH", "PREFETCH x", "PREFETCH 3 slot", "PREFETCH -1"])
def test_text_that_is_not_an_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="An action has the form"):
        Action.parse(text)
