"""Build everything that the updates of one engine need: the plan, the memory of the states, and the executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deep_opt_states import log
from deep_opt_states.config import Config, Unsupported
from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import AdamKernel, StateDtypes
from deep_opt_states.device.kernels.choice import ChosenKernel, cpu_adam
from deep_opt_states.host import machine
from deep_opt_states.host.cores import CoreShare, LaunchBinding
from deep_opt_states.names import CONFIG_KEY
from deep_opt_states.profiler.ranks import Ranks
from deep_opt_states.runtime.accounting import AccountingDevice
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.state import UnitState
from deep_opt_states.runtime.state_memory import StateMemory, widths_of
from deep_opt_states.waiting import waiting
from deep_opt_states.zero.internals.agreement import raise_together
from deep_opt_states.zero.internals.compat import masters_dtype, partitions_by_name
from deep_opt_states.zero.internals.spans import ActionSpan
from deep_opt_states.zero.start.devices import AcceleratorChoice
from deep_opt_states.zero.start.disk import choose_states_on_disk
from deep_opt_states.zero.start.node_share import (
    FreeHostMemory,
    SharingRanks,
    check_free_memory,
    check_locking,
    free_share_bytes,
    share_cores,
)
from deep_opt_states.zero.start.planning import PlannedRun, check_even_shards, make_plan
from deep_opt_states.zero.start.refusals import refuse_rules_without_effect
from deep_opt_states.zero.step.exposure import Exposure
from deep_opt_states.zero.step.gpu_memory import GpuBudget
from deep_opt_states.zero.step.gradient_buffers import GradientBuffer
from deep_opt_states.zero.step.gradients import Gradients
from deep_opt_states.zero.step.measured_windows import FIRST_UPDATES, MeasuredWindows
from deep_opt_states.zero.step.running_plan import RunningPlan, reserve
from deep_opt_states.zero.step.staging import Staging
from perf_model.prediction.memory import TrainingSetup, memory_of, staging_numel
from perf_model.schedule.cutting import WHOLE_SUB_GROUPS
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan, place_all
from perf_model.schedule.workload import Partition
from perf_model.units import size


@dataclass(frozen=True, kw_only=True)
class Context:
    """The facts about one engine that do not depend on the plan."""

    optimizer: Any
    accelerator: AcceleratorChoice
    device: AccountingDevice
    setup: TrainingSetup
    budget: GpuBudget | None
    """The accelerator memory for the planner; None if there is none or the config gives the placements."""
    share: CoreShare
    host_adam: AdamKernel
    defers: bool
    """Whether updates may run during the next forward; the same on every rank."""
    free_host_bytes: Callable[[], int]
    """Returns this rank's share of the free host memory, of which the planner may use half for eager units."""

    def gradient_buffers(
        self, plan: UpdatePlan, units: Sequence[UnitState], is_evicted: bool = False
    ) -> list[GradientBuffer]:
        """Return the gradient buffers of the units' ranges, with sums on the accelerator if they fit."""
        accumulates = self.setup.accumulates and not is_evicted
        sums_stay = accumulates and self.accelerator.fits_accumulators(plan, self.setup, self.budget)
        buffers = []
        for unit in units:
            sums = None
            if sums_stay and unit.placement is Placement.CPU:
                # Padding of a partition counts in the norm, and nothing else writes zeros there.
                sums = self.device.empty(unit.length, self.optimizer.gradient_accumulation_dtype).zero_()
            buffers += [
                GradientBuffer(
                    sub_group=part.sub_group,
                    elements=part.elements,
                    grad=part.grad,
                    device_accumulator=None if sums is None else part.of_unit(sums),
                )
                for part in unit.parts
            ]
        return buffers

    def staging(self, plan: UpdatePlan) -> Staging | None:
        """Return the buffers through which gradients are copied to host memory, if any unit may be on the CPU."""
        if self.budget is not None:
            plan = replace(plan, placements=place_all(plan.workload, Placement.CPU))
        longest = max(param.partition_numel() for group in self.optimizer.fp16_groups for param in group)
        grad_dtype = self.optimizer.gradient_accumulation_dtype
        numel = staging_numel(plan, grad_dtype.itemsize, longest)
        return None if numel == 0 or self.device.shares_host_memory else Staging(self.device, numel, grad_dtype)


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """Everything that the updates of one engine run on."""

    context: Context
    planned: PlannedRun
    running: RunningPlan
    masters: list[torch.Tensor]
    """The master weights of each sub-group, by which the optimizer's states are keyed."""


def assemble(optimizer: Any, config: Config, accelerator: AcceleratorChoice, resources: ExitStack) -> Assembly:
    """Plan the updates of ``optimizer`` and build everything for them. This is a collective over all ranks.

    ``resources`` receives the callbacks that release what is reserved here; the caller also closes it after an error.
    Raise ``ConfigError`` or ``Unsupported`` for a placement that is impossible here, ``ProfileError`` for an unusable
    profile, ``HostMemoryError`` if the states do not fit into host memory, ``RanksDisagree`` if another rank fails.
    """
    share = share_cores(config, accelerator)
    sub_groups = partitions_by_name(optimizer)
    check_even_shards(sub_groups)
    trained = [partition.name for partitions in sub_groups for partition in partitions]
    raise_together(lambda: refuse_rules_without_effect(config, optimizer.module, trained))
    choice = raise_together(lambda: _choose_host_adam(optimizer, share, resources))
    config, updates_parts = _with_whole_sub_groups_if_needed(config, choice)
    ranks = SharingRanks.gather(Ranks())
    setup = _setup(optimizer, accelerator.device)
    defers = config.overlap_forward and updates_parts
    if not defers:
        sub_groups = [[replace(partition, is_persistent=False) for partition in group] for group in sub_groups]
    sub_groups = choose_states_on_disk(config, sub_groups, setup.widths, ranks)
    if any(partition.is_on_disk for group in sub_groups for partition in group):
        if config.all_eager:
            log.warn('"eager": true has no effect with states on disk: a second version would need their memory')
        config = config.model_copy(update={"eager": False})
    context = Context(
        optimizer=optimizer,
        accelerator=accelerator,
        device=AccountingDevice(accelerator.device),
        setup=setup,
        budget=raise_together(lambda: accelerator.gpu_budget(config)) if config.may_plan else None,
        share=share,
        host_adam=choice.kernel,
        defers=defers,
        free_host_bytes=partial(free_share_bytes, ranks) if config.plans_eager else lambda: 0,
    )
    if defers:
        _log_overruled(config, sub_groups)
    planned = make_plan(config, sub_groups, setup, accelerator, context.budget, share)
    # Immediately, because the rest of the start prints warnings of other libraries.
    log.info(planned.at_start())
    _check_host_memory(context, planned.plan, ranks)
    folders = [Path(path) for path in config.nvme_paths or []]
    return raise_together(lambda: _build(context, planned, folders, resources))


def _build(context: Context, planned: PlannedRun, disk_folders: Sequence[Path], resources: ExitStack) -> Assembly:
    plan, device, host_adam, optimizer = planned.plan, context.device, context.host_adam, context.optimizer
    # Before memory is touched, so that it is allocated near these cores, and before the worker starts.
    if context.share.launch_cores:
        resources.callback(LaunchBinding(context.share.launch_cores).release)
    memory = StateMemory(
        plan.workload,
        optimizer.fp16_partitioned_groups_flat,
        optimizer.gradient_accumulation_dtype,
        device,
        _state_dtypes(optimizer),
        params_on_host=context.setup.params_on_host,
        disk_folders=disk_folders,
    )
    resources.callback(memory.close)
    here, units = reserve(plan, memory)
    gradients = Gradients(optimizer, context.gradient_buffers(plan, units), context.staging(plan))
    # Closed before ``memory``, which copies may be writing to.
    resources.callback(gradients.close)
    device_adam = context.accelerator.device_adam(plan, context.budget, host_adam, optimizer, _state_dtypes(optimizer))
    if device_adam is not None and device_adam is not host_adam:
        resources.callback(device_adam.close)
    executor = Executor(here.schedule, units, device, host_adam, device_adam, span=ActionSpan)
    resources.callback(executor.close)
    untouched, touched, host = memory.untouched, 0, size(memory_of(plan, context.setup).pinned_bytes)
    numel = max(1, sum(tensors.master.numel() for tensors in untouched))
    with waiting(lambda: f"preparing {host} of host memory, {touched / numel:.0%} of the states touched"):
        for tensors in untouched:
            executor.touch([tensors])
            touched += tensors.master.numel()
        masters = [_init_master(optimizer, index, tensors.master) for index, tensors in enumerate(memory.sub_groups)]
        # Page-locking would place untouched pages near this thread.
        memory.lock()
    # Where the CPU is the accelerator, an update hides nothing, and without a prediction nothing needs the windows.
    needs_windows = planned.predict is not None and not context.accelerator.slots_on_host
    running = RunningPlan(
        plan=plan,
        eager=here.eager,
        memory=memory,
        executor=executor,
        gradients=gradients,
        exposure=Exposure(device),
        windows=MeasuredWindows(device, FIRST_UPDATES if needs_windows else 0, needs_forward=context.defers),
        gradient_buffers=context.gradient_buffers,
    )
    return Assembly(context=context, planned=planned, running=running, masters=masters)


def _setup(optimizer: Any, device: Device[Any]) -> TrainingSetup:
    params_on_host = _params_on_host(optimizer, device)
    param = optimizer.fp16_partitioned_groups_flat[0]
    grad_dtype, dtypes = optimizer.gradient_accumulation_dtype, _state_dtypes(optimizer)
    return TrainingSetup(
        widths=widths_of(param, grad_dtype, device, dtypes, params_on_host=params_on_host),
        accumulates=optimizer.gradient_accumulation_steps > 1,
        params_on_host=params_on_host,
    )


def _state_dtypes(optimizer: Any) -> StateDtypes:
    """Return the dtypes of stock: ``DeepSpeedCPUAdam`` creates moments in fp32, or in the dtype of the masters."""
    master = masters_dtype(optimizer)
    return StateDtypes(master, torch.float32 if optimizer.optimizer.fp32_optimizer_states else master)


def _params_on_host(optimizer: Any, device: Device[Any]) -> bool:
    return bool(optimizer.offload_param) and not device.shares_host_memory


def _choose_host_adam(optimizer: Any, share: CoreShare, resources: ExitStack) -> ChosenKernel:
    choice = cpu_adam(
        len(optimizer.fp16_groups),
        optimizer.optimizer.defaults["betas"],
        adamw=optimizer.optimizer.adam_w_mode,
        num_threads=share.threads,
        cores=share.cores,
        dtypes=_state_dtypes(optimizer),
    )
    if choice.why:
        log.warn_this_rank(choice.why)
    resources.callback(choice.kernel.close)
    return choice


def _with_whole_sub_groups_if_needed(config: Config, choice: ChosenKernel) -> tuple[Config, bool]:
    """Return the config for all ranks, and whether no rank uses the fallback kernel."""
    # The fallback cannot update a part of a sub-group with the same bits, so units are then whole sub-groups.
    if all(Ranks().gather(not choice.why)):
        return config, True
    reason = choice.why or "the log of that rank has the reason"
    if config.rules.rules:
        raise Unsupported(
            f"{CONFIG_KEY}.placement: rules by name divide sub-groups, which needs the plugin's own CPU kernel on "
            f"every rank; found that a rank has to use DeepSpeed's ({reason}).\n"
            f'Remove the cause, or use another "placement", for example "planned".'
        )
    if config.nvme_paths:
        raise Unsupported(
            f'zero_optimization.offload_optimizer.device: must be "cpu" where a rank cannot use the plugin\'s own CPU '
            f'kernel, found "nvme" ({reason}).\nRemove the cause, or set "device": "cpu".'
        )
    return config.model_copy(update={"unit_size": WHOLE_SUB_GROUPS, "eager": False}), False


def _log_overruled(config: Config, sub_groups: Sequence[Sequence[Partition]]) -> None:
    persistent = [partition.name for group in sub_groups for partition in group if partition.is_persistent]
    overruled = [name for name in persistent if config.rules.placement_of(name) not in (None, Placement.CPU)]
    if overruled:
        log.info(
            f"rules do not apply to persistent parameters, which the CPU updates before step() returns: "
            f"{len(overruled)} such as {overruled[0]}"
        )


def _check_host_memory(context: Context, plan: UpdatePlan, ranks: SharingRanks) -> None:
    """Raise ``HostMemoryError`` on every rank if the states of all ranks do not fit, or cannot be page-locked."""
    memory, numel = memory_of(plan, context.setup), plan.workload.numel
    slab_bytes, device = memory.pinned_bytes, context.accelerator.device
    # Every rank checks before any allocates memory, also for the trial below, that another would then find missing.
    raise_together(lambda: check_free_memory(slab_bytes, numel, ranks, FreeHostMemory.measure(), memory.eager_bytes))
    raise_together(lambda: check_locking(slab_bytes, numel, device, machine.memlock_limit_bytes()))


def _init_master(optimizer: Any, sub_group_id: int, states_master: torch.Tensor) -> Any:
    """Copy the model's parameters into the sub-group's masters, and return these as DeepSpeed expects them."""
    states_master.copy_(optimizer.fp16_partitioned_groups_flat[sub_group_id])
    master: Any = states_master.data
    ds_ids = optimizer.fp16_partitioned_groups_flat_id[sub_group_id]
    master.ds_id = f"{ds_ids[0]}_{ds_ids[-1]}"
    master.requires_grad = True
    return master
