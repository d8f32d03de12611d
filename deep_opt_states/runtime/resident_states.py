"""Keep the states of resident units on the accelerator: a write-back cache over their places in host memory.

They are written back before any other code reads or writes optimizer states, and before a unit is updated elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deep_opt_states.device.interface import Device, Stream
from deep_opt_states.runtime.state import Resident, UnitState


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
