"""Execute each kind of action by one method, which a dispatch table selects, and hold the slots that actions use.

The actions update and publish only the rest of each sub-group. They do not write to the early ranges, whose parameters
the model may already read or write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import AdamKernel, AdamTensors, RangeUpdate
from deep_opt_states.runtime.state import Slot, Split, SubGroupState
from perf_model.schedule.action import Action, ActionKind
from perf_model.schedule.schedule import Schedule


class Actions:
    """The operations that the actions of a schedule stand for.

    ``host_adam`` updates in host memory. ``device_adam`` updates on the accelerator: in slots, and in place where a
    sub-group is resident. It may be None if every sub-group is updated on the CPU.
    """

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

    def reserve_slots_for(self, schedule: Schedule) -> None:
        """Reserve the slots that ``schedule`` needs in addition, and free the slots that it does not need.

        Raise the device's out-of-memory error if memory is short; then nothing has changed. The caller makes sure that
        no stream still copies from or to a slot that is freed here.
        """
        missing = range(self.num_slots, schedule.num_slots)
        slots = [*self._slots, *(Slot.reserve(self._device, schedule.slot_numel) for _ in missing)]
        self._slots = slots[: schedule.num_slots]
        self._slot_of = {
            action.name: slots[action.slot].narrow(self._states[action.sub_group].numel)
            for action in schedule.actions
            if action.slot is not None
        }

    def run(self, action: Action) -> None:
        """Issue ``action`` on the current stream, or run it on the current thread if it is a CPU step."""
        self._bodies[action.kind](action)

    def close(self) -> None:
        """Free the slots, and drop the references to the states."""
        self._slots.clear()
        self._slot_of.clear()
        self._states = ()

    def _prefetch(self, action: Action) -> None:
        self._copy_states(action.sub_group, to=self._slot_of[action.name], source=self._states[action.sub_group])

    def _gpu_step(self, action: Action) -> None:
        assert self._device_adam is not None
        state = self._states[action.sub_group]
        tensors = state.accelerator_tensors(self._slot_of.get(action.name, state))
        self._update(self._device_adam, action.sub_group, tensors)
        if state.staged is not None:
            # The copy is issued on the update's stream. The next sub-group that is staged in the same memory is updated
            # on that stream, too, so it cannot overwrite the parameters before they are copied.
            self._copy(action.sub_group, state.param, state.staged)

    def _flush_states(self, action: Action) -> None:
        self._copy_states(action.sub_group, to=self._states[action.sub_group], source=self._slot_of[action.name])

    def _cpu_step(self, action: Action) -> None:
        self._update(self._host_adam, action.sub_group, self._states[action.sub_group].cpu_tensors)

    def _publish(self, action: Action) -> None:
        state = self._states[action.sub_group]
        assert state.rounded is not None
        if not state.cpu_writes_param:
            self._copy(action.sub_group, state.param, state.rounded)

    def _copy_states(self, sub_group: int, *, to: SubGroupState | Slot, source: SubGroupState | Slot) -> None:
        for name in ("master", "exp_avg", "exp_avg_sq"):
            self._copy(sub_group, getattr(to, name), getattr(source, name))

    def _copy(self, sub_group: int, to: torch.Tensor, source: torch.Tensor) -> None:
        for element_range in self._splits[sub_group].rest:
            self._device.copy(element_range.view(to), element_range.view(source))

    def _update(self, adam: AdamKernel, sub_group: int, tensors: AdamTensors) -> None:
        ranges = self._splits[sub_group].rest
        adam.update_ranges(
            [
                RangeUpdate(sub_group=sub_group, tensors=tensors.narrow(element_range), element_range=element_range)
                for element_range in ranges
            ]
        )
