"""Override the hooks of DeepSpeed's optimizer by which states and parameters are read, written, saved and loaded.

Each of them waits until no update works on the states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, OPTIMIZER_STATE_DICT
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from deep_opt_states.zero.assigned_states import AssignedStates
from deep_opt_states.zero.checkpoint_contents import MOMENTS
from deep_opt_states.zero.internals.agreement import wait_for_all_ranks
from deep_opt_states.zero.internals.compat import flat_parameters
from deep_opt_states.zero.start.assembly import Assembly
from deep_opt_states.zero.step.gathers import Gathers
from deep_opt_states.zero.step.readers import WaitsBeforeRead, checkpoint_view
from deep_opt_states.zero.step.running_plan import RunningPlan
from deep_opt_states.zero.step.update import Update


class GuardedStates(DeepSpeedZeroOptimizer_Stage3):
    """The mixin by which states are read and written only while no update works on them.

    The sections are *Attributes that wait for the update before they are read*, *Readers and writers of states* and
    *Checkpoints*.
    """

    _assembly: Assembly
    _gathers: Gathers
    _running: RunningPlan
    _states: AssignedStates
    _update: Update
    _evict: Callable[[str], None]

    # --- Attributes that wait for the update before they are read. No update exists while stock's constructor runs ---

    def _wait_for_parameters(self) -> None:
        if "_update" in vars(self):
            self._update.wait()
            # The caller may also write to them.
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
        # Every rank calls this. The ranks agree on a failure first, so that no rank raises alone and leaves the others
        # waiting in the collective of ``super()``.
        self._update.synchronize_ranks(states=True)
        return super().get_full_hp_param(*args, **kwargs)

    def set_full_hp_param(self, *args: Any, **kwargs: Any) -> None:
        self._update.synchronize_ranks(states=True)
        super().set_full_hp_param(*args, **kwargs)

    def _get_fp32_opt_state_partition(self, *args: Any, **kwargs: Any) -> Any:
        self._update.wait(states=True)
        self._update.raise_if_failed()
        return super()._get_fp32_opt_state_partition(*args, **kwargs)

    def offload_states(self, include: Any = None, **kwargs: Any) -> None:
        """Offload the states that ``include`` names, except ``lp_grads``: gradients stay where they are needed."""
        if include is not None:
            include = [state_type for state_type in include if state_type is not OffloadStateTypeEnum.lp_grads]
        self._wait_for_states()
        super().offload_states(include=include, **kwargs)
        if OffloadStateTypeEnum.lp_params in self.offloaded_states:
            # Our views would keep the memory of the parameters on the accelerator.
            self._evict("while parameters are offloaded")
            self._running.memory.release_params()
            self._running.executor.forget_replaced_tensors()

    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        super().reload_states(*args, **kwargs)
        self._running.memory.replace_params(flat_parameters(self))

    # --- Checkpoints ---

    def checkpoint_event_prologue(self) -> None:
        """Wait for the update before a load or a save; every rank calls this."""
        # A failure is raised where the states are used next; a load replaces them.
        self._update.synchronize_ranks(raise_failure=False, states=True)
        # Report the update now: a load changes DeepSpeed's step count.
        self._update.report()
        super().checkpoint_event_prologue()

    def _rigid_state_dict(self) -> Any:
        self._update.wait(states=True)
        self._update.raise_if_failed()
        self._empty_param_groups()
        saved = super()._rigid_state_dict()
        saved[FP32_FLAT_GROUPS] = [checkpoint_view(master) for master in saved[FP32_FLAT_GROUPS]]
        moments = saved[OPTIMIZER_STATE_DICT]["state"]
        for sub_group, state in moments.items():
            # A script may have cleared the state.
            moments[sub_group] = {**state, **{key: checkpoint_view(state[key]) for key in MOMENTS if key in state}}
        return saved

    def checkpoint_event_epilogue(self) -> None:
        """Refuse to write 16-bit weights of inconsistent states. After a load the states have been restored."""
        self._update.raise_if_failed()
        super().checkpoint_event_epilogue()
        # After a save, rank 0 marks the checkpoint as the latest. It waits until all ranks have written their files.
        wait_for_all_ranks()

    def _rigid_load_state_dict(self, state_dict: Any, load_optimizer_states: bool = True) -> None:
        self._empty_param_groups()
        super()._rigid_load_state_dict(state_dict, load_optimizer_states=load_optimizer_states)
        if load_optimizer_states:
            self._adopt_loaded_states()

    def load_hp_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir: str) -> None:
        super().load_hp_checkpoint_state_from_checkpoint_dir_stage3(checkpoint_dir)
        self._adopt_loaded_states()

    def _empty_param_groups(self) -> None:
        """Let the wrapped optimizer have no parameters, as between steps.

        Stock appends them while it saves or loads. If an interrupt ends that, the next checkpoint would have them twice
        and could not be loaded.
        """
        for param_group in self.optimizer.param_groups:
            param_group["params"] = []

    def _adopt_loaded_states(self) -> None:
        """Copy the loaded moments into our memory: loading has replaced our tensors by new ones.

        A checkpoint that stock saved before its first step has no moments. Training then starts from zeros.
        """
        self._states.adopt()
        if self._update.failed:
            # The kernels disagree about the step count, and the norms of the failed step were not used: reset both.
            for kernel in self._assembly.kernels:
                kernel.restart()
            self.reset_cpu_buffers()
            self._update.clear_failure()
