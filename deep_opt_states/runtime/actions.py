"""Execute each kind of action by one method, and hold the slots that actions use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch

from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import AdamKernel, RangeUpdate, StateDtypes
from deep_opt_states.runtime.disk_states import StatesInSlot
from deep_opt_states.runtime.state import Copies, Slot, UnitState
from perf_model.schedule.action import Action, ActionKind, Lane
from perf_model.schedule.schedule import Schedule


@dataclass(frozen=True)
class UnitOperations:
    """The update and the publication of one unit, for the gradients and the parameters that it contains now."""

    tensors: list[torch.Tensor]
    updates: dict[int | None, list[RangeUpdate]]
    """The updates by the index of the slot that holds the states; None for states outside slots."""
    publications: Copies
    distributed: Copies
    """The copies within the accelerator that follow ``publications``."""

    def is_current(self, state: UnitState) -> bool:
        """Return whether the unit still uses these gradients and parameters."""
        return all(map(is_, self.tensors, _tensors_of(state)))


def _tensors_of(state: UnitState) -> list[torch.Tensor]:
    return [tensor for part in state.parts for tensor in (part.grad, part.param)]


class Actions:
    """The bodies of all actions, with the tensors that they copy and update, and the slots."""

    def __init__(self, device: Device[Any], host_adam: AdamKernel, device_adam: AdamKernel | None) -> None:
        self._states: Sequence[UnitState] = ()
        self._device = device
        self._host_adam = host_adam
        self._device_adam = device_adam
        self._slots: list[Slot] = []
        self._rounded: list[torch.Tensor] = []
        """Memory with each slot for the parameters of an eager unit, if streamed units are eager."""
        self._shift = 0
        """The index of the slot that actions with slot 0 use in this update."""
        self._state_copies: dict[tuple[str, int, bool], Copies] = {}
        """The copies by the action's name, its slot and whether the shadow is current: the host issues hundreds."""
        self._operations: dict[int, UnitOperations] = {}
        self.bodies: Mapping[ActionKind, Callable[[Action], None]] = {
            ActionKind.PREFETCH: self._prefetch,
            ActionKind.GPU_STEP: self._gpu_step,
            ActionKind.GPU_SPECULATE: self._gpu_speculate,
            ActionKind.FLUSH_STATES: self._flush_states,
            ActionKind.CPU_STEP: self._cpu_step,
            ActionKind.SPECULATE: self._cpu_step,
            ActionKind.COMMIT: self._commit,
            ActionKind.PUBLISH: self._publish,
            ActionKind.ADOPT: self._adopt,
            ActionKind.READ: self._transfer,
            ActionKind.WRITE: self._transfer,
        }
        """Issue an action of a kind on the current stream, or run a CPU step on the current thread."""

    def set_units(self, schedule: Schedule, states: Sequence[UnitState]) -> None:
        """Update ``states`` from now on, with the slots that ``schedule`` needs; slots of the same length are kept.

        If the device raises its out-of-memory error, nothing has changed. No stream may still use a slot that is freed.
        """
        part, numel = states[0].parts[0], schedule.slot_numel
        dtypes = StateDtypes.found_in(part.states)
        slots = [slot for slot in self._slots if slot.master.numel() == numel and StateDtypes.found_in(slot) == dtypes]
        slots += [Slot.reserve(self._device, numel, dtypes) for _ in range(len(slots), schedule.num_slots)]
        num_rounded = schedule.num_slots if schedule.adopts else 0
        rounded = [each for each in self._rounded if each.numel() == numel]
        rounded += [self._device.empty(numel, part.param.dtype) for _ in range(len(rounded), num_rounded)]
        self._states, self._slots, self._rounded = states, slots[: schedule.num_slots], rounded[:num_rounded]
        self._shift = 0
        self._forget_views()

    def shift_slots(self, number: int) -> None:
        """Shift the slot of every action by ``number`` slots, between two updates."""
        if self._slots:
            self._shift = (self._shift + number) % len(self._slots)

    def grads_of(self, unit: int) -> list[torch.Tensor]:
        return [part.grad for part in self._states[unit].parts]

    def forget_replaced_tensors(self) -> None:
        """Drop the references to gradients and parameters that units no longer use. No update is running."""
        self._operations = {
            unit: known for unit, known in self._operations.items() if known.is_current(self._states[unit])
        }

    def close(self) -> None:
        """Free the slots, and drop the references to the states."""
        self._slots.clear()
        self._rounded.clear()
        self._forget_views()
        self._states = ()

    def _forget_views(self) -> None:
        self._state_copies.clear()
        self._operations.clear()

    def _slot_index(self, action: Action) -> int | None:
        if action.slot is None or self._states[action.unit].disk is not None:
            return action.slot
        return (action.slot + self._shift) % len(self._slots)

    def _prefetch(self, action: Action) -> None:
        self._copy(self._copies_of_states(action))

    def _flush_states(self, action: Action) -> None:
        self._copy(self._copies_of_states(action))

    def _gpu_step(self, action: Action) -> None:
        self._gpu_speculate(action)
        # On the update's stream: the next unit staged in the same memory is updated on it, after this copy.
        self._copy(self._operations_of(action).publications)

    def _gpu_speculate(self, action: Action) -> None:
        assert self._device_adam is not None
        self._device_adam.update_ranges(self._updates_of(action))

    def _cpu_step(self, action: Action) -> None:
        self._host_adam.update_ranges(self._updates_of(action))

    def _commit(self, action: Action) -> None:
        shadow = self._states[action.unit].shadow
        assert shadow is not None
        shadow.is_current = not shadow.is_current

    def _transfer(self, action: Action) -> None:
        states = self._states[action.unit].disk
        assert states is not None
        assert action.slot is not None
        transfer = StatesInSlot.read if action.kind is ActionKind.READ else StatesInSlot.write
        transfer(states[action.slot])

    def _publish(self, action: Action) -> None:
        state = self._states[action.unit]
        if state.shadow is not None:
            # Masters that are published change with the version that is current.
            publications, distributed = state.publications()
        else:
            operations = self._operations_of(action)
            publications, distributed = operations.publications, operations.distributed
        self._copy(publications)
        if distributed:
            # A launch for each of hundreds of parameters would take the host longer than the copies.
            destinations, sources = zip(*distributed, strict=True)
            torch._foreach_copy_(destinations, sources)

    def _adopt(self, action: Action) -> None:
        self._commit(action)
        self._publish(action)

    def _copy(self, copies: Copies) -> None:
        for destination, source in copies:
            self._device.copy(destination, source)

    def _copies_of_states(self, action: Action) -> Copies:
        state, index = self._states[action.unit], self._slot_index(action)
        assert index is not None
        key = action.name, index, state.shadow is not None and state.shadow.is_current
        if key not in self._state_copies:
            flushes = action.kind is ActionKind.FLUSH_STATES
            copies = list(state.copied_states(self._slots[index], updated=flushes))
            if flushes and state.shadow is not None:
                rounded = (part for part in state.parts if not part.publishes_master)
                copies += [(part.rounded, part.of_unit(self._rounded[index])) for part in rounded]
            self._state_copies[key] = copies if flushes else [(there, here) for here, there in copies]
        return self._state_copies[key]

    def _updates_of(self, action: Action) -> list[RangeUpdate]:
        if self._states[action.unit].shadow is not None and action.lane is Lane.CPU:
            # They change with the version that is current, and an eager unit has few ranges.
            return self._states[action.unit].cpu_updates()
        updates, index = self._operations_of(action).updates, self._slot_index(action)
        if index not in updates:
            updates[index] = self._derive_updates(action, index)
        return updates[index]

    def _operations_of(self, action: Action) -> UnitOperations:
        """Return the unit's operations. The worker and the caller's thread call this for different units."""
        state = self._states[action.unit]
        known = self._operations.get(action.unit)
        if known is None or not known.is_current(state):
            # A unit on disk is in the same slot in each update.
            publications = state.publications(action.slot)
            known = self._operations[action.unit] = UnitOperations(_tensors_of(state), {}, *publications)
        return known

    def _derive_updates(self, action: Action, slot: int | None) -> list[RangeUpdate]:
        state = self._states[action.unit]
        if action.lane is not Lane.COMPUTE:
            return state.cpu_updates(slot)
        if slot is None:
            assert state.resident is not None
            return [part.accelerator_update(state.resident.states) for part in state.parts]
        rounded = self._rounded[slot] if state.shadow is not None else None
        return [part.accelerator_update(self._slots[slot], rounded) for part in state.parts]
