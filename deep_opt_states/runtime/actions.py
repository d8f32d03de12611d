"""Execute each kind of action by one method, and hold the slots that actions use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
class Views:
    """The views of tensors that one action copies or updates.

    They are for ``tensors``, the gradients and parameters of its unit, if it uses any.
    """

    unit: UnitState
    tensors: list[torch.Tensor]
    copies: Copies = field(default_factory=list)
    distributed: Copies = field(default_factory=list)
    """The copies within the accelerator that follow ``copies``."""
    updates: list[RangeUpdate] = field(default_factory=list)

    @property
    def are_current(self) -> bool:
        return all(map(is_, self.tensors, self.unit.tensors))


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
        self._views: dict[tuple[str, int | None, bool], Views] = {}
        """The views by action, slot and whether the shadow is current: the host issues hundreds of copies."""
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
        """Update ``states`` from now on, with the slots that ``schedule`` needs; slots of the same length are kept."""
        # After the device's out-of-memory error, nothing has changed. No stream may still use a slot that is freed.
        part, numel = states[0].parts[0], schedule.slot_numel
        dtypes = StateDtypes.found_in(part.states)
        slots = [slot for slot in self._slots if slot.master.numel() == numel and StateDtypes.found_in(slot) == dtypes]
        slots += [Slot.reserve(self._device, numel, dtypes) for _ in range(len(slots), schedule.num_slots)]
        num_rounded = schedule.num_slots if schedule.adopts else 0
        rounded = [each for each in self._rounded if each.numel() == numel]
        rounded += [self._device.empty(numel, part.param.dtype) for _ in range(len(rounded), num_rounded)]
        self._states, self._slots, self._rounded = states, slots[: schedule.num_slots], rounded[:num_rounded]
        self._shift = 0
        self._views.clear()

    def shift_slots(self, number: int) -> None:
        if self._slots:
            self._shift = (self._shift + number) % len(self._slots)

    def grads_of(self, unit: int) -> list[torch.Tensor]:
        return [part.grad for part in self._states[unit].parts]

    def forget_replaced_tensors(self) -> None:
        """Drop the references to gradients and parameters that units no longer use. No update is running."""
        # A copy: the worker may speculate a step meanwhile.
        self._views = {key: views for key, views in self._views.copy().items() if views.are_current}

    def close(self) -> None:
        """Free the slots, and drop the references to the states."""
        self._slots.clear()
        self._rounded.clear()
        self._views.clear()
        self._states = ()

    def _prefetch(self, action: Action) -> None:
        self._copy(self._views_of(action).copies)

    def _flush_states(self, action: Action) -> None:
        self._copy(self._views_of(action).copies)

    def _gpu_step(self, action: Action) -> None:
        self._gpu_speculate(action)
        # On the update's stream: the next unit staged in the same memory is updated on it, after this copy.
        self._copy(self._views_of(action).copies)

    def _gpu_speculate(self, action: Action) -> None:
        assert self._device_adam is not None
        self._device_adam.update_ranges(self._views_of(action).updates)

    def _cpu_step(self, action: Action) -> None:
        self._host_adam.update_ranges(self._views_of(action).updates)

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
        views = self._views_of(action)
        self._copy(views.copies)
        if views.distributed:
            # A launch for each of hundreds of parameters would take the host longer than the copies.
            destinations, sources = zip(*views.distributed, strict=True)
            torch._foreach_copy_(destinations, sources)

    def _adopt(self, action: Action) -> None:
        self._commit(action)
        self._publish(action)

    def _copy(self, copies: Copies) -> None:
        for destination, source in copies:
            self._device.copy(destination, source)

    def _views_of(self, action: Action) -> Views:
        """Return the views of ``action``. The worker and the caller's thread call this for different units."""
        state, slot = self._states[action.unit], action.slot
        if slot is not None and state.disk is None:
            slot = (slot + self._shift) % len(self._slots)
        key = action.name, slot, state.shadow is not None and state.shadow.is_current
        known = self._views.get(key)
        if known is None or not known.are_current:
            known = self._views[key] = self._derive(action, state, slot)
        return known

    def _derive(self, action: Action, state: UnitState, slot: int | None) -> Views:
        if action.kind in (ActionKind.PREFETCH, ActionKind.FLUSH_STATES):
            return Views(state, [], self._copies_of_states(action.kind, state, slot))
        if action.lane is Lane.CPU:
            return Views(state, state.tensors, updates=state.cpu_updates(slot))
        copies, distributed = state.publications(slot)
        if action.lane is not Lane.COMPUTE:
            return Views(state, state.tensors, copies, distributed)
        return Views(state, state.tensors, copies, updates=self._updates_on_accelerator(state, slot))

    def _copies_of_states(self, kind: ActionKind, state: UnitState, slot: int | None) -> Copies:
        assert slot is not None
        flushes = kind is ActionKind.FLUSH_STATES
        copies = list(state.copied_states(self._slots[slot], updated=flushes))
        if flushes and state.shadow is not None:
            rounded = (part for part in state.parts if not part.publishes_master)
            copies += [(part.rounded, part.of_unit(self._rounded[slot])) for part in rounded]
        return copies if flushes else [(there, here) for here, there in copies]

    def _updates_on_accelerator(self, state: UnitState, slot: int | None) -> list[RangeUpdate]:
        if slot is None:
            assert state.resident is not None
            return [part.accelerator_update(state.resident.states) for part in state.parts]
        rounded = self._rounded[slot] if state.shadow is not None else None
        return [part.accelerator_update(self._slots[slot], rounded) for part in state.parts]
