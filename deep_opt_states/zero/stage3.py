"""Replace the update phase of DeepSpeed ZeRO-3 by a schedule: a thin subclass that overrides hooks of ``step()``.

``step()`` itself, the gradient reduction, the norm, overflow handling and checkpoints are stock's. Stock updates one
sub-group after the other inside ``step()``. Here the hooks collect the hyperparameters of all sub-groups, and the hook
of the last sub-group starts one schedule for all of them.

Persistent parameters, which DeepSpeed keeps gathered, are updated when ``step()`` returns. The rest may be updated
while the next forward runs (see ``step/update.py`` for the life of an update). Every reader or writer of
parameters, states or gradients waits until no update is in flight.

Its mixin ``GuardedStates`` overrides the hooks that are called outside the training loop: for readers and writers of
states, for checkpoints, and for users who read and set gradients.
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
from deep_opt_states.report.line import UpdateReporter
from deep_opt_states.runtime.accounting import AccountingDevice
from deep_opt_states.zero.assigned_states import AssignedStates
from deep_opt_states.zero.guarded_states import GuardedStates
from deep_opt_states.zero.internals.compat import (
    forget_gradient_buffers,
    is_boundary,
    param_coordinator,
    ranges_of_partitioned_params,
    restore_param_views,
    waits_for_current_stream,
)
from deep_opt_states.zero.start.assembly import Assembly, assemble
from deep_opt_states.zero.start.devices import AcceleratorChoice
from deep_opt_states.zero.start.reporting import EngineProgress
from deep_opt_states.zero.step.buckets import Buckets
from deep_opt_states.zero.step.gathers import Gathers
from deep_opt_states.zero.step.gpu_memory import GpuMemory, WatchedForwards
from deep_opt_states.zero.step.norms import Norms
from deep_opt_states.zero.step.running_plan import RunningPlan
from deep_opt_states.zero.step.update import Update
from perf_model.prediction.timeline import PhaseSpan, Timeline
from perf_model.schedule.plan import UpdatePlan


class DeepOptimizerStates_Stage3(GuardedStates):
    """Stock's optimizer, with the fp32 states where the plan places them and updates that the schedule runs.

    Constructing one is a collective over all ranks, which raises the errors of ``assemble``. Then everything that was
    taken from the process is given back.
    """

    device: Any
    accounting_device: AccountingDevice
    """The device on which this plugin has reserved its memory, with a record of each reservation."""
    report: UpdateReporter

    _assembly: Assembly
    _running: RunningPlan
    _update: Update

    @property
    def plan(self) -> UpdatePlan:
        """Return the plan of the next update, and of the present one if it is in flight."""
        return self._running.plan

    def __init__(
        self, config: Config, accelerator: AcceleratorChoice, progress: EngineProgress, *args: Any, **kwargs: Any
    ) -> None:
        self._config = config
        self._accelerator = accelerator
        self._progress = progress
        self._resources = ExitStack()
        """The callbacks that give back everything that was taken from the process, last taken first."""
        try:
            super().__init__(*args, **kwargs)
        except BaseException:
            self._resources.close()
            raise

    # --- Construction, in the order in which stock's constructor calls these methods ---

    def _configure_offloading(self, *args: Any) -> None:
        super()._configure_offloading(*args)
        # The states are page-locked as one slab, and stock's gradient buffers take no memory.
        self.offload_optimizer_pin_memory = False

    def _create_fp32_partitions(self) -> None:
        """Create the fp32 states where the plan places them; stock would convert the parameters to new tensors."""
        self._assembly = assembly = assemble(self, self._config, self._accelerator, self._resources)
        self.accounting_device = assembly.context.device
        self._running = running = assembly.running
        self._gradients = running.gradients
        self.fp32_partitioned_groups_flat = assembly.masters
        # Stock would create the moments, unpinned, at the first step.
        self._states = AssignedStates(self, running.memory)
        self.report = self._progress.make_report(self._config, assembly)
        self._update = Update(running, defers=assembly.context.defers, on_finished=self._updated)
        # Stock looks up here on which device a sub-group is.
        self.subgroup_to_device = dict.fromkeys(range(len(assembly.masters)), "cpu")
        self._empty_param_groups()
        self._norms = Norms(self)
        self._steps: list[AdamStep] = []
        self._stepped = False
        self._window_is_open = False
        """Whether gradients were reduced since the last step, and not discarded."""
        self._grad_scale = 1.0

    def initialize_optimizer_states(self) -> None:
        """Do nothing: stock would allocate fp32 buffers for gradients, which are not used."""

    def _setup_for_real_optimizer(self) -> None:
        # Stock allocates a buffer of zeros in which it would sum gradients. On the meta device that takes no memory.
        device, self.device = self.device, torch.device("meta")
        try:
            super()._setup_for_real_optimizer()
        finally:
            self.device = device
        forget_gradient_buffers(self)
        self._gathers = Gathers(
            self.module,
            param_coordinator(self),
            self._update,
            ranges_of_partitioned_params(self),
            self._running,
        )
        self._resources.callback(self._gathers.release)
        self._gpu_memory: GpuMemory | None = None
        request, budget = self._assembly.planned.request, self._assembly.context.budget
        if request is not None and budget is not None:
            self._gpu_memory = memory = GpuMemory(self._running, request, budget, before_move=self._update.report)
            memory.log_failure_at_exit(self._resources)
            WatchedForwards(self.module, memory, self._evict, self._resources)

    def _before_eviction(self) -> None:
        """Wait until nothing uses the states and the gradients of units on the accelerator."""
        self._update.wait()
        self._wait_for_reduction()
        self._forget_fp32_copies()

    def _evict(self, reason: str) -> None:
        """Free all accelerator memory that the planner has given to states. Placements of the config stay."""
        self._before_eviction()
        if (memory := self._gpu_memory) is not None:
            self._running.executor.run_uninterrupted(lambda: memory.evict(reason))

    def _updated(self, phases: Sequence[PhaseSpan], read_timeline: Callable[[], Timeline]) -> None:
        """Report one update, and let the planner measure it."""
        if self._gpu_memory is not None:
            self._gpu_memory.measure(phases)
        self.report.updated(phases, cache(read_timeline))

    # --- Backward ---

    def create_reduce_and_remove_grad_hooks(self) -> None:
        super().create_reduce_and_remove_grad_hooks()
        self._buckets = Buckets(self)

    def reduce_independent_p_g_buckets_and_remove_grads(self, param: Any) -> None:
        if self._buckets.contains(param):
            # The parameter is used several times: autograd has added to its gradient in the bucket. Stock would put it
            # into the bucket twice, and an assertion would fail.
            self._buckets.wait_for_addition()
        else:
            super().reduce_independent_p_g_buckets_and_remove_grads(param)
            self._buckets.record(param)

    def clear_backward_seen_flag(self) -> None:
        """Discard the gradients of a backward that an error has ended; DeepSpeed calls this before each forward.

        When the first micro-batch of a window is tried again, stock overwrites those that were reduced, but the others
        stay in its buckets. Those of a later micro-batch are part of the sums already, as in stock.
        """
        super().clear_backward_seen_flag()
        if self.micro_step_id == 0 and (self._window_is_open or self._buckets.have_gradients):
            self._wait_for_reduction()
            self._buckets.discard()
            self._gradients.abandon_window()
            self._window_is_open = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self._window_is_open:
            # Copies of the sums to host memory may be in flight. The step zeroes that memory if no gradient follows.
            self._wait_for_reduction()
        self._gradients.abandon_window()

    def backward_prologue(self) -> None:
        """Wait for the update, which reads the gradients that this backward overwrites, and adapt the schedule."""
        # Backward gathers partitions again, and the caller may have written to them since forward.
        self._gathers.order_after_caller()
        self._update.wait_on_stream()
        if self._stepped:
            self._stepped = False
            self._forget_fp32_copies()
            # A caller may have skipped this method in earlier micro-batches: then units do not move in the middle of
            # the sums. Every rank reduces the same buckets, so the ranks agree on it.
            if not self._window_is_open:
                self._running.executor.run_uninterrupted(self._adapt)
        super().backward_prologue()

    def _adapt(self) -> None:
        running, memory, changed = self._running, self._gpu_memory, False
        if self._assembly.context.defers and running.uses is None and (names := self._gathers.used_names()) is not None:
            # Predictions of the updates depend on it, although the plan may not.
            running.uses, changed = tuple(names), True
            if memory is None:
                running.order_by(self._gathers.first_uses() or ())
        if memory is not None:
            changed |= memory.adapt(is_short_anywhere=self._update.memory_is_short_anywhere)
        if changed:
            self._progress.plan_changed(self.report, self._assembly)

    def _forget_fp32_copies(self) -> None:
        """Free the temporary fp32 copies of gradients that the update has read if the user had set some."""
        for index, part in enumerate(self._running.memory.parts):
            part.grad = self._gradients.buffer_of(index)
        self._running.executor.forget_replaced_tensors()

    def partition_grads(self, params_to_release: Any, grad_partitions: Any) -> Any:
        # Some callers skip ``backward_prologue``, for example ``loss.backward()``: wait here as well.
        self._update.wait_on_stream()
        self._buckets.remove(params_to_release)
        self._window_is_open = True
        self._gradients.add_reduced_bucket(params_to_release, grad_partitions)
        if self._config.overlap_backward and is_boundary(self):
            self._update.prefetch()

    def _finalize_offload_gradient_accumulation(self) -> None:
        self._gradients.finish_window()

    # --- Step: the hooks of step(), in the order in which it calls them ---

    def _pre_step(self) -> None:
        # First: if an interrupt ends this step, the next backward begins another window, as with stock.
        super()._pre_step()
        if self._gpu_memory is not None:
            self._gpu_memory.observe()
            self._update.memory_is_short = self._gpu_memory.is_short
        self._update.refusal = self._states.refusal()
        self._update.synchronize_ranks(raise_failure=False, flushed=False)
        # Before the window is complete: the caller can repair the states and take this step again.
        self._update.raise_if_refused()
        self._gradients.complete_window()
        # The current stream waits for the copies of gradients to host memory: the norm may read them, and the host
        # waits for this stream before the update begins.
        self._gradients.wait_for_copies()
        self._steps.clear()
        self._norms.forget()
        self._window_is_open = False
        # After the window is complete: it ends even if this step is refused, and must not be added to the next one.
        self._update.raise_if_failed()

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Return whether a gradient is not finite on any rank, judged by the norms of the parameters.

        If all elements are finite and only the sum of their squares overflows, stock finds no overflow here, but an
        infinite norm afterwards: it skips the step as well.
        """
        if not partition_gradients:
            return super().has_overflow(partition_gradients)
        # No wait for the reduction is needed: backward has waited for it at its end.
        return self._norms.overflow()

    def _get_norm_groups(self) -> list[torch.Tensor]:
        """Return stock's norms. The host waits for the device once, and not twice for each sub-group."""
        return self._norms.per_sub_group() if self._norms.are_data_parallel_only else super()._get_norm_groups()

    def _overflow_clean_up(self, prev_scale: Any) -> None:
        super()._overflow_clean_up(prev_scale)
        self._gradients.end_window()
        # This step runs no update, which would report the last one. By the next step, DeepSpeed's step count, which
        # the report contains, would have changed.
        self._update.skip()

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: Any) -> None:
        """Compute the factor by which our kernels multiply all gradients; stock multiplies them here."""
        if sub_group_id > 0:
            return
        combined_scale = self.loss_scale
        if self.clip_grad > 0.0:
            clip = ((total_norm / self.loss_scale) + 1e-6) / self.clip_grad
            combined_scale = torch.clamp(clip, min=1.0) * self.loss_scale
        self._grad_scale = float(1.0 / combined_scale)

    def _optimizer_step(self, sub_group_id: int) -> None:
        group = self.optimizer.param_groups[self.sub_group_to_group_id[sub_group_id]]
        if sub_group_id == 0 and self._states.are_replaced:
            # Not before the step is known to be taken: in a step that is skipped, stock leaves states as they are.
            adopt = partial(self._states.adopt, before_write=self._wait_for_states)
            self._running.executor.run_uninterrupted(adopt)
        beta1, beta2 = group["betas"]
        self._steps.append(
            AdamStep(
                # DeepSpeedCPUAdam also accepts a tensor with one number.
                step=int(self._states[sub_group_id]["step"]) + 1,
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
        """Make the partitions views of the flat 16-bit buffer again, to which the schedule writes.

        A caller may have assigned other tensors. Stock copies the updated values into the buffer here.
        """
        restore_param_views(self, sub_group_id)

    def _release_sub_group(self, sub_group_id: int, timer_names: Any) -> None:
        super()._release_sub_group(sub_group_id, timer_names)
        if sub_group_id < len(self.fp16_groups) - 1:
            return
        # A copy: the LR scheduler and the user may change the next step's hyperparameters while this update runs.
        steps = tuple(self._steps)
        self._stepped = True

        def prepare() -> None:
            for part, grad in zip(self._running.memory.parts, self._gradients.grads_for_update(), strict=True):
                part.grad = grad
            self._gradients.end_window()
            # Here, so that the step counts are those of the moments wherever an interrupt ends ``step()``.
            for sub_group_id, step in enumerate(steps):
                self._states[sub_group_id]["step"] += 1
                self._gradients.record_pending_scale(sub_group_id, step.grad_scale)

        self._update.run(steps, prepare)
        # The param groups are empty, so this updates nothing. PyTorch's LR schedulers count the calls.
        self.optimizer.step()

    def _post_step(self, timer_names: Any) -> None:
        # Prefetches may be in flight. If the host waited for them, the actions that follow them would be issued late.
        with waits_for_current_stream(get_accelerator()), self._gathers.by_the_step():
            super()._post_step(timer_names)
        # The pre-forward hook of ``Gathers`` does not run if a submodule is called directly and not through the engine.
        self._gathers.order_after_caller()
        # After ``super()``, so that the host gathers the persistent parameters before it enqueues all actions.
        self._update.advance()
        # After ``advance``, so that the accelerator works while the host reports. The events of the previous update
        # have been reached, so the host does not wait, and DeepSpeed's step count is still the one of that update.
        self._update.report_previous()
        self._gathers.direct_writes.record()

    # --- End ---

    def destroy(self) -> None:
        # First, and not inside ``try``: an engine whose wait is interrupted here can still be saved and destroyed.
        self._update.wait()
        try:
            self._update.close()
            self.report.close()
            super().destroy()
        finally:
            self._resources.close()
            # DeepSpeed's hooks on the module keep a reference to this object, and so to the memory of the states.
            self.optimizer.state.clear()
            self._states.masters.clear()
