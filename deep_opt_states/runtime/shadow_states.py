"""Keep the second version of eager units' states: a step may be speculated into it while the first is untouched.

Which version is current changes with each update. The current one is copied to the places where DeepSpeed finds states
before any other code reads or writes them, and before a unit is updated elsewhere, as with resident states.
"""

from __future__ import annotations

from collections.abc import Sequence

from deep_opt_states.runtime.state import Shadow, UnitState


class ShadowStates:
    """The eager units of one executor. No update is in flight, and no step is speculated."""

    def __init__(self) -> None:
        self._units: list[tuple[UnitState, Shadow]] = []

    def set_units(self, states: Sequence[UnitState]) -> None:
        """Keep the eager units among ``states`` from now on."""
        self._units = [(state, state.shadow) for state in states if state.shadow is not None]

    def write_back(self) -> None:
        """Copy current versions in shadows to the sub-groups' own memory, on this thread."""
        for state, shadow in self._units:
            if shadow.is_current:
                for part, states in zip(state.parts, shadow.parts, strict=True):
                    for own, newer in zip(part.states, states, strict=True):
                        own.copy_(newer)
                shadow.is_current = False

    def invalidate(self) -> None:
        """Discard the versions in shadows, because the states in the sub-groups' own memory may be newer."""
        for _, shadow in self._units:
            shadow.is_current = False

    def close(self) -> None:
        self._units.clear()
