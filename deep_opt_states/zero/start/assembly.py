"""Build everything that the updates of one engine need: the plan, the memory of the states, and the executor."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from deep_opt_states.config import Config
from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import AdamKernel
from deep_opt_states.device.kernels.choice import ChosenKernel, cpu_adam
from deep_opt_states.host import machine
from deep_opt_states.host.affinity import LaunchBinding
from deep_opt_states.host.cores import CoreShare
from deep_opt_states.profiler.ranks import training_ranks
from deep_opt_states.runtime.accounting import AccountingDevice
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.exposure import Exposure
from deep_opt_states.runtime.staging import Staging
from deep_opt_states.runtime.state import Split, SubGroupState
from deep_opt_states.runtime.state_memory import StateMemory, widths_of
from deep_opt_states.zero.internals.agreement import raise_together
from deep_opt_states.zero.internals.compat import persistent_ranges
from deep_opt_states.zero.internals.log import log_rank_0
from deep_opt_states.zero.internals.spans import ActionSpan
from deep_opt_states.zero.start.core_share import share_cores
from deep_opt_states.zero.start.devices import AcceleratorChoice
from deep_opt_states.zero.start.host_memory import FreeHostMemory, SharingRanks, check_free_memory, check_locking
from deep_opt_states.zero.start.planning import PlannedRun, make_plan
from deep_opt_states.zero.step.gradients import GradientBuffer, Gradients
from perf_model.prediction.memory import staging_numel
from perf_model.schedule.host_layout import Widths
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """Everything that the updates of one engine run on, built for one plan.

    The ``ExitStack`` that was passed to ``assemble`` gives all of it back.
    """

    planned: PlannedRun
    """The plan, with the function that predicts how long an update takes."""
    widths: Widths
    """Bytes per parameter of the model's parameters and gradients."""
    device: AccountingDevice
    """The device on which all memory was reserved, with a record of each reservation."""
    states: list[SubGroupState]
    """The fp32 states of each sub-group, each where the plan places it."""
    masters: list[torch.Tensor]
    """The fp32 parameters of each sub-group. The optimizer's state is keyed by these tensor objects: their data may
    move (``offload_states``), the objects stay."""
    gradients: Gradients
    kernels: tuple[AdamKernel, ...]
    """The kernels that update: the CPU's first, then the accelerator's if it has one of its own."""
    splits: list[Split]
    """The ranges of each sub-group that are updated before ``step()`` returns, and the rest."""
    defers: bool
    """Whether the rest may be updated while the next forward runs; the same on every rank."""
    executor: Executor
    exposure: Exposure


def assemble(optimizer: Any, config: Config, accelerator: AcceleratorChoice, resources: ExitStack) -> Assembly:
    """Plan the updates of ``optimizer`` and build everything for them. A collective over all ranks.

    ``optimizer`` is stock's stage-3 optimizer, whose sub-groups exist and whose fp32 partitions do not. ``resources``
    receives the callbacks that give back what is taken here. If one rank fails, all ranks raise; the caller then
    closes ``resources`` on each of them.

    Raise ``ConfigError`` or ``Unsupported`` for a placement that this model or accelerator does not allow,
    ``ProfileError`` for a profile that cannot be used, ``HostMemoryError`` if the states do not fit into host memory,
    and ``RanksDisagree`` if the ranks' plans differ or another rank fails.
    """
    share = share_cores(config, accelerator)
    params = optimizer.fp16_partitioned_groups_flat
    params_on_host = _params_on_host(optimizer, accelerator.device)
    widths = widths_of(
        params[0], optimizer.gradient_accumulation_dtype, accelerator.device, params_on_host=params_on_host
    )
    workload = Workload.from_numels([param.numel() for param in params])
    planned = make_plan(config, workload, accelerator, widths, share, params_on_host=params_on_host)
    plan = planned.plan
    ranks = SharingRanks.gather(training_ranks())
    # Every rank checks before any rank allocates memory that another rank's check would then find missing.
    raise_together(
        lambda: check_free_memory(widths.slab_bytes(plan), plan.workload.numel, ranks, FreeHostMemory.measure())
    )
    # After every rank has checked: memory that one rank locks as a trial is missing from what another finds available.
    raise_together(lambda: _check_locking(plan, widths, accelerator))
    choice = raise_together(lambda: _choose_host_adam(optimizer, plan, share, resources))
    # The fallback kernel cannot update a part of a sub-group with the same bits. Deferring decides which collectives
    # forward calls, so one rank that has to use the fallback keeps all ranks from deferring.
    defers = all(training_ranks().gather(config.overlap_forward and choice.arithmetic is not None))

    def build() -> Assembly:
        return _build(
            optimizer,
            config,
            accelerator,
            resources,
            planned=planned,
            widths=widths,
            share=share,
            host_adam=choice.kernel,
            defers=defers,
            params_on_host=params_on_host,
        )

    return raise_together(build)


def _build(
    optimizer: Any,
    config: Config,
    accelerator: AcceleratorChoice,
    resources: ExitStack,
    *,
    planned: PlannedRun,
    widths: Widths,
    share: CoreShare,
    host_adam: AdamKernel,
    defers: bool,
    params_on_host: bool,
) -> Assembly:
    plan, params = planned.plan, optimizer.fp16_partitioned_groups_flat
    grad_dtype = optimizer.gradient_accumulation_dtype
    # Before any memory is touched, so that it is allocated near these cores, and before the worker starts.
    if share.launch_cores:
        resources.callback(LaunchBinding(share.launch_cores).release)
    device = AccountingDevice(accelerator.device)
    memory = StateMemory.reserve(plan, params, grad_dtype, device, params_on_host=params_on_host)
    resources.callback(memory.close)
    states = memory.states
    gradients = Gradients(
        optimizer,
        _gradient_buffers(optimizer, config, accelerator, plan, widths, states, device),
        _staging(optimizer, plan, device),
    )
    # Closed before ``memory``, which gradients are copied to: closing waits for the copies in flight.
    resources.callback(gradients.close)
    device_adam = accelerator.device_adam(plan, host_adam, optimizer.optimizer, grad_dtype, params[0].dtype)
    kernels = [host_adam]
    # Where slots are host memory, the same kernel updates both.
    if device_adam is not None and device_adam is not host_adam:
        resources.callback(device_adam.close)
        kernels.append(device_adam)
    early_ranges = persistent_ranges(optimizer) if defers else [[] for _ in states]
    splits = [Split.create(state.numel, ranges) for state, ranges in zip(states, early_ranges, strict=True)]
    executor = Executor(plan.schedule, states, device, host_adam, device_adam, splits=splits, span=ActionSpan)
    resources.callback(executor.close)
    executor.touch(
        [state for state, placement in zip(states, plan.placements, strict=True) if placement is Placement.CPU]
    )
    # One interval at the step, one before backward, and one for each action that is issued in between. Each sub-group
    # is waited for by the stream that gathers it ahead, by the computing stream for that stream, and by the computing
    # stream itself.
    exposure = Exposure(device, max_intervals=2 + len(plan.schedule.actions) + 3 * len(states))
    masters = [_init_master(optimizer, sub_group_id, state) for sub_group_id, state in enumerate(states)]
    # After the fp32 parameters were written: the slab is registered once its pages are touched.
    memory.lock()
    return Assembly(
        planned=planned,
        widths=widths,
        device=device,
        states=states,
        masters=masters,
        gradients=gradients,
        kernels=tuple(kernels),
        splits=splits,
        defers=defers,
        executor=executor,
        exposure=exposure,
    )


def _params_on_host(optimizer: Any, device: Device[Any]) -> bool:
    """Return whether the model's partitions are in page-locked host memory while ``device`` has its own memory."""
    return bool(optimizer.offload_param) and not device.shares_host_memory


def _check_locking(plan: UpdatePlan, widths: Widths, accelerator: AcceleratorChoice) -> None:
    # On the device itself and not on the ``AccountingDevice``: the memory is given back at once.
    limit_bytes = machine.memlock_limit_bytes()
    check_locking(widths.slab_bytes(plan), plan.workload.numel, accelerator.device, limit_bytes)


def _choose_host_adam(optimizer: Any, plan: UpdatePlan, share: CoreShare, resources: ExitStack) -> ChosenKernel:
    choice = cpu_adam(
        len(plan.placements),
        optimizer.optimizer.defaults["betas"],
        adamw=optimizer.optimizer.adam_w_mode,
        num_threads=share.threads,
        cores=share.cores,
    )
    if choice.why:
        log_rank_0(choice.why)
    resources.callback(choice.kernel.close)
    return choice


def _gradient_buffers(
    optimizer: Any,
    config: Config,
    accelerator: AcceleratorChoice,
    plan: UpdatePlan,
    widths: Widths,
    states: list[SubGroupState],
    device: AccountingDevice,
) -> list[GradientBuffer]:
    """Return where each sub-group's gradients are kept.

    If the accelerator has enough free memory, sums over micro-batches stay there, also for sub-groups that the CPU
    updates.
    """
    sums_stay = optimizer.gradient_accumulation_steps > 1 and accelerator.fits_accumulators(
        plan, widths.grad, config.gpu_memory_gb
    )
    buffers = []
    for state, placement in zip(states, plan.placements, strict=True):
        accumulator = None
        if sums_stay and placement is Placement.CPU:
            # Padding of a partition is never written, and it counts in the norm: it must be zero.
            accumulator = device.empty(state.numel, optimizer.gradient_accumulation_dtype).zero_()
        buffers.append(GradientBuffer(grad=state.grad, device_accumulator=accumulator))
    return buffers


def _staging(optimizer: Any, plan: UpdatePlan, device: AccountingDevice) -> Staging | None:
    """Return the buffers through which gradients are copied to host memory.

    Return None if no gradient is copied there, or if the accelerator shares host memory.
    """
    dtype = optimizer.gradient_accumulation_dtype
    longest = max(param.partition_numel() for group in optimizer.fp16_groups for param in group)
    numel = staging_numel(plan, dtype.itemsize, longest)
    return None if numel == 0 or device.shares_host_memory else Staging(device, numel, dtype)


def _init_master(optimizer: Any, sub_group_id: int, state: SubGroupState) -> torch.Tensor:
    """Copy the model's parameters into the sub-group's fp32 parameters, and return these as DeepSpeed expects them."""
    state.master.copy_(optimizer.fp16_partitioned_groups_flat[sub_group_id])
    master: Any = state.master.data
    ds_ids = optimizer.fp16_partitioned_groups_flat_id[sub_group_id]
    master.ds_id = f"{ds_ids[0]}_{ds_ids[-1]}"
    master.requires_grad = True
    initialized: torch.Tensor = master
    return initialized
