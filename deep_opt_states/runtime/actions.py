"""What each kind of action does to its sub-group, by a dispatch table; and the slots that they work in.

Of the first parts nothing is written here: somebody may read their parameters by now, or have written to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import AdamKernel, AdamTensors, PartUpdate
from deep_opt_states.runtime.state import Slot, Split, SubGroupState
from perf_model.schedule.action import Action, ActionKind
from perf_model.schedule.schedule import Schedule


class Actions:
    """``host_adam`` updates in host memory, ``device_adam`` in slots and where residents are."""

    def __init__(
        self,
        states: Sequence[SubGroupState],
        splits: Sequence[Split],
        device: Device[Any],
        host_adam: AdamKernel,
        device_adam: AdamKernel | None,
    ) -> None:
        self._states = states
        self._splits = splits
        self._device = device
        self._host_adam = host_adam
        self._device_adam = device_adam
        self._slots: list[Slot] = []
        self._slot_of: dict[str, Slot] = {}
        """By action name: the part of its slot that the action works on."""
        self._bodies: dict[ActionKind, Callable[[Action], None]] = {
            ActionKind.PREFETCH: self._prefetch,
            ActionKind.GPU_STEP: self._gpu_step,
            ActionKind.FLUSH_STATES: self._flush_states,
            ActionKind.CPU_STEP: self._cpu_step,
            ActionKind.PUBLISH: self._publish,
        }

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def use_slots_of(self, schedule: Schedule) -> None:
        """Reserves those that are missing, gives back those that are left over. Raises what the device raises that has
        no room; nothing has changed then."""
        missing = range(self.num_slots, schedule.num_slots)
        slots = [*self._slots, *(Slot.reserve(self._device, schedule.slot_numel) for _ in missing)]
        self._slots = slots[: schedule.num_slots]
        self._slot_of = {
            action.name: slots[action.slot].narrow(self._states[action.sub_group].numel)
            for action in schedule.actions
            if action.slot is not None
        }

    def run(self, action: Action) -> None:
        """On the current stream, or the current thread."""
        self._bodies[action.kind](action)

    def close(self) -> None:
        """Gives the slots back."""
        self._slots.clear()
        self._slot_of.clear()
        self._states = ()

    def _prefetch(self, action: Action) -> None:
        self._copy_states(action.sub_group, to=self._slot_of[action.name], of=self._states[action.sub_group])

    def _gpu_step(self, action: Action) -> None:
        assert self._device_adam is not None
        state = self._states[action.sub_group]
        self._update(self._device_adam, action.sub_group, state.at(self._slot_of.get(action.name, state)))
        if state.staged is not None:
            # On the stream of the update: the next one that is staged in this memory waits for the copy.
            self._copy(action.sub_group, state.param, state.staged)

    def _flush_states(self, action: Action) -> None:
        self._copy_states(action.sub_group, to=self._states[action.sub_group], of=self._slot_of[action.name])

    def _cpu_step(self, action: Action) -> None:
        self._update(self._host_adam, action.sub_group, self._states[action.sub_group].on_host)

    def _publish(self, action: Action) -> None:
        state = self._states[action.sub_group]
        assert state.rounded is not None
        if not state.cpu_writes_param:
            self._copy(action.sub_group, state.param, state.rounded)

    def _copy_states(self, sub_group: int, *, to: SubGroupState | Slot, of: SubGroupState | Slot) -> None:
        for name in ("master", "exp_avg", "exp_avg_sq"):
            self._copy(sub_group, getattr(to, name), getattr(of, name))

    def _copy(self, sub_group: int, to: torch.Tensor, of: torch.Tensor) -> None:
        for part in self._splits[sub_group].rest:
            self._device.copy(part.view(to), part.view(of))

    def _update(self, adam: AdamKernel, sub_group: int, tensors: AdamTensors) -> None:
        parts = self._splits[sub_group].rest
        adam.update_parts([PartUpdate(sub_group=sub_group, tensors=tensors.part(part), part=part) for part in parts])
