"""Replace the update phase of DeepSpeed ZeRO-3 by a schedule: a thin subclass that overrides hooks of ``step()``.

The hooks collect the hyperparameters of all sub-groups, and the hook of the last one starts one schedule for all.
Persistent parameters are updated when ``step()`` returns, the rest possibly during the next forward (see
``step/update.py``). ``GuardedStates`` overrides the hooks for other readers and writers of parameters and states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from deep_opt_states.config import Config
from deep_opt_states.device.kernels.adam import AdamStep
from deep_opt_states.zero.assigned_states import AssignedStates
from deep_opt_states.zero.guarded_states import GuardedStates
from deep_opt_states.zero.internals.compat import (
    forget_gradient_buffers,
    is_boundary,
    restore_param_views,
    waits_for_current_stream,
)
from deep_opt_states.zero.start.assembly import assemble
from deep_opt_states.zero.start.devices import AcceleratorChoice
from deep_opt_states.zero.start.reporting import EngineProgress
from deep_opt_states.zero.step.buckets import Buckets
from deep_opt_states.zero.step.eager import EagerUpdates
from deep_opt_states.zero.step.gathers import Gathers
from deep_opt_states.zero.step.gpu_memory import GpuMemory
from deep_opt_states.zero.step.norms import Norms
from deep_opt_states.zero.step.update import Update
from deep_opt_states.zero.step.watched_forwards import WatchedForwards
from perf_model.prediction.timeline import PhaseSpan, Timeline
from perf_model.schedule.plan import UpdatePlan


class DeepOptimizerStates_Stage3(GuardedStates):
    """Stock's optimizer, with the states where the plan places them and updates that the schedule runs.

    The constructor is a collective over all ranks, and raises the errors of ``assemble``.
    """

    device: Any

    @property
    def plan(self) -> UpdatePlan:
        """Return the plan of the next update, and of the one in flight."""
        return self._running.plan

    def __init__(
        self, config: Config, accelerator: AcceleratorChoice, progress: EngineProgress, *args: Any, **kwargs: Any
    ) -> None:
        self._config = config
        self._accelerator = accelerator
        self._progress = progress
        self._resources = ExitStack()
        try:
            super().__init__(*args, **kwargs)
        except BaseException:
            self._resources.close()
            raise

    # --- Construction, in the order in which stock's constructor calls these methods ---

    def _configure_offloading(self, *args: Any) -> None:
        super()._configure_offloading(*args)
        # The slab page-locks the states, and stock's gradient buffers take no memory.
        self.offload_optimizer_pin_memory = False

    def _create_fp32_partitions(self) -> None:
        self._assembly = assembly = assemble(self, self._config, self._accelerator, self._resources)
        self.accounting_device = assembly.context.device
        self._running = running = assembly.running
        self._gradients = running.gradients
        self.fp32_partitioned_groups_flat = assembly.masters
        self._states = AssignedStates(self, running.memory)
        self.report = self._progress.make_report(self._config, assembly)
        self._update = Update(running, defers=assembly.context.defers, on_finished=self._updated)
        self.subgroup_to_device = dict.fromkeys(range(len(assembly.masters)), "cpu")
        self._empty_param_groups()
        self._norms = Norms(self)
        self._steps: list[AdamStep] = []
        self._stepped = self._window_is_open = False
        """Whether no backward has followed the last update, and whether gradients were reduced since then and kept."""
        self._grad_scale = 1.0
        self._eager = EagerUpdates(assembly.context.device, running, self._likely_steps)

    def initialize_optimizer_states(self) -> None:
        """Do nothing: stock would allocate fp32 gradient buffers, which are not used."""

    def _setup_for_real_optimizer(self) -> None:
        # Stock's buffer for sums of gradients takes no memory on the meta device.
        device, self.device = self.device, torch.device("meta")
        super()._setup_for_real_optimizer()
        self.device = device
        forget_gradient_buffers(self)
        self._gathers = Gathers(self, self._update, self._running, self._resources)
        self._gpu_memory: GpuMemory | None = None
        request, budget = self._assembly.planned.request, self._assembly.context.budget
        if request is not None and budget is not None:
            free_host_bytes = self._assembly.context.free_host_bytes
            self._gpu_memory = memory = GpuMemory(self._running, request, budget, self._update.report, free_host_bytes)
            memory.log_failure_at_exit(self._resources)
            WatchedForwards(self.module, memory, self._evict, self._resources)

    def _before_eviction(self) -> None:
        self._update.wait()
        self._wait_for_reduction()
        self._forget_copies()

    def _evict(self, reason: str) -> None:
        """Free the accelerator memory that the planner has given to states. Placements of the config stay."""
        self._before_eviction()
        if (memory := self._gpu_memory) is not None:
            self._running.executor.run_uninterrupted(lambda: memory.evict(reason))

    def _updated(self, phases: Sequence[PhaseSpan], read_timeline: Callable[[], Timeline]) -> None:
        read_timeline = cache(read_timeline)
        self._running.windows.updated(phases, read_timeline)
        self.report.updated(phases, read_timeline)

    # --- Backward ---

    def create_reduce_and_remove_grad_hooks(self) -> None:
        super().create_reduce_and_remove_grad_hooks()
        self._buckets = Buckets(self)

    def reduce_independent_p_g_buckets_and_remove_grads(self, param: Any) -> None:
        if self._buckets.contains(param):
            # The parameter is used several times; stock would put its gradient into the bucket twice and fail.
            self._buckets.wait_for_addition()
        else:
            super().reduce_independent_p_g_buckets_and_remove_grads(param)
            self._buckets.record(param)

    def clear_backward_seen_flag(self) -> None:
        """Discard the gradients of a backward that raised; DeepSpeed calls this before each forward."""
        # Stock would keep unreduced gradients. Reduced gradients of later micro-batches stay, as in stock.
        super().clear_backward_seen_flag()
        if self.micro_step_id == 0 and (self._window_is_open or self._buckets.have_gradients):
            self._wait_for_reduction()
            self._buckets.discard()
            self._eager.forget()
            self._gradients.abandon_window()
            self._window_is_open = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self._window_is_open:
            self._wait_for_reduction()
        self._eager.forget()
        self._gradients.abandon_window()

    def backward_prologue(self) -> None:
        """Wait for the update, which reads the gradients that this backward overwrites, and adapt the plan."""
        self._running.windows.backward_starts()
        # The caller may have written to partitions since forward, and backward gathers them again.
        self._gathers.order_after_caller()
        self._update.wait_on_stream()
        self._running.exposure.waits.backward_starts()
        if self._stepped:
            self._stepped = False
            self._forget_copies()
            # Units do not move while a window is open, which is so on all ranks: they reduce the same buckets.
            if not self._window_is_open:
                self._running.executor.run_uninterrupted(self._adapt)
        super().backward_prologue()

    def _adapt(self) -> None:
        running, memory, changed = self._running, self._gpu_memory, False
        if self._assembly.context.defers and running.uses is None and (names := self._gathers.used_names()) is not None:
            running.uses, changed = tuple(names), True
            if memory is None:
                running.order_by(self._gathers.first_uses())
        if memory is not None:
            changed |= memory.adapt(is_short_anywhere=self._update.memory_is_short_anywhere)
        if changed:
            self._progress.plan_changed(self.report, self._assembly)

    def _forget_copies(self) -> None:
        """Free the copies of gradients that the user had set and the update has read."""
        for index, part in enumerate(self._running.memory.parts):
            part.grad = self._gradients.buffer_of(index)
        self._running.executor.forget_replaced_tensors()

    def partition_grads(self, params_to_release: Any, grad_partitions: Any) -> Any:
        # Also here, because callers of ``loss.backward()`` skip ``backward_prologue``.
        self._update.wait_on_stream()
        self._buckets.remove(params_to_release)
        self._window_is_open = True
        self._gradients.add_reduced_bucket(params_to_release, grad_partitions)
        if self._config.overlap_backward and is_boundary(self):
            self._update.prefetch()
            self._eager.reduced(params_to_release)

    def _finalize_offload_gradient_accumulation(self) -> None:
        self._gradients.finish_window()

    # --- Step: the hooks of step(), in the order in which it calls them ---

    def _pre_step(self) -> None:
        # First: if an interrupt ends this step, the next backward starts another window, as with stock.
        super()._pre_step()
        if self._gpu_memory is not None:
            self._gpu_memory.observe()
            self._update.memory_is_short = self._gpu_memory.is_short
        self._narrow_moments()
        # As a section: an exception of a signal handler in it would look like one of the states that it reads.
        self._update.refusal = self._running.executor.run_uninterrupted(self._states.refusal)
        self._update.synchronize_ranks(raise_failure=False, flushed=False)
        # Before the window is complete: the caller can repair the states and repeat this step.
        self._update.raise_if_refused()
        self._gradients.complete_window()
        # The norm may read gradients in host memory. The host waits for this stream before the update starts.
        self._gradients.wait_for_copies()
        self._steps.clear()
        self._norms.forget()
        self._window_is_open = False
        # After the window is complete: even if this step is refused, the window must not be added to the next one.
        self._update.raise_if_failed()

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Return whether the norm of any parameter is not finite on any rank."""
        # If only the sum of finite squares overflows, stock skips the step as well, because of its infinite norm.
        if not partition_gradients:
            return super().has_overflow(partition_gradients)
        return self._norms.overflow()

    def _get_norm_groups(self) -> list[torch.Tensor]:
        return self._norms.per_sub_group() if self._norms.are_data_parallel_only else super()._get_norm_groups()

    def _overflow_clean_up(self, prev_scale: Any) -> None:
        super()._overflow_clean_up(prev_scale)
        self._eager.skipped()
        self._gradients.end_window()
        # Now, because the report contains DeepSpeed's step count.
        self._update.skip()

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: Any) -> None:
        """Compute the factor by which our kernels multiply all gradients; stock multiplies them here."""
        if sub_group_id == 0:
            self._grad_scale = self._grad_scale_with(total_norm)

    def _grad_scale_with(self, total_norm: torch.Tensor) -> float:
        combined_scale = self.loss_scale
        if self.clip_grad > 0.0:
            clip = ((total_norm / self.loss_scale) + 1e-6) / self.clip_grad
            combined_scale = torch.clamp(clip, min=1.0) * self.loss_scale
        return float(1.0 / combined_scale)

    def _likely_steps(self) -> list[AdamStep]:
        """Return the steps of all sub-groups if the next update is neither clipped nor skipped; none if unknown."""
        if not self._states.count_steps:
            return []
        return [self._adam_step(index, self._likely_grad_scale) for index in range(len(self.fp16_groups))]

    @property
    def _likely_grad_scale(self) -> float:
        return self._grad_scale_with(torch.zeros((), dtype=torch.float32, device="cpu"))

    def _optimizer_step(self, sub_group_id: int) -> None:
        if sub_group_id == 0 and self._states.are_replaced:
            # Not earlier: in a step that is skipped, stock leaves the states as they are.
            adopt = partial(self._states.adopt, before_write=self._wait_for_states)
            self._running.executor.run_uninterrupted(adopt)
        self._steps.append(self._adam_step(sub_group_id, self._grad_scale))

    def _adam_step(self, sub_group_id: int, grad_scale: float) -> AdamStep:
        group = self.optimizer.param_groups[self.sub_group_to_group_id[sub_group_id]]
        beta1, beta2 = group["betas"]
        return AdamStep(
            step=int(self._states[sub_group_id]["step"]) + 1,
            # A scheduler may write to a tensor in place.
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            bias_correction=bool(group["bias_correction"]),
            grad_scale=grad_scale,
        )

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        """Make the partitions views of the flat 16-bit buffer again: a caller may have assigned other tensors."""
        restore_param_views(self, sub_group_id)

    def _release_sub_group(self, sub_group_id: int, timer_names: Any) -> None:
        super()._release_sub_group(sub_group_id, timer_names)
        if sub_group_id < len(self.fp16_groups) - 1:
            return
        # A copy: the LR scheduler and the user may change hyperparameters while this update runs.
        steps = tuple(self._steps)
        self._stepped = True

        def prepare() -> None:
            for part, grad in zip(self._running.memory.parts, self._gradients.grads_for_update(), strict=True):
                part.grad = grad
            self._gradients.end_window()
            self._eager.begin_update()
            self._running.windows.update_starts()
            # Here, so that step counts match the moments wherever an interrupt ends ``step()``.
            for sub_group_id, step in enumerate(steps):
                self._states[sub_group_id]["step"] += 1
                self._gradients.record_pending_scale(sub_group_id, step.grad_scale)

        self._update.run(steps, prepare)
        self._eager.updated(is_likely=self._grad_scale == self._likely_grad_scale)
        # The param groups are empty. PyTorch's LR schedulers count the calls.
        self.optimizer.step()

    def _post_step(self, timer_names: Any) -> None:
        # If the host waited for prefetches in flight, the actions after them would be issued late.
        with waits_for_current_stream(get_accelerator()), self._gathers.by_the_step():
            super()._post_step(timer_names)
        # ``Gathers`` misses a forward that calls a submodule directly.
        self._gathers.order_after_caller()
        # After ``super()``: the persistent parameters are gathered before all actions are enqueued.
        self._update.advance()
        # After ``advance``: the accelerator works while the host reports, which does not wait: the events are reached.
        self._update.report_previous()
        self._gathers.direct_writes.record()

    # --- End ---

    def destroy(self) -> None:
        # Outside ``try``: an engine whose wait is interrupted can still be saved and destroyed.
        self._update.wait()
        try:
            self._update.close()
            self.report.close()
            super().destroy()
        finally:
            self._resources.close()
            # DeepSpeed's hooks keep this object, and so the states, alive.
            self.optimizer.state.clear()
            self._states.masters.clear()
