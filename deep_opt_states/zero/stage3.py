"""ZeRO-3 with its update phase replaced by a schedule: a thin subclass that overrides hooks of ``step()``.

``step()`` itself, the gradient reduction, the norm, overflow handling and checkpoints are stock's. What
``step()`` would do sub-group by sub-group is collected here, and executed as one schedule at its last sub-group.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from deep_opt_states.config import Config
from deep_opt_states.cores import CoreShare
from deep_opt_states.device.affinity import LaunchBinding
from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import AdamStep
from deep_opt_states.device.kernels.choice import cpu_adam
from deep_opt_states.report.update_report import UpdateReport
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.ledger import Ledger
from deep_opt_states.runtime.state import SubGroupState
from deep_opt_states.zero.agreement import FailureAgreement, agree
from deep_opt_states.zero.cores import share_cores
from deep_opt_states.zero.devices import AcceleratorChoice
from deep_opt_states.zero.gradients import Gradients
from deep_opt_states.zero.log import say
from deep_opt_states.zero.planning import intend
from perf_model.placement import Placement
from perf_model.plan import UpdatePlan
from perf_model.workload import Workload

MOMENTS = ("exp_avg", "exp_avg_sq")


class DeepOptimizerStates_Stage3(DeepSpeedZeroOptimizer_Stage3):
    """Stock's optimizer, once ``interleave`` has been called on it right after construction."""

    plan: UpdatePlan
    ledger: Ledger
    """What this plugin has reserved."""
    report: UpdateReport

    def interleave(self, config: Config, accelerator: AcceleratorChoice) -> None:
        """Plan, reserve, and take the optimizer states over. A collective over all ranks.

        Raises ``ConfigError`` or ``Unsupported`` for a placement that this model or accelerator cannot have,
        ``ProfileError`` for a profile that cannot be used, ``RanksDisagree`` if the ranks' plans differ.
        """
        share = share_cores(config, accelerator)
        workload = Workload.of([master.numel() for master in self.fp32_partitioned_groups_flat])
        param_bytes = self.fp16_partitioned_groups_flat[0].element_size()
        intention = intend(config, workload, accelerator, param_bytes, share.threads)
        self.plan = intention.plan
        # A rank without the memory for it must tell the others.
        agree(lambda: self._prepare(intention.plan, accelerator, share), lambda _: "prepared")
        self.report = UpdateReport(config.report, intention.plan, intention.predicted, dist.get_rank() == 0, say)
        say(str(self.plan))

    def _prepare(self, plan: UpdatePlan, accelerator: AcceleratorChoice, share: CoreShare) -> None:
        # Before memory is touched, which then lies near these cores, and before the worker is started.
        self._launch_binding = LaunchBinding(share.launch_cores) if share.launch_cores else None
        device = self.ledger = Ledger(accelerator.device)
        self._gradients = Gradients(self)
        self._states = [
            self._take_over(sub_group_id, placement, device) for sub_group_id, placement in enumerate(plan.placements)
        ]
        choice = cpu_adam(self.optimizer, len(self._states), num_threads=share.threads, cores=share.cores)
        if choice.why:
            say(choice.why)
        self._adam = choice.kernel
        grad_dtype, param_dtype = self._states[0].grad.dtype, self._states[0].param.dtype
        device_adam = accelerator.device_adam(plan, self._adam, self.optimizer, grad_dtype, param_dtype)
        # One and the same where slots are host memory.
        self._kernels = {id(kernel): kernel for kernel in (self._adam, device_adam) if kernel is not None}
        self._executor = Executor(plan.schedule, self._states, device, self._adam, device_adam)
        self._failures = FailureAgreement()
        self._steps: list[AdamStep] = []
        self._grad_scale = 1.0
        self._update_s = 0.0

    def _take_over(self, sub_group_id: int, placement: Placement, device: Device[Any]) -> SubGroupState:
        """Move the states of one sub-group to the accelerator, or where that can copy from without blocking."""
        reserve = device.empty if placement is Placement.RESIDENT else device.empty_host
        master = self.fp32_partitioned_groups_flat[sub_group_id]
        param = self.fp16_partitioned_groups_flat[sub_group_id]
        numel = master.numel()
        home = reserve(numel, torch.float32)
        # The optimizer's state is keyed by this tensor object: its data moves, the object stays.
        master.data = home.copy_(master.data)
        moments = {key: reserve(numel, torch.float32).zero_() for key in MOMENTS}
        # Stock would create them, unpinned, at the first step.
        self.optimizer.state[master] = {"step": 0, **moments}
        rounded = None
        if placement is Placement.CPU:
            rounded = master.data if param.dtype == torch.float32 else device.empty_host(numel, param.dtype)
        return SubGroupState(
            master=master.data,
            exp_avg=moments["exp_avg"],
            exp_avg_sq=moments["exp_avg_sq"],
            grad=master.grad,
            param=param,
            rounded=rounded,
        )

    # Gradients

    def partition_grads(self, params_to_release: Any, grad_partitions: Any) -> Any:
        self._gradients.begin_accumulation(params_to_release)
        return super().partition_grads(params_to_release, grad_partitions)

    def _offload_grad_partition_at_boundary(self, param: Any, *args: Any) -> None:
        super()._offload_grad_partition_at_boundary(param, *args)
        self._gradients.wrote([param])

    def set_fp32_grad_for_param(self, value: Any, param: Any) -> None:
        super().set_fp32_grad_for_param(value, param)
        self._gradients.wrote([param])

    def set_local_grad_for_param(self, value: Any, param: Any) -> None:
        super().set_local_grad_for_param(value, param)
        self._gradients.wrote([param])

    def update_fp32_grad_for_param_vectorized(self, update_func: Any, param_list: Any) -> None:
        self._gradients.settle(param_list)
        super().update_fp32_grad_for_param_vectorized(update_func, param_list)
        self._gradients.wrote([param for param in param_list if param.requires_grad])

    def get_fp32_grad_partitions(self) -> Any:
        self._gradients.settle(param for group in self.fp16_groups for param in group)
        return super().get_fp32_grad_partitions()

    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: Any) -> Any:
        self._gradients.settle([param])
        return super()._get_fp32_grad_state_partition(param, release_swap_buffers)

    # The hooks of step(), in the order in which it calls them

    def _pre_step(self) -> None:
        # Before super() forgets which parameters were reduced in this window.
        self._gradients.complete_window()
        self._steps.clear()
        super()._pre_step()
        # Only now: the window of a refused step is over, too, and must not be added to the next one.
        self._refuse_torn_states()

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: Any) -> None:
        """The factor, one for all sub-groups, that stock multiplies into the gradient here; our kernels apply it."""
        if sub_group_id > 0:
            return
        combined_scale = self.loss_scale
        if self.clip_grad > 0.0:
            clip = ((total_norm / self.loss_scale) + 1e-6) / self.clip_grad
            combined_scale = torch.clamp(clip, min=1.0) * self.loss_scale
        self._grad_scale = float(1.0 / combined_scale)

    def _optimizer_step(self, sub_group_id: int) -> None:
        group = self.optimizer.param_groups[self.sub_group_to_group_id[sub_group_id]]
        state = self.optimizer.state[self.fp32_partitioned_groups_flat[sub_group_id]]
        beta1, beta2 = group["betas"]
        self._steps.append(
            AdamStep(
                step=state["step"] + 1,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                bias_correction=group["bias_correction"],
                grad_scale=self._grad_scale,
            )
        )

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        """The schedule writes the 16-bit parameters."""

    def _release_sub_group(self, sub_group_id: int, timer_names: Any) -> None:
        super()._release_sub_group(sub_group_id, timer_names)
        if sub_group_id == len(self.fp16_groups) - 1:
            self._update()

    def _update(self) -> None:
        for sub_group_id, state in enumerate(self._states):
            # DeepSpeed reallocates the flat buffer in reload_states().
            state.param = self.fp16_partitioned_groups_flat[sub_group_id]
        failure = None
        start_s = time.perf_counter()
        try:
            self._executor.run(self._steps)
        except BaseException as error:  # noqa: BLE001 (an interrupt, too, is told to the other ranks, then raised)
            failure = error
        self._update_s = time.perf_counter() - start_s
        self._failures.check(failure, self._executor)
        for sub_group_id, step in enumerate(self._steps):
            self.optimizer.state[self.fp32_partitioned_groups_flat[sub_group_id]]["step"] = step.step
            self._gradients.left_unscaled(sub_group_id, step.grad_scale)
        # Its param groups are empty here, so this updates nothing; but PyTorch's LR schedulers count the calls.
        self.optimizer.step()

    def _post_step(self, timer_names: Any) -> None:
        super()._post_step(timer_names)
        # After the last collective of the step: rank 0 writes files, and nobody waits for it.
        self.report.stepped(self._update_s, self._executor.timeline)

    # Checkpoints

    def _rigid_state_dict(self) -> Any:
        self._refuse_torn_states()
        return super()._rigid_state_dict()

    def checkpoint_event_epilogue(self) -> None:
        """Runs before 16-bit weights are written, and after a load, which has restored the states by then."""
        self._refuse_torn_states()
        super().checkpoint_event_epilogue()

    def _refuse_torn_states(self) -> None:
        if self._executor.failure is not None:
            raise self._executor.torn()

    def _rigid_load_state_dict(self, state_dict: Any, load_optimizer_states: bool = True) -> None:
        super()._rigid_load_state_dict(state_dict, load_optimizer_states=load_optimizer_states)
        if load_optimizer_states:
            self._relink()

    def load_hp_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir: str) -> None:
        super().load_hp_checkpoint_state_from_checkpoint_dir_stage3(checkpoint_dir)
        self._relink()

    def _relink(self) -> None:
        """Loading replaces the moments by tensors of its own: copy them into ours, and put ours back."""
        for sub_group_id, state in enumerate(self._states):
            loaded = self.optimizer.state[self.fp32_partitioned_groups_flat[sub_group_id]]
            # A checkpoint from before stock's first step has none; stock then starts from zero.
            loaded.setdefault("step", 0)
            for key, ours in zip(MOMENTS, (state.exp_avg, state.exp_avg_sq), strict=True):
                if key in loaded:
                    ours.copy_(loaded[key])
                else:
                    ours.zero_()
                loaded[key] = ours
        if self._executor.failure is not None:
            # Some op objects have heard of the step that failed, others have not; its norms were not used up.
            for kernel in self._kernels.values():
                kernel.restart()
            self.reset_cpu_buffers()
            self._executor.forget_failure()

    def destroy(self) -> None:
        self.report.close()
        super().destroy()
        self._executor.close()
        for kernel in self._kernels.values():
            kernel.close()
        if self._launch_binding is not None:
            self._launch_binding.release()
        # DeepSpeed's hooks on the module keep this object alive; they need not keep its buffers.
        self._states.clear()
