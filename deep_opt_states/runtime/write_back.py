"""Keep states whose newest values are not where DeepSpeed finds them: on the accelerator, or in a second version.

They are written back before any other code reads or writes optimizer states, and before a unit is updated elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deep_opt_states.device.interface import Device, Stream
from deep_opt_states.runtime.state import Resident, Shadow, UnitState


class ResidentStates:
    """The resident units of one executor. Nothing may be in flight, except in ``load`` and ``mark_updated``."""

    def __init__(self, device: Device[Any], h2d: Stream[Any], compute: Stream[Any], d2h: Stream[Any]) -> None:
        self._device = device
        self._h2d, self._compute, self._d2h = h2d, compute, d2h
        self._loaded = device.event()
        self._written = device.event()
        self._units: list[tuple[UnitState, Resident]] = []

    def set_units(self, states: Sequence[UnitState]) -> None:
        """Keep the resident units among ``states`` from now on. The previous ones were written back."""
        self._units = [(state, state.resident) for state in states if state.resident is not None]

    def load(self) -> None:
        """Issue the copies of states that are not on the accelerator, and make the compute stream wait for them."""
        missing = [(state, resident) for state, resident in self._units if not resident.is_loaded]
        if not missing:
            return
        with self._h2d.issue():
            for state, resident in missing:
                for on_host, on_accelerator in state.copied_states(resident.states):
                    self._device.copy(on_accelerator, on_host)
                resident.is_loaded = True
        self._h2d.record(self._loaded)
        self._compute.wait(self._loaded)

    def mark_updated(self) -> None:
        """Record that an update of all resident units is about to be issued."""
        for _, resident in self._units:
            resident.is_updated = resident.is_loaded

    def write_back(self) -> None:
        """Copy the updated states to host memory, and block the host until they are there."""
        updated = [(state, resident) for state, resident in self._units if resident.is_updated]
        if not updated:
            return
        with self._d2h.issue():
            for state, resident in updated:
                for on_host, on_accelerator in state.copied_states(resident.states):
                    self._device.copy(on_host, on_accelerator)
        self._d2h.record(self._written)
        self._written.synchronize()
        for _, resident in updated:
            resident.is_updated = False

    def invalidate(self) -> None:
        """Discard the states on the accelerator, because the states in host memory may be newer."""
        for _, resident in self._units:
            resident.is_loaded = resident.is_updated = False

    def close(self) -> None:
        self._units.clear()


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
