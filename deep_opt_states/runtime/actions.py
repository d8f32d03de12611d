"""Execute each kind of action by one method, which a dispatch table selects, and hold the slots that actions use.

The actions update and publish only the rest of each unit. They do not write to the early ranges, whose parameters
the model may already read or write. An action of a unit without a rest does nothing, and needs no slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import AdamKernel, AdamTensors
from deep_opt_states.runtime.state import Slot, Split, UnitState
from perf_model.schedule.action import Action, ActionKind
from perf_model.schedule.schedule import Schedule
from perf_model.schedule.workload import STATES


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
        slots = [*kept, *(Slot.reserve(self._device, schedule.slot_numel) for _ in range(len(kept), num_slots))]
        self._slots = slots[:num_slots]
        self._slot_of = {
            action.name: slots[slot].narrow(self._states[action.unit].numel) for action, slot in in_slots.items()
        }

    def run(self, action: Action) -> None:
        """Issue ``action`` on the current stream, or run it on the current thread if it is a CPU step."""
        if self._splits[action.unit].rest:
            self._bodies[action.kind](action)

    def close(self) -> None:
        """Free the slots, and drop the references to the states."""
        self._slots.clear()
        self._slot_of.clear()
        self._states = ()

    def _prefetch(self, action: Action) -> None:
        self._copy_states(action.unit, to=self._slot_of[action.name], source=self._states[action.unit])

    def _gpu_step(self, action: Action) -> None:
        assert self._device_adam is not None
        state = self._states[action.unit]
        states = self._slot_of[action.name] if state.resident is None else state.resident.states
        self._update(self._device_adam, action.unit, state.accelerator_tensors(states))
        if state.staged is not None:
            # The copy is issued on the update's stream. The next unit that is staged in the same memory is updated on
            # that stream, too, so it cannot overwrite the parameters before they are copied.
            self._copy(action.unit, state.param, state.staged)

    def _flush_states(self, action: Action) -> None:
        self._copy_states(action.unit, to=self._states[action.unit], source=self._slot_of[action.name])

    def _cpu_step(self, action: Action) -> None:
        self._update(self._host_adam, action.unit, self._states[action.unit].cpu_tensors)

    def _publish(self, action: Action) -> None:
        state = self._states[action.unit]
        if not state.cpu_writes_param:
            self._copy(action.unit, state.param, state.rounded)

    def _copy_states(self, unit: int, *, to: UnitState | Slot, source: UnitState | Slot) -> None:
        for name in STATES:
            self._copy(unit, getattr(to, name), getattr(source, name))

    def _copy(self, unit: int, to: torch.Tensor, source: torch.Tensor) -> None:
        state = self._states[unit]
        for element_range in self._splits[unit].rest:
            self._device.copy(state.view(to, element_range), state.view(source, element_range))

    def _update(self, adam: AdamKernel, unit: int, tensors: AdamTensors) -> None:
        state = self._states[unit]
        adam.update_ranges([state.update_of(element_range, tensors) for element_range in self._splits[unit].rest])
