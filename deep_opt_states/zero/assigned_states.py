"""Update the states that a script has assigned, cleared or deleted since the last update, as stock does.

Stock's Adam looks its states up in each step. Here, before an update, the values of an assigned tensor are copied to
the memory that is updated, and the tensor becomes a view of it: all holders of the tensor see its updates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from deep_opt_states.runtime.state_memory import StateMemory
from deep_opt_states.zero.checkpoint_check import MOMENTS, shown
from perf_model.schedule.workload import STATES


class StateRefused(ValueError):
    """The error for a state that a script has assigned and that cannot be updated. Nothing was updated yet."""


@dataclass(frozen=True)
class _ListedTensor:
    """A tensor that DeepSpeed's optimizer lists, and the memory that its update writes to."""

    name: str
    listed: Any
    own: torch.Tensor

    @property
    def is_own(self) -> bool:
        return self._fits and self.listed.data_ptr() == self.own.data_ptr() and self.listed.shape == self.own.shape

    @property
    def _fits(self) -> bool:
        return (
            _is_dense(self.listed)
            and self.listed.is_cpu
            and self.listed.dtype == self.own.dtype
            and self.listed.numel() == self.own.numel()
            and self.listed.is_contiguous()
        )

    def check(self, num_listed: int) -> None:
        """Raise ``StateRefused`` unless the tensor can become a view; ``num_listed`` entries share memory with it."""
        if not self._fits:
            numel = self.own.numel()
            raise StateRefused(
                f"{self.name} must be a contiguous tensor of {numel} {self.own.dtype} in host memory, found "
                f"{_described(self.listed)}.\nAssign such a tensor, for example torch.zeros({numel})."
            )
        if num_listed > 1:
            raise StateRefused(
                f"{self.name} must have memory of its own, found memory that {num_listed} states share.\n"
                f"Assign a tensor to each of them, for example with clone()."
            )


class AssignedStates:
    """The states that DeepSpeed's stage-3 ``optimizer`` lists, as views of the ``memory`` that updates write to."""

    def __init__(self, optimizer: Any, memory: StateMemory) -> None:
        self._optimizer = optimizer
        self._memory = memory
        self._num_groups = len(optimizer.optimizer.param_groups)
        self.are_replaced = False
        for index in range(len(self.masters)):
            self._fill(index)

    @property
    def masters(self) -> list[Any]:
        """Return the masters, which are the keys of the states, without a wait for the update."""
        return vars(self._optimizer)["fp32_partitioned_groups_flat"]

    def __getitem__(self, sub_group_id: int) -> dict[str, Any]:
        """Return the state of a sub-group; it is empty if a script has cleared or deleted it."""
        return self._optimizer.optimizer.state.get(self.masters[sub_group_id], {})

    @property
    def count_steps(self) -> bool:
        """Return whether each state has a number of steps: a script may have cleared it, or assigned something else."""
        return all(_counts_steps(self[index].get("step")) for index in range(len(self.masters)))

    @property
    def moments_were_narrowed(self) -> bool:
        """Return whether a load or a script has put moments in the dtype of the masters, and ours are in another."""
        dtypes = self._memory.dtypes
        if dtypes.moment == dtypes.master:
            return False
        listed = (self[index].get(key) for index in range(len(self.masters)) for key in MOMENTS)
        return any(isinstance(tensor, torch.Tensor) and tensor.dtype == dtypes.master for tensor in listed)

    def refusal(self) -> StateRefused | None:
        """Return the error if the next update cannot use the states that a script has assigned. Change nothing."""
        try:
            self._check()
        except StateRefused as refused:
            return refused
        except Exception as error:  # noqa: BLE001 (scripts assign anything, and the other ranks wait for this one)
            return StateRefused(
                f"The optimizer's states must be readable, found {type(error).__name__}: {error}.\n"
                f"Assign tensors and numbers of steps, or clear a state to start from zeros."
            )
        return None

    def _check(self) -> None:
        num_tensors = sum(isinstance(master, torch.Tensor) for master in self.masters)
        num_sub_groups = len(self._memory.sub_groups)
        if not num_tensors == len(self.masters) == num_sub_groups:
            raise StateRefused(
                f"fp32_partitioned_groups_flat must hold one tensor for each of {num_sub_groups} sub-groups, found "
                f"{num_tensors} in {len(self.masters)} entries.\nAssign tensors, and remove no entry."
            )
        groups = self._optimizer.optimizer.param_groups
        # DeepSpeed adds its fp32 parameters only while it steps, saves or loads; an interrupt may leave them there.
        masters = {id(master) for master in self.masters}
        num_added = sum(id(param) not in masters for group in groups for param in group["params"])
        if len(groups) != self._num_groups or num_added:
            raise StateRefused(
                f"The optimizer must keep the {self._num_groups} param groups of deepspeed.initialize, found "
                f"{len(groups)} with {num_added} added parameters, which DeepSpeed would update once per sub-group.\n"
                f"Remove the additions, and pass all parameters to deepspeed.initialize, frozen if need be."
            )
        states = [self[index] for index in range(num_sub_groups)]
        for index, state in enumerate(states):
            _check_state(index, state)
        # Stock adds 1 to a tensor in place, before each sub-group reads it.
        steps = [state["step"] for state in states if state]
        num_with = Counter(step.data_ptr() for step in steps if isinstance(step, torch.Tensor))
        if shared := sum(number for number in num_with.values() if number > 1):
            raise StateRefused(
                f"step must be a number or a tensor of its own in each state, found a tensor that {shared} states "
                f"share.\nAssign an integer."
            )
        entries = list(self._entries())
        replaced = [entry for entry in entries if not entry.is_own]
        self.are_replaced = bool(replaced) or not all(states)
        memory = [_memory_of(entry.listed) for entry in entries] if replaced else []
        for entry in replaced:
            begin, end = _memory_of(entry.listed)
            entry.check(sum(begin < other_end and other_begin < end for other_begin, other_end in memory))

    def adopt(self, before_write: Callable[[], object] = lambda: None) -> None:
        """Use the states that ``refusal`` has accepted; ``before_write`` waits until no operation uses the old ones."""
        replaced = [entry for entry in self._entries() if not entry.is_own]
        cleared = [index for index in range(len(self.masters)) if not self[index]]
        if not replaced and not cleared:
            return
        before_write()
        # Clone our own memory: a script may have swapped states, and one write could overwrite the next source.
        own = {getattr(sub_group, key).data_ptr() for sub_group in self._memory.sub_groups for key in STATES}
        values = [entry.listed.clone() if entry.listed.data_ptr() in own else entry.listed for entry in replaced]
        for index in cleared:
            for key in MOMENTS:
                getattr(self._memory.sub_groups[index], key).zero_()
            self._fill(index)
        for entry, value in zip(replaced, values, strict=True):
            entry.own.copy_(value.detach().view(-1))
            entry.listed.data = entry.own.data
        self.are_replaced = False

    def _entries(self) -> Iterator[_ListedTensor]:
        for index, own in enumerate(self._memory.sub_groups):
            yield _ListedTensor(f"fp32_partitioned_groups_flat[{index}]", self.masters[index], own.master)
            if state := self[index]:
                for key in MOMENTS:
                    yield _ListedTensor(_name_of(index, key), state[key], getattr(own, key))

    def _fill(self, index: int) -> None:
        """Fill the empty state of a sub-group with views of our memory, which contains zeros."""
        # Not the tensors themselves: a script may assign to the ``data`` of an entry.
        moments = {key: getattr(self._memory.sub_groups[index], key).data for key in MOMENTS}
        self._optimizer.optimizer.state.setdefault(self.masters[index], {}).update(step=0, **moments)


def _check_state(index: int, state: object) -> None:
    if not isinstance(state, dict):
        raise StateRefused(
            f"The state of sub-group {index} must be a dictionary, found {shown(state)}.\n"
            f"Assign {{}} to start from zeros."
        )
    for key in ("step", *MOMENTS) if state else ():
        if key not in state:
            raise StateRefused(
                f"The state of sub-group {index} must have step, {' and '.join(MOMENTS)}, or be empty, found "
                f"{shown(state)}.\nAssign a value to {key!r}, or clear the state to start from zeros."
            )
    if state and not _counts_steps(state["step"]):
        raise StateRefused(
            f"{_name_of(index, 'step')} must be a number of steps, found {shown(state['step'])}.\n"
            f"Assign an integer of at least 0, or clear the state to start from zeros."
        )


def _is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _memory_of(value: Any) -> tuple[int, int]:
    """Return the address of a contiguous tensor and the address after its last byte; (0, 0) for any other value."""
    return (value.data_ptr(), value.data_ptr() + value.nbytes) if _is_dense(value) else (0, 0)


def _name_of(index: int, key: str) -> str:
    return f'state[fp32_partitioned_groups_flat[{index}]]["{key}"]'


def _counts_steps(step: Any) -> bool:
    """Return whether DeepSpeedCPUAdam accepts the value: a number, or a tensor with one, but no ``float``."""
    if isinstance(step, float) or not isinstance(step, (Real, torch.Tensor)):
        return False
    try:
        return int(step) >= 0  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return shown(value)
    layout = f", {value.layout}," if not _is_dense(value) else "" if value.is_contiguous() else ", not contiguous,"
    return f"{value.numel()} {value.dtype}{layout} on {value.device}"
