"""Check that an action that fails on a rank leaves nothing behind in the memory of that rank."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress

import pytest

from deep_opt_states.zero.internals import agreement


class States:
    """Memory that an action has allocated before it fails."""


@pytest.fixture
def _no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collection")
def test_a_failed_action_keeps_no_memory_until_the_next_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "gather_values", lambda value: [value])
    allocated: list[weakref.ref[States]] = []

    def allocate_and_fail() -> None:
        states = States()
        allocated.append(weakref.ref(states))
        raise MemoryError("for the states")

    with suppress(MemoryError):
        agreement.raise_together(allocate_and_fail)
    assert [reference() for reference in allocated] == [None]
