"""Keep states whose newest values are not where DeepSpeed finds them: on the accelerator, or in a second version.

A resident unit's states are a write-back cache on the accelerator, and the current version of an eager unit's states
changes with each update. Both are written back before other code uses optimizer states or a unit is updated elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deep_opt_states.device.interface import Device, Stream
from deep_opt_states.runtime.state import Resident, Shadow, UnitState
from perf_model.schedule.action import Lane


class StatesElsewhere:
    """The resident and eager units of one executor. Only ``load`` and ``mark_updated`` may be called in an update."""

    def __init__(self, device: Device[Any], streams: Mapping[Lane, Stream[Any]]) -> None:
        self._device = device
        self._h2d, self._compute, self._d2h = (streams[lane] for lane in (Lane.H2D, Lane.COMPUTE, Lane.D2H))
        self._loaded = device.event()
        self._written = device.event()
        self.set_units(())

    def set_units(self, states: Sequence[UnitState]) -> None:
        """Keep the resident and eager units among ``states`` from now on. The previous ones were written back."""
        self._residents: list[tuple[UnitState, Resident]] = []
        self._shadows: list[tuple[UnitState, Shadow]] = []
        for state in states:
            if state.resident is not None:
                self._residents.append((state, state.resident))
            if state.shadow is not None:
                self._shadows.append((state, state.shadow))

    def load(self) -> None:
        """Issue the copies of states that are not on the accelerator, and make the compute stream wait for them."""
        missing = [(state, resident) for state, resident in self._residents if not resident.is_loaded]
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
        for _, resident in self._residents:
            resident.is_updated = resident.is_loaded

    def write_back(self) -> None:
        """Copy the newest states to the sub-groups' own memory, and block the host. ``invalidate`` must follow."""
        updated = [(state, resident) for state, resident in self._residents if resident.is_updated]
        if updated:
            with self._d2h.issue():
                for state, resident in updated:
                    for on_host, on_accelerator in state.copied_states(resident.states):
                        self._device.copy(on_host, on_accelerator)
            self._d2h.record(self._written)
            self._written.synchronize()
        self._write_back_shadows()

    def _write_back_shadows(self) -> None:
        for state, shadow in self._shadows:
            if shadow.is_current:
                for part, states in zip(state.parts, shadow.parts, strict=True):
                    for own, newer in zip(part.states, states, strict=True):
                        own.copy_(newer)

    def invalidate(self) -> None:
        """Discard these states, because those in the sub-groups' own memory may be newer."""
        for _, resident in self._residents:
            resident.is_loaded = resident.is_updated = False
        for _, shadow in self._shadows:
            shadow.is_current = False
