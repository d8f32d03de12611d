"""List naive ways to move units, each of which must change bits in some case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.resident_states import ResidentStates
from deep_opt_states.runtime.state_memory import StateMemory
from deep_opt_states.zero.step.gradient_buffers import GradientBuffer
from deep_opt_states.zero.step.gradients import Gradients


def do_nothing(*_: object) -> None:
    pass


def load_nothing(self: ResidentStates) -> None:
    """Record that all states are loaded, but copy none."""
    for _, resident in self._units:
        resident.is_loaded = True


_set_buffers = Gradients.set_buffers


def keep_first_segments(self: Gradients, buffers: Sequence[GradientBuffer]) -> None:
    """Use ``buffers`` in updates, but the first ones in backward."""
    first = vars(self).get("_segments")
    _set_buffers(self, buffers)
    if first is not None:
        self._segments = first


NAIVE: dict[str, tuple[str, type, str, Callable[..., Any]]] = {
    "resident states are not written back": ("bf16, clipping, reload", Executor, "sync_states_to_host", do_nothing),
    "the states of new residents are not loaded": ("bf16, clipping, reload", ResidentStates, "load", load_nothing),
    "gradients are not moved": ("missing gradients", StateMemory, "_move_gradients", do_nothing),
    "gradients are added to the first buffers": (
        "fp32, two groups, serial",
        Gradients,
        "set_buffers",
        keep_first_segments,
    ),
}
"""The naive ways by name: the case that must fail, the class, the name of its method, and the method that replaces it.

``tests/software_gpu/faults/faults.py`` has those whose results depend on the time.
"""
