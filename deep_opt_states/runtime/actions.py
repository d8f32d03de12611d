"""Execute each kind of action by one method, which a dispatch table selects, and hold the slots that actions use.

The actions update and publish only the rest of each unit. They do not write to the early ranges, whose parameters
the model may already read or write. An action of a unit without a rest does nothing, and needs no slot.

The views that an action works on are made once, and not in each step: the host issues hundreds of copies there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import AdamKernel, RangeUpdate
from deep_opt_states.runtime.state import Slot, Split, UnitState
from perf_model.schedule.action import Action, ActionKind, Lane
from perf_model.schedule.schedule import Schedule

Copies: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]
"""Destinations and sources, in the order in which they are copied."""


@dataclass(frozen=True)
class UnitOperations:
    """The update and the publication of one unit, for the gradient and the parameters that it has at present."""

    grad: torch.Tensor
    param: torch.Tensor
    updates: list[RangeUpdate]
    publications: Copies
    """The copies of updated parameters; none if the update writes the model's own parameters."""


class Actions:
    """The operations that the actions of a schedule stand for.

    ``host_adam`` updates in host memory. ``device_adam`` updates on the accelerator: in slots, and in place where a
    unit is resident. It may be None if every unit is updated on the CPU.
    """

    def __init__(self, device: Device[Any], host_adam: AdamKernel, device_adam: AdamKernel | None) -> None:
        self._states: Sequence[UnitState] = ()
        self._splits: Sequence[Split] = ()
        self._device = device
        self._host_adam = host_adam
        self._device_adam = device_adam
        self._slots: list[Slot] = []
        self._slot_of: dict[str, Slot] = {}
        """The views of its slot that an action works on, keyed by the action's name."""
        self._state_copies: dict[str, Copies] = {}
        """The copies of each prefetch and flush, by the action's name."""
        self._operations: dict[int, UnitOperations] = {}
        """The operations of each unit that was updated since the units or the slots were set."""
        self._bodies: dict[ActionKind, Callable[[Action], None]] = {
            ActionKind.PREFETCH: self._prefetch,
            ActionKind.GPU_STEP: self._gpu_step,
            ActionKind.FLUSH_STATES: self._flush_states,
            ActionKind.CPU_STEP: self._cpu_step,
            ActionKind.PUBLISH: self._publish,
        }

    @property
    def num_slots(self) -> int:
        """Return the number of slots that are reserved."""
        return len(self._slots)

    def set_units(self, schedule: Schedule, states: Sequence[UnitState], splits: Sequence[Split]) -> None:
        """Update ``states`` from now on, with the slots that ``schedule`` needs. See ``reserve_slots_for``."""
        before = self._states, self._splits
        self._states, self._splits = states, splits
        try:
            self.reserve_slots_for(schedule)
        except BaseException:
            self._states, self._splits = before
            raise

    def reserve_slots_for(self, schedule: Schedule) -> None:
        """Reserve the slots that ``schedule`` needs in addition, and free the slots that it does not need.

        Raise the device's out-of-memory error if memory is short; then nothing has changed. The caller makes sure that
        no stream still copies from or to a slot that is freed here.
        """
        in_slots = {
            action: action.slot
            for action in schedule.actions
            if action.slot is not None and self._splits[action.unit].rest
        }
        num_slots = schedule.num_slots if in_slots else 0
        kept = [slot for slot in self._slots if slot.master.numel() == schedule.slot_numel]
        splits_masters = any(state.splits_masters for state in self._states)
        added = range(len(kept), num_slots)
        slots = [
            *kept,
            *(Slot.reserve(self._device, schedule.slot_numel, splits_masters=splits_masters) for _ in added),
        ]
        self._slots = slots[:num_slots]
        self._slot_of = {
            action.name: slots[slot].narrow(self._states[action.unit].numel) for action, slot in in_slots.items()
        }
        self._operations.clear()
        self._state_copies = {
            action.name: list(self._copies_of_states(action))
            for action in in_slots
            if action.kind in (ActionKind.PREFETCH, ActionKind.FLUSH_STATES)
        }

    def run(self, action: Action) -> None:
        """Issue ``action`` on the current stream, or run it on the current thread if it is a CPU step."""
        if self._splits[action.unit].rest:
            self._bodies[action.kind](action)

    def close(self) -> None:
        """Free the slots, and drop the references to the states."""
        self._slots.clear()
        self._slot_of.clear()
        self._state_copies.clear()
        self._operations.clear()
        self._states = ()

    def _prefetch(self, action: Action) -> None:
        self._copy(self._state_copies[action.name])

    def _flush_states(self, action: Action) -> None:
        self._copy(self._state_copies[action.name])

    def _gpu_step(self, action: Action) -> None:
        assert self._device_adam is not None
        operations = self._operations_of(action)
        self._device_adam.update_ranges(operations.updates)
        # A copy is issued on the update's stream. The next unit that is staged in the same memory is updated on that
        # stream, too, so it cannot overwrite the parameters before they are copied.
        self._copy(operations.publications)

    def _cpu_step(self, action: Action) -> None:
        self._host_adam.update_ranges(self._operations_of(action).updates)

    def _publish(self, action: Action) -> None:
        self._copy(self._operations_of(action).publications)

    def _copy(self, copies: Copies) -> None:
        for destination, source in copies:
            self._device.copy(destination, source)

    def _copies_of_states(self, action: Action) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        state, slot = self._states[action.unit], self._slot_of[action.name]
        rest = self._splits[action.unit].rest
        # All ranges of one tensor after the other, as they are in memory.
        for pairs in zip(*(state.copied_states(element_range, slot) for element_range in rest), strict=True):
            for on_host, on_accelerator in pairs:
                is_prefetch = action.kind is ActionKind.PREFETCH
                yield (on_accelerator, on_host) if is_prefetch else (on_host, on_accelerator)

    def _operations_of(self, action: Action) -> UnitOperations:
        """Return the operations of the action's unit. They change if users set gradients or DeepSpeed moves parameters.

        The worker and the caller's thread call this for different units.
        """
        state = self._states[action.unit]
        known = self._operations.get(action.unit)
        if known is None or known.grad is not state.grad or known.param is not state.param:
            known = self._operations[action.unit] = self._derive(action, state)
        return known

    def _derive(self, action: Action, state: UnitState) -> UnitOperations:
        rest = self._splits[action.unit].rest
        sources: list[torch.Tensor] = []
        if action.lane is not Lane.COMPUTE:
            updates = [state.cpu_update_of(element_range) for element_range in rest]
            if not state.cpu_writes_param:
                sources = [state.published_from(element_range) for element_range in rest]
        else:
            states = self._slot_of[action.name] if state.resident is None else state.resident.states
            tensors = state.accelerator_tensors(states)
            updates = [state.update_of(element_range, tensors) for element_range in rest]
            if state.staged is not None:
                sources = [state.view(state.staged, element_range) for element_range in rest]
        params = [state.view(state.param, element_range) for element_range in rest]
        # Without sources, the update writes the model's own parameters.
        publications = list(zip(params, sources, strict=True)) if sources else []
        return UnitOperations(state.grad, state.param, updates, publications)
