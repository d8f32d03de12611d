"""ZeRO-3 with its update phase replaced by a schedule: a thin subclass that overrides hooks of ``step()``.

``step()`` itself, the gradient reduction, the norm, overflow handling and checkpoints are stock's. What
``step()`` would do sub-group by sub-group is collected here, and begun as one schedule at its last sub-group.
Parameters that DeepSpeed keeps gathered are updated when ``step()`` returns; the rest may be updated while the next
forward runs, and whoever reads or writes parameters, states or gradients meets no update under way.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, OPTIMIZER_STATE_DICT
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from deep_opt_states.config import Config
from deep_opt_states.device.kernels.adam import AdamStep
from deep_opt_states.device.kernels.choice import Choice, cpu_adam
from deep_opt_states.host import machine
from deep_opt_states.host.affinity import LaunchBinding
from deep_opt_states.host.cores import CoreShare
from deep_opt_states.profiler.ranks import training_ranks
from deep_opt_states.report.record import Work
from deep_opt_states.report.reporter import UpdateReport
from deep_opt_states.runtime.accounting import Ledger
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.exposure import Exposure
from deep_opt_states.runtime.staging import Staging
from deep_opt_states.runtime.state import Split, SubGroupState
from deep_opt_states.runtime.state_memory import StateMemory, widths_of
from deep_opt_states.zero.internals.agreement import agree
from deep_opt_states.zero.internals.compat import forget_gradient_buffers, ranges_by_sub_group, sub_groups_of_others
from deep_opt_states.zero.internals.log import say
from deep_opt_states.zero.internals.spans import ActionSpan
from deep_opt_states.zero.start.core_share import share_cores
from deep_opt_states.zero.start.devices import AcceleratorChoice
from deep_opt_states.zero.start.host_memory import HostRoom, SharingRanks, check_locking, check_room
from deep_opt_states.zero.start.planning import Intention, intend
from deep_opt_states.zero.start.reporting import Training, describe
from deep_opt_states.zero.step.adaptive_schedule import AdaptiveSchedule
from deep_opt_states.zero.step.buckets import Buckets
from deep_opt_states.zero.step.gathers import Gathers
from deep_opt_states.zero.step.gradients import Gradients, Home
from deep_opt_states.zero.step.norms import Norms
from deep_opt_states.zero.step.readers import Guarded, lent
from deep_opt_states.zero.step.update import Update
from perf_model.prediction.memory import staging_numel
from perf_model.prediction.memory_summary import reserved_in_all
from perf_model.schedule.host_layout import Widths
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload

MOMENTS = ("exp_avg", "exp_avg_sq")


class DeepOptimizerStates_Stage3(DeepSpeedZeroOptimizer_Stage3):
    """Stock's optimizer, whose fp32 states are created where the plan has them. Constructing one is a collective.

    Raises ``ConfigError`` or ``Unsupported`` for a placement that this model or accelerator cannot have,
    ``ProfileError`` for a profile that cannot be used, ``HostMemoryError`` where the host has no room for the states,
    ``RanksDisagree`` if the ranks' plans differ.
    """

    device: Any
    plan: UpdatePlan
    ledger: Ledger
    """What this plugin has reserved."""
    report: UpdateReport

    _update: Update

    # What may be under way ends before anybody else sees what it works on. There is none while stock constructs.

    def _finish(self) -> None:
        if "_update" in vars(self):
            self._update.finish()

    def _drain(self) -> None:
        if "_update" in vars(self):
            self._update.drain()

    def _get_state(self) -> Any:
        self._drain()
        return super()._get_state()

    fp16_partitioned_groups_flat = Guarded(_finish)
    fp32_partitioned_groups_flat = Guarded(_drain)
    state = property(_get_state, DeepSpeedZeroOptimizer_Stage3._set_state)

    def __init__(
        self, config: Config, accelerator: AcceleratorChoice, training: Training, *args: Any, **kwargs: Any
    ) -> None:
        self._config = config
        self._accelerator = accelerator
        self._training = training
        self._reserved = ExitStack()
        """What gives back all that ``_prepare`` has taken of the process, the last taken first."""
        try:
            super().__init__(*args, **kwargs)
        except BaseException:
            self._reserved.close()
            raise
        say(self._intention.at_start())

    # Construction, in the order in which stock's constructor calls these

    def _configure_offloading(self, *args: Any) -> None:
        super()._configure_offloading(*args)
        # The states are page-locked as one slab, and stock's gradient buffers take no memory.
        self.offload_optimizer_pin_memory = False

    def _create_fp32_partitions(self) -> None:
        """Stock would convert the parameters to tensors of their own: here they are, at once, where they stay."""
        share = share_cores(self._config, self._accelerator)
        workload = Workload.of([param.numel() for param in self.fp16_partitioned_groups_flat])
        intention = intend(
            self._config, workload, self._accelerator, self._widths, share, params_on_host=self._params_on_host
        )
        self.plan, self._intention = intention.plan, intention
        ranks = SharingRanks.of(training_ranks())
        # Each of the ranks, before any of them takes memory that another would find missing.
        agree(lambda: self._check_room(intention.plan, ranks), lambda _: "has room")
        # Once all have looked: what one locks to try it is missing from what another finds available.
        agree(lambda: self._check_locking(intention.plan), lambda _: "may lock its states")
        choice = agree(lambda: self._choose_adam(intention.plan, share), lambda _: "has an Adam")
        # The fallback would update parts with other bits. A rank that has to take it keeps the others from going on,
        # too: what goes on decides which collectives forward calls.
        self._defers = all(training_ranks().gather(self._config.overlap_forward and choice.arithmetic is not None))
        agree(lambda: self._prepare(intention.plan, share), lambda _: "prepared")
        self.report = self._make_report(intention)
        self._update = Update(
            self._executor,
            self._exposure,
            defers=self._defers,
            finished=lambda phases, timeline: self.report.updated(phases, timeline),
        )
        # Stock looks there for where a sub-group is; and has its optimizer without parameters between steps.
        self.subgroup_to_device = dict.fromkeys(range(len(self._states)), "cpu")
        for param_group in self.optimizer.param_groups:
            param_group["params"] = []

    def _make_report(self, intention: Intention) -> UpdateReport:
        plan, widths = intention.plan, self._widths
        work = Work(
            numel=plan.workload.numel,
            gpu_share=1 - plan.numel(Placement.CPU) / max(1, plan.workload.numel),
            numels=[sum(part.numel for part in split.rest) for split in self._splits],
            param_bytes=widths.param,
        )
        outlets = self._training.outlets(self._config, describe(plan, self.ledger)) if dist.get_rank() == 0 else []
        planned = f"{intention.at_end(widths)}\n  in all: {reserved_in_all(self.ledger.reserved)}"
        return UpdateReport(work, intention.predict, outlets, self._training.progress, say, planned)

    @property
    def _widths(self) -> Widths:
        return widths_of(
            self.fp16_partitioned_groups_flat[0],
            self.gradient_accumulation_dtype,
            self._accelerator.device,
            params_on_host=self._params_on_host,
        )

    @property
    def _params_on_host(self) -> bool:
        """Return whether the model's partitions are in page-locked host memory beside an accelerator with its own."""
        return bool(self.offload_param) and not self._accelerator.device.shares_host_memory

    def _check_room(self, plan: UpdatePlan, ranks: SharingRanks) -> None:
        check_room(self._widths.slab_bytes(plan), plan.workload.numel, ranks, HostRoom.here())

    def _check_locking(self, plan: UpdatePlan) -> None:
        # Not on the ledger: it is given back.
        device, limit_bytes = self._accelerator.device, machine.memlock_limit_bytes()
        check_locking(self._widths.slab_bytes(plan), plan.workload.numel, device, limit_bytes)

    def _choose_adam(self, plan: UpdatePlan, share: CoreShare) -> Choice:
        choice = cpu_adam(
            len(plan.placements),
            self.optimizer.defaults["betas"],
            adamw=self.optimizer.adam_w_mode,
            num_threads=share.threads,
            cores=share.cores,
        )
        if choice.why:
            say(choice.why)
        self._adam = choice.kernel
        self._reserved.callback(self._adam.close)
        return choice

    def _prepare(self, plan: UpdatePlan, share: CoreShare) -> None:
        # Before memory is touched, which then lies near these cores, and before the worker is started.
        if share.launch_cores:
            self._reserved.callback(LaunchBinding(share.launch_cores).release)
        device = self.ledger = Ledger(self._accelerator.device)
        self._memory = StateMemory.reserve(
            plan,
            self.fp16_partitioned_groups_flat,
            self.gradient_accumulation_dtype,
            device,
            params_on_host=self._params_on_host,
        )
        self._reserved.callback(self._memory.close)
        self._states = self._memory.states
        self._masters: list[torch.Tensor] = []
        self._gradients = Gradients(self, self._homes(plan, device), self._staging(plan, device))
        # Before the memory that gradients are copied to: it waits for what is in flight.
        self._reserved.callback(self._gradients.close)
        device_adam = self._accelerator.device_adam(
            plan,
            self._adam,
            self.optimizer,
            self.gradient_accumulation_dtype,
            self.fp16_partitioned_groups_flat[0].dtype,
        )
        self._kernels = [self._adam]
        # One and the same where slots are host memory.
        if device_adam is not None and device_adam is not self._adam:
            self._reserved.callback(device_adam.close)
            self._kernels.append(device_adam)
        first = ranges_by_sub_group(self) if self._defers else [[] for _ in self._states]
        self._splits = [Split.of(state.numel, ranges) for state, ranges in zip(self._states, first, strict=True)]
        self._executor = Executor(
            plan.schedule, self._states, device, self._adam, device_adam, splits=self._splits, span=ActionSpan
        )
        self._reserved.callback(self._executor.close)
        self._executor.touch(
            [state for state, its in zip(self._states, plan.placements, strict=True) if its is Placement.CPU]
        )
        # One at the step, one before backward, and one for each action that is issued in between. A sub-group is waited
        # for by the stream that gathers it ahead, then by the stream that computes for that one, and by itself.
        max_intervals = 2 + len(plan.schedule.actions) + 3 * len(self._states)
        self._exposure = Exposure(device, max_intervals)
        for sub_group_id, state in enumerate(self._states):
            self._take_over(sub_group_id, state)
        self._memory.lock()
        self._steps: list[AdamStep] = []
        self._norms = Norms(self)
        self._stepped = False
        self._grad_scale = 1.0

    def _homes(self, plan: UpdatePlan, device: Ledger) -> list[Home]:
        """Sums over micro-batches stay on the accelerator, also of what the CPU updates, if it has room for them."""
        sums_stay = self.gradient_accumulation_steps > 1 and self._accelerator.has_room_for_sums(
            plan, self._widths.grad, self._config.gpu_memory_gb
        )
        homes = []
        for state, placement in zip(self._states, plan.placements, strict=True):
            accumulator = None
            if sums_stay and placement is Placement.CPU:
                # What pads a partition is never written, and counts in the norm.
                accumulator = device.empty(state.numel, self.gradient_accumulation_dtype).zero_()
            homes.append(Home(grad=state.grad, accumulator=accumulator))
        return homes

    def _staging(self, plan: UpdatePlan, device: Ledger) -> Staging | None:
        """Return how gradients get to host memory; None where none go there, or where the accelerator shares it."""
        dtype = self.gradient_accumulation_dtype
        longest = max(param.partition_numel() for group in self.fp16_groups for param in group)
        numel = staging_numel(plan, dtype.itemsize, longest)
        return None if numel == 0 or device.shares_host_memory else Staging(device, numel, dtype)

    def _take_over(self, sub_group_id: int, state: SubGroupState) -> None:
        state.master.copy_(self.fp16_partitioned_groups_flat[sub_group_id])
        # The optimizer's state is keyed by this tensor object: its data may move, the object stays.
        master: Any = state.master.data
        ds_ids = self.fp16_partitioned_groups_flat_id[sub_group_id]
        master.ds_id = f"{ds_ids[0]}_{ds_ids[-1]}"
        master.requires_grad = True
        self.fp32_partitioned_groups_flat.append(master)
        self._masters.append(master)
        # Stock would create them, unpinned, at the first step.
        moments = {"exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
        self.optimizer.state[master] = {"step": 0, **moments}

    def initialize_optimizer_states(self) -> None:
        """Stock makes fp32 buffers for gradients here."""

    def _setup_for_real_optimizer(self) -> None:
        # And here a buffer in which it sums them, of zeros: on the device that has no memory.
        device, self.device = self.device, torch.device("meta")
        try:
            super()._setup_for_real_optimizer()
        finally:
            self.device = device
        forget_gradient_buffers(self)
        self._gathers = Gathers(self.module, self._get_param_coordinator(), self._update, sub_groups_of_others(self))
        self._reserved.callback(self._gathers.release)
        first_uses = self._gathers.first_uses if self._defers else None
        headroom = self._accelerator.headroom(self.plan, self._config)
        self._schedule = AdaptiveSchedule(self.plan, self._executor, headroom, first_uses)

    # Backward

    def create_reduce_and_remove_grad_hooks(self) -> None:
        super().create_reduce_and_remove_grad_hooks()
        self._buckets = Buckets(self)

    def reduce_independent_p_g_buckets_and_remove_grads(self, param: Any) -> None:
        if self._buckets.has(param):
            # Autograd has added to it where it is. Stock would list it twice, and fail by an assertion.
            self._buckets.added_to()
        else:
            super().reduce_independent_p_g_buckets_and_remove_grads(param)
            self._buckets.note(param)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._gradients.abandon_window()

    def backward_prologue(self) -> None:
        """Gradients take the place of those that the update reads."""
        # The caller may have written to partitions since forward, which backward gathers again.
        self._gathers.order_after_caller()
        self._update.end()
        if self._stepped:
            self._stepped = False
            for sub_group_id, state in enumerate(self._states):
                # What users had set was put together in memory that nobody has planned for.
                state.grad = self._gradients.home_of(sub_group_id)
            self._schedule.adapt()
            self.plan = self._schedule.plan
        super().backward_prologue()

    def partition_grads(self, params_to_release: Any, grad_partitions: Any) -> Any:
        # Backward may have been entered by another door.
        self._update.end()
        self._buckets.reduced(params_to_release)
        self._gradients.reduced(params_to_release, grad_partitions)
        if self._config.overlap_backward and self.is_gradient_accumulation_boundary():
            self._update.prefetch()

    def _finalize_offload_gradient_accumulation(self) -> None:
        self._gradients.finish_window()

    def set_fp32_grad_for_param(self, value: Any, param: Any) -> None:
        super().set_fp32_grad_for_param(value, param)
        self._gradients.set_by_user([param])

    def set_local_grad_for_param(self, value: Any, param: Any) -> None:
        super().set_local_grad_for_param(value, param)
        self._gradients.set_by_user([param])

    def update_fp32_grad_for_param_vectorized(self, update_func: Any, param_list: Any) -> None:
        """``update_func(gradient, param)``, fp32 and of the parameter's shape, gives its new gradient."""
        params = [param for param in param_list if param.requires_grad]
        # Stock's order, which is that of the collectives: sub-groups as they first appear.
        by_sub_group: dict[int, list[Any]] = {}
        for param in params:
            by_sub_group.setdefault(self.grad_position[self.get_param_id(param)][0], []).append(param)
        for param in (param for group in by_sub_group.values() for param in group):
            partition, _ = self._get_fp32_grad_state_partition(param, release_swap_buffers=False)
            whole = update_func(self._fp32_state_allgather(param, partition), param).flatten()
            mine = whole.narrow(0, partition.numel() * self._get_param_partition_rank(param), partition.numel())
            partition.copy_(mine)
        self._gradients.set_by_user(params)

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, torch.Tensor]]:
        self._wait_for_reduction()
        return {
            sub_group_id: {index: self._gradients.in_fp32(param) for index, param in enumerate(group)}
            for sub_group_id, group in enumerate(self.fp16_groups)
        }

    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: bool) -> tuple[torch.Tensor, int]:
        self._wait_for_reduction()
        # Who releases at once only reads; who does not is about to write.
        partition = self._gradients.read(param) if release_swap_buffers else self._gradients.in_fp32(param)
        return partition, self.grad_position[self.get_param_id(param)][0]

    def _wait_for_reduction(self) -> None:
        if not get_accelerator().resolves_data_dependency():
            self.reduce_and_partition_stream.synchronize()
            self._gradients.wait()

    # The hooks of step(), in the order in which it calls them

    def _pre_step(self) -> None:
        self._update.settle()
        # Before super() forgets which parameters were reduced in this window.
        self._gradients.complete_window()
        # For the norm, if it is taken of them, and for the update, which waits for this stream.
        self._gradients.arrive()
        self._steps.clear()
        self._norms.forget()
        super()._pre_step()
        # Only now: the window of a refused step is over, too, and must not be added to the next one.
        self._update.refuse_torn()

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """A norm is finite if, and only if, all that it is taken of is and its square can be told from infinity.

        Where it cannot, stock finds no overflow here, and the infinite norm afterwards: it skips the step all the same.
        """
        if not partition_gradients:
            return super().has_overflow(partition_gradients)
        # Backward has waited for the reduction by its end.
        return self._norms.overflow()

    def _get_norm_groups(self) -> list[torch.Tensor]:
        """Stock's sums and roots, with one look at their results instead of two for each sub-group."""
        return self._norms.of_sub_groups() if self._norms.are_of_data_parallel_ranks else super()._get_norm_groups()

    def _loss_scale_update_and_overflow_cleanup(self) -> bool:
        overflow = bool(super()._loss_scale_update_and_overflow_cleanup())
        if overflow:
            # This step updates nothing, and the next one would find DeepSpeed's count of steps to be another.
            self._update.report()
        return overflow

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
        state = self.optimizer.state[self._masters[sub_group_id]]
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
        """The schedule writes the 16-bit parameters. A partition that a caller had put elsewhere is theirs again."""
        self._unflatten_partitioned_parameters(sub_group_id)

    def _release_sub_group(self, sub_group_id: int, timer_names: Any) -> None:
        super()._release_sub_group(sub_group_id, timer_names)
        if sub_group_id == len(self.fp16_groups) - 1:
            self._decided()

    def _decided(self) -> None:
        for sub_group_id, state in enumerate(self._states):
            state.use_param(self.fp16_partitioned_groups_flat[sub_group_id])
            state.grad = self._gradients.of_sub_group(sub_group_id)
        # The scheduler and the user may change the numbers of the next step while these are used.
        steps = tuple(self._steps)
        self._stepped = True
        self._update.run(steps)
        for sub_group_id, step in enumerate(steps):
            self.optimizer.state[self._masters[sub_group_id]]["step"] = step.step
            self._gradients.scaled_later(sub_group_id, step.grad_scale)
        # Its param groups are empty here, so this updates nothing; but PyTorch's LR schedulers count the calls.
        self.optimizer.step()

    def get_full_hp_param(self, *args: Any, **kwargs: Any) -> Any:
        self._settle()
        return super().get_full_hp_param(*args, **kwargs)

    def set_full_hp_param(self, *args: Any, **kwargs: Any) -> None:
        self._settle()
        super().set_full_hp_param(*args, **kwargs)

    def _settle(self) -> None:
        """Every rank is here: none is to find the states torn alone, and leave the others waiting."""
        self._update.settle()
        self._update.refuse_torn()

    def _get_fp32_opt_state_partition(self, *args: Any, **kwargs: Any) -> Any:
        self._update.drain()
        self._update.refuse_torn()
        return super()._get_fp32_opt_state_partition(*args, **kwargs)

    def _post_step(self, timer_names: Any) -> None:
        super()._post_step(timer_names)
        # A module that is called by itself, and not through the engine, has no hook that would ask for this.
        self._gathers.order_after_caller()
        # Only now: with several ranks, stock waits for the whole device when it has gathered the persistent parameters.
        self._update.advance()
        # Only after that, so that the accelerator works while the host reports the last update. That was over before
        # this one began, so that nobody waits for it here, and DeepSpeed's count of steps is still that of its step.
        self._update.report_previous()

    def offload_states(self, include: Any = None, **kwargs: Any) -> None:
        """Gradients are where they are needed: there is nothing to move for ``lp_grads``."""
        if include is not None:
            include = [its for its in include if its is not OffloadStateTypeEnum.lp_grads]
        self._drain()
        super().offload_states(include=include, **kwargs)

    # Checkpoints

    def checkpoint_event_prologue(self) -> None:
        """Every rank is here, before a load and before a save."""
        self._update.settle()
        # A load changes the count of steps.
        self._update.report()
        super().checkpoint_event_prologue()

    def _rigid_state_dict(self) -> Any:
        self._update.drain()
        self._update.refuse_torn()
        saved = super()._rigid_state_dict()
        saved[FP32_FLAT_GROUPS] = [lent(master) for master in saved[FP32_FLAT_GROUPS]]
        moments = saved[OPTIMIZER_STATE_DICT]["state"]
        for sub_group, state in moments.items():
            moments[sub_group] = {**state, **{key: lent(state[key]) for key in MOMENTS}}
        return saved

    def checkpoint_event_epilogue(self) -> None:
        """Runs before 16-bit weights are written, and after a load, which has restored the states by then."""
        self._update.refuse_torn()
        super().checkpoint_event_epilogue()
        # After a save rank 0 writes next which checkpoint is the latest: not before the others have written theirs.
        dist.barrier()

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
        if self._update.failed:
            # Some op objects have heard of the step that failed, others have not; its norms were not used up.
            for kernel in self._kernels:
                kernel.restart()
            self.reset_cpu_buffers()
            self._update.forget_failure()

    def destroy(self) -> None:
        try:
            self._update.close()
            self.report.close()
            super().destroy()
        finally:
            self._reserved.close()
            # DeepSpeed's hooks on the module keep this object alive; they need not keep its buffers.
            self.optimizer.state.clear()
            self.fp32_partitioned_groups_flat.clear()
            self._masters.clear()
            self._states.clear()
