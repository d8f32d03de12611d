"""Override the hooks by which callers read, write, save and load the tensors of DeepSpeed's optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, OPTIMIZER_STATE_DICT
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from deep_opt_states import log
from deep_opt_states.zero.assigned_states import AssignedStates
from deep_opt_states.zero.checkpoint_check import MOMENTS
from deep_opt_states.zero.checkpoint_saving import KeptError
from deep_opt_states.zero.internals.agreement import raise_together
from deep_opt_states.zero.internals.compat import (
    all_gather_partitions,
    flat_parameters,
    partition_rank,
    with_later_hooks,
)
from deep_opt_states.zero.start.assembly import Assembly
from deep_opt_states.zero.step.gathers import Gathers
from deep_opt_states.zero.step.gradients import Gradients
from deep_opt_states.zero.step.running_plan import RunningPlan
from deep_opt_states.zero.step.update import Update


class WaitsBeforeRead:
    """An attribute of an optimizer that calls ``wait(optimizer)`` before it is read, also to write to its tensors."""

    def __init__(self, wait: Callable[[Any], None]) -> None:
        self._wait = wait

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: Any, owner: type) -> Any:
        self._wait(optimizer)
        try:
            return vars(optimizer)[self._name]
        except KeyError:
            raise AttributeError(self._name) from None

    def __set__(self, optimizer: Any, value: Any) -> None:
        vars(optimizer)[self._name] = value


class GuardedStates(with_later_hooks(DeepSpeedZeroOptimizer_Stage3)):  # type: ignore[misc]
    """Stock's optimizer, whose states, parameters and gradients are used only while no update works on them."""

    _assembly: Assembly
    _gathers: Gathers
    _gradients: Gradients
    _running: RunningPlan
    _states: AssignedStates
    _update: Update
    _evict: Callable[[str], None]
    kept_error = KeptError()
    """The error of this rank's writes in a save, for which ``save_checkpoint`` assigns another object."""

    # --- Attributes that wait for the update, which does not exist while stock's constructor runs ---

    def _wait_for_parameters(self) -> None:
        if "_update" in vars(self):
            self._update.wait()
            if "_gathers" in vars(self):
                self._gathers.direct_writes.allow()

    def _wait_for_states(self) -> None:
        if "_update" in vars(self):
            self._update.wait(states=True)

    def _get_state(self) -> Any:
        self._wait_for_states()
        return super()._get_state()

    fp16_partitioned_groups = WaitsBeforeRead(_wait_for_parameters)
    fp16_partitioned_groups_flat = WaitsBeforeRead(_wait_for_parameters)
    lp_param_buffer = WaitsBeforeRead(_wait_for_parameters)
    fp32_partitioned_groups_flat = WaitsBeforeRead(_wait_for_states)
    state = DeepSpeedZeroOptimizer_Stage3.state.getter(_get_state)

    # --- Readers and writers of states ---

    def get_full_hp_param(self, *args: Any, **kwargs: Any) -> Any:
        # Every rank calls this, and none may raise while others wait in the collective below.
        self._update.synchronize_ranks(states=True)
        return super().get_full_hp_param(*args, **kwargs)

    def set_full_hp_param(self, value: Any, *args: Any, **kwargs: Any) -> None:
        self._update.synchronize_ranks(states=True)
        super().set_full_hp_param(self._copied_by_the_host(value), *args, **kwargs)

    def set_local_hp_param(self, value: Any, *args: Any, **kwargs: Any) -> None:
        super().set_local_hp_param(self._copied_by_the_host(value), *args, **kwargs)

    def _get_fp32_opt_state_partition(self, param: Any, release_swap_buffers: bool, *args: Any, **kwargs: Any) -> Any:
        self._update.wait(states=True)
        self._update.raise_if_failed()
        states, group = super()._get_fp32_opt_state_partition(param, release_swap_buffers, *args, **kwargs)
        # A caller that releases the swap buffers only reads.
        return self._copied_by_the_host(states) if release_swap_buffers else states, group

    def _copied_by_the_host(self, states: Any) -> Any:
        """Return a copy of ``states`` in host memory if some are on disk: only a part of a tensor is page-locked."""
        return states.detach().clone().cpu() if self._running.memory.disk is not None else states

    def offload_states(self, include: Any = None, **kwargs: Any) -> None:
        """Offload the states in ``include``, except ``lp_grads``: gradients stay where they are needed."""
        if include is not None:
            include = [state_type for state_type in include if state_type is not OffloadStateTypeEnum.lp_grads]
        self._wait_for_states()
        super().offload_states(include=include, **kwargs)
        if OffloadStateTypeEnum.lp_params in self.offloaded_states:
            # Our views would keep the parameters' memory on the accelerator.
            self._evict("while parameters are offloaded")
            self._running.memory.release_params()
            self._running.executor.forget_replaced_tensors()

    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        super().reload_states(*args, **kwargs)
        self._running.memory.replace_params(flat_parameters(self))

    # --- Readers and writers of gradients ---

    def set_fp32_grad_for_param(self, value: Any, param: Any) -> None:
        super().set_fp32_grad_for_param(value, param)
        self._gradients.mark_set_by_user([param])

    def set_local_grad_for_param(self, value: Any, param: Any) -> None:
        super().set_local_grad_for_param(value, param)
        self._gradients.mark_set_by_user([param])

    def update_fp32_grad_for_param_vectorized(self, update_func: Any, param_list: Any) -> None:
        """Replace whole gradients by ``update_func(gradient, param)``: a collective over the ranks that share them."""
        params = [param for param in param_list if param.requires_grad]
        # Stock's order of collectives: sub-groups in the order of their first parameter here.
        by_sub_group: dict[int, list[Any]] = {}
        for param in params:
            by_sub_group.setdefault(self.grad_position[self.get_param_id(param)][0], []).append(param)
        for param in (param for group in by_sub_group.values() for param in group):
            partition, _ = self._get_fp32_grad_state_partition(param, release_swap_buffers=False)
            whole = update_func(all_gather_partitions(self, param, partition), param).flatten()
            partition.copy_(whole.narrow(0, partition.numel() * partition_rank(self, param), partition.numel()))
        self._gradients.mark_set_by_user(params)

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, torch.Tensor]]:
        self._wait_for_reduction()
        return {
            sub_group_id: {index: self._gradients.writable(param) for index, param in enumerate(group)}
            for sub_group_id, group in enumerate(self.fp16_groups)
        }

    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: bool) -> tuple[torch.Tensor, int]:
        self._wait_for_reduction()
        # A caller that releases the swap buffers only reads; the others are about to write.
        partition = self._gradients.read(param) if release_swap_buffers else self._gradients.writable(param)
        return partition, self.grad_position[self.get_param_id(param)][0]

    def _wait_for_reduction(self) -> None:
        if not get_accelerator().resolves_data_dependency():
            self.reduce_and_partition_stream.synchronize()
            self._gradients.synchronize()

    # --- Checkpoints ---

    def check_states_on_disk(self) -> None:
        """Raise on all ranks if states on disk cannot be read on one, before a save; every rank calls this."""
        if (disk := self._running.memory.disk) is not None:
            self._update.synchronize_ranks(raise_failure=False, states=True)
            raise_together(disk.check_readable)

    def checkpoint_event_prologue(self) -> None:
        """Wait for the update before a load or a save; every rank calls this."""
        # A failure is raised at the next use of the states, which a load replaces.
        self._update.synchronize_ranks(raise_failure=False, states=True)
        # Report now: a load changes DeepSpeed's step count.
        self._update.report()
        super().checkpoint_event_prologue()

    def _rigid_state_dict(self) -> Any:
        self._update.wait(states=True)
        self._update.raise_if_failed()
        self._empty_param_groups()
        saved = super()._rigid_state_dict()
        saved[FP32_FLAT_GROUPS] = [_checkpoint_view(master) for master in saved[FP32_FLAT_GROUPS]]
        moments = saved[OPTIMIZER_STATE_DICT]["state"]
        for sub_group, state in moments.items():
            moments[sub_group] = {**state, **{key: _checkpoint_view(state[key]) for key in MOMENTS if key in state}}
        return saved

    def checkpoint_event_epilogue(self) -> None:
        """Refuse to write 16-bit weights of inconsistent states. After a load the states have been restored."""
        self._update.raise_if_failed()
        super().checkpoint_event_epilogue()
        # Rank 0 marks a saved checkpoint as the latest only after all ranks have written their files.
        raise_together(self.kept_error.raise_first)

    def _rigid_load_state_dict(self, state_dict: Any, load_optimizer_states: bool = True) -> None:
        self._empty_param_groups()
        with self._running.memory.pageable_states():
            super()._rigid_load_state_dict(state_dict, load_optimizer_states=load_optimizer_states)
        if load_optimizer_states:
            self._adopt_loaded_states()

    def load_hp_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir: str, *args: Any) -> None:
        with self._running.memory.pageable_states():
            super().load_hp_checkpoint_state_from_checkpoint_dir_stage3(checkpoint_dir, *args)
        self._adopt_loaded_states()

    def _empty_param_groups(self) -> None:
        """Remove the parameters that stock adds while it saves or loads: an interrupt may leave them there."""
        for param_group in self.optimizer.param_groups:
            param_group["params"] = []

    def _narrow_moments(self) -> None:
        """Keep moments in the dtype of the masters, as stock does, if a load or a script has put them there."""
        if self._states.moments_were_narrowed:
            self._wait_for_states()
            self._wait_for_reduction()
            self._running.executor.run_uninterrupted(self._running.narrow_moments)
            log.info("moments are in the dtype of the master weights from now on: DeepSpeed's load converts them")

    def _adopt_loaded_states(self) -> None:
        """Copy the loaded moments into our memory; without any, as before stock's first step, start from zeros."""
        self._narrow_moments()
        self._states.adopt()
        if self._update.failed:
            # Norms of the failed step are left.
            self.reset_cpu_buffers()
            self._update.clear_failure()


def _checkpoint_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the same memory, with a storage of its own."""
    # PyTorch moves the storage of a tensor that is sent to a process to shared memory: states would leave the slab.
    if not tensor.is_cpu:
        # PyTorch sends a handle to GPU memory, and DeepSpeed's next step waits until the data is written.
        return tensor
    values = tensor.detach()
    # NumPy has no bf16.
    as_numpy = values.view(torch.int16) if values.dtype == torch.bfloat16 else values
    view = torch.from_numpy(as_numpy.numpy()).view(values.dtype).requires_grad_(tensor.requires_grad)
    # DeepSpeed also saves the attributes with ids of parameters that it has set.
    vars(view).update(vars(tensor))
    return view
