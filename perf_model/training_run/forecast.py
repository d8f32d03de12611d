"""Forecast a training run with the best plan and with the alternatives: stock DeepSpeed, Twin-Flow and simple rules."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from perf_model.plan_request import PlanRequest
from perf_model.planner import PlannedUpdate
from perf_model.prediction.cost import CostModel, stock_speed_up
from perf_model.prediction.hardware import HardwareProfile
from perf_model.prediction.memory import (
    GPU_MARGIN_BYTES,
    Budgets,
    DoesNotFit,
    MemoryUse,
    excess_of,
    memory_of,
    reserved_by_stock,
)
from perf_model.prediction.overlap_windows import AddedTime, Windows
from perf_model.prediction.simulate import simulate
from perf_model.prediction.slowdown import Slowdown
from perf_model.prediction.work_bound import Bound, work_bound
from perf_model.schedule.action import ActionKind
from perf_model.schedule.cutting import place_on_disk
from perf_model.schedule.lowering import forward_order, serial_schedule
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import DEFAULT_NUM_SLOTS, UpdatePlan, place_all, place_by_stride
from perf_model.schedule.workload import Workload
from perf_model.training_run.job import Job
from perf_model.training_run.micro_batch import NO_OVERHEADS, PARAM_BYTES, GradientPath, Network, Overheads, PhaseRates
from perf_model.training_run.training_memory import TrainingMemory, reserved_host_bytes
from perf_model.units import DIGITS, size, size_of

LIMITS_TO_LIFT = {
    "gpu_bytes": "GPU memory: raise --gpu-memory-gb, or lower --gpu-memory-margin-gb.",
    "host_bytes": "Host memory, which includes the system and the processes: raise --host-memory-gb, or keep states on "
    "disks: --nvme.",
    "pinned_bytes": "Pinned memory: raise --pinned-memory-gb.",
}


@dataclass(frozen=True, kw_only=True)
class PredictedIteration:
    """The predicted seconds of one training iteration with all of its micro-batches.

    ``update_s`` includes exposed and hidden time. Forward includes what it and backward lose to the update.
    ``fixed_s`` is in none of the phases. ``mfu`` is None if the peak is unknown.
    """

    forward_s: float
    backward_s: float
    update_s: float
    exposed_update_s: float
    fixed_s: float
    tokens_per_s: float
    mfu: float | None

    @property
    def iteration_s(self) -> float:
        """Return the seconds of the iteration, with only the exposed time of the update."""
        return self.forward_s + self.backward_s + self.exposed_update_s + self.fixed_s

    def to_json_dict(self) -> dict[str, float | None]:
        return {**asdict(self), "iteration_s": self.iteration_s}


@dataclass(frozen=True, kw_only=True)
class Infeasible:
    """The reason why an alternative cannot run."""

    reason: str


Outcome = PredictedIteration | Infeasible


@dataclass(frozen=True, kw_only=True)
class MemoryLimits:
    """Memory in bytes: ``gpu`` per GPU, ``host`` per node, ``pinned`` and ``eager``, for eager units, per rank.

    None is unlimited. As in training, only units that rules place on the GPU may use ``gpu_margin``, and ``eager`` is
    half of the host memory that all other states leave, if it is None and ``host`` is known.
    """

    gpu: int | None
    host: int | None
    pinned: int | None = None
    gpu_margin: int = GPU_MARGIN_BYTES
    eager: int | None = 0


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """The phases that may overlap with the update."""

    backward: bool = True
    forward: bool = True


class Forecast:
    """The predicted iteration of a job on one machine with the best plan, and with the alternatives.

    The windows of the update are the last backward of a step and the first forward of the next one.
    """

    def __init__(
        self, job: Job, profile: HardwareProfile, limits: MemoryLimits, overlap: Overlap, unit_sizes: Iterable[int]
    ) -> None:
        """Find the best plan. Raise ``DoesNotFit``, with remedies, or ``ProfileError`` if the profile lacks a rate."""
        self.job, self._profile, self._limits = job, profile, limits
        self._copied = replace(job.setup.widths, publishes=not job.offload_param)
        self._has_gpu = profile.has_accelerator
        self.overheads = Overheads.from_profile(profile)
        self.rates = PhaseRates.from_profile(profile, job.ranks_on_node, self.overheads.of_plugin)
        self._training = TrainingMemory(job)
        self.reserved_host_bytes = reserved_host_bytes(job.ranks_on_node, has_gpu=self._has_gpu)
        gpu = None if limits.gpu is None else limits.gpu - limits.gpu_margin
        host = None
        if limits.host is not None:
            host = (limits.host - self.reserved_host_bytes) // job.ranks_on_node - job.offloaded_host_bytes
        self._training_limit = gpu if self._has_gpu else host
        left = None if self._training_limit is None else self._training_limit - self._bytes_of(self._training)
        self.cost = CostModel.from_profile(profile, self._copied)
        sub_groups, widths = job.sub_groups, replace(job.setup.widths, publishes=self._has_gpu)
        # Training refuses fp32 moments of bf16 masters on disk.
        if job.disk is not None and host is not None and widths.master == widths.moment:
            in_memory = host if self._has_gpu else max(0, host - self._training.allocated_bytes)
            sub_groups = place_on_disk(sub_groups, widths, in_memory, job.rules.placement_of)
            self.cost = self.cost.with_disk(job.disk, widths)
        setup, self.windows = job.setup, Windows()
        if self._has_gpu:
            self.windows = Windows(
                backward_s=job.work.backward_s(self.rates) if overlap.backward else 0.0,
                forward_s=job.work.forward_s(self.rates) if overlap.forward else 0.0,
                slowdown=Slowdown(cpu=self.overheads.cpu_slowdown if overlap.backward or overlap.forward else 0.0),
            )
            if left is not None and left >= 0:
                # PyTorch gives up its cache if training needs the memory, but a plan takes its memory for good.
                left = max(0, left + limits.gpu_margin - self._training.cache_bytes)
            available = Budgets(
                gpu_bytes=left, host_bytes=host, pinned_bytes=limits.pinned, eager_bytes=self._eager_bytes(host)
            )
        else:
            # A CPU that trains updates the parameters in place, and not while it trains.
            setup = replace(setup, widths=replace(setup.widths, publishes=False))
            self.cost = self.cost.without_accelerator()
            available = Budgets(gpu_bytes=0, host_bytes=left, pinned_bytes=limits.pinned)
        request = self._of_all_memory = PlanRequest(
            sub_groups=sub_groups,
            unit_sizes=tuple(unit_sizes),
            cost=self.cost,
            budgets=available,
            windows=self.windows,
            setup=setup,
            rules=job.rules,
            uses=job.shape.uses(),
        )
        self.budgets = available
        if (gpu_bytes := available.gpu_bytes) is not None:
            # Only units that rules place may use the margin.
            gpu_bytes = min(gpu_bytes, max(0, request.fixed_bytes, gpu_bytes - limits.gpu_margin))
            self.budgets = replace(available, gpu_bytes=gpu_bytes)
            if gpu_bytes < request.fixed_bytes:
                # As in training, rules by name do not ask for the sums of other units on the accelerator.
                request = _without_sums(request)
        self.request = replace(request, budgets=self.budgets)
        try:
            self.planned = self.request.plan()
        except DoesNotFit as error:
            raise DoesNotFit(error.missing, self._remedy(error.missing)) from None
        self.predicted = self._with_update(self.planned, self.request)

    def _eager_bytes(self, host_bytes: int | None) -> int:
        if self._limits.eager is not None:
            return self._limits.eager
        if host_bytes is None or not self.job.rules.may_plan:
            return 0
        numel = sum(partition.numel for group in self.job.sub_groups for partition in group)
        states_bytes = sum(self.job.setup.widths.on_host.values()) * numel
        return max(0, host_bytes - states_bytes) // 2

    def _remedy(self, missing: Iterable[str]) -> str:
        limit, training_bytes, alone = self._training_limit, self._bytes_of(self._training), ""
        if limit is not None and limit < training_bytes:
            alone = (
                f"\nWithout the optimizer, training takes {size_of(training_bytes, max(0, limit))} of "
                f"{'GPU memory less the margin' if self._has_gpu else 'host memory per rank'}, "
                f"{size(self._training.activation_bytes, DIGITS)} of them for activations."
            )
        return f"{' '.join(LIMITS_TO_LIFT[name] for name in missing)}{alone}"

    def _bytes_of(self, training: TrainingMemory) -> int:
        return training.gpu_bytes if self._has_gpu else training.allocated_bytes

    def _with_update(self, update: PlannedUpdate, request: PlanRequest) -> PredictedIteration:
        path = GradientPath.for_plan(update.plan, request.setup)
        return self._iteration(self.rates, update.update_s, update.added, path)

    def _iteration(
        self, rates: PhaseRates, update_s: float, added: AddedTime, path: GradientPath, job: Job | None = None
    ) -> PredictedIteration:
        """Return the iteration of ``job``. Each backward takes at least as long as the copies of its gradients."""
        job, peak = job or self.job, self._profile.gpu_peak_flops
        computed_s = job.work.backward_s(rates)
        last_s, earlier_s = (max(computed_s, copies_s) for copies_s in path.seconds(self._profile))
        found = PredictedIteration(
            forward_s=job.accumulation * job.work.forward_s(rates) + added.slowed_s,
            backward_s=(job.accumulation - 1) * earlier_s + last_s,
            update_s=update_s,
            exposed_update_s=added.exposed_s,
            fixed_s=job.work.modules * rates.overheads.step_s,
            tokens_per_s=0.0,
            mfu=None,
        )
        mfu = None if peak is None else job.mfu(found.iteration_s, peak)
        return replace(found, tokens_per_s=job.tokens / found.iteration_s, mfu=mfu)

    @cached_property
    def baselines(self) -> dict[str, Outcome]:
        """Return the alternatives within ``budgets``: of our runtime on the same units, of DeepSpeed on sub-groups."""
        workload, no_gpu_adam = self.planned.plan.workload, None
        if Placement.STREAMED not in self.cost.placements:
            lacking = "the profile has no rate of Adam on the accelerator"
            no_gpu_adam = Infeasible(reason=lacking if self._has_gpu else "the CPU is the only accelerator")
        return {
            "stock": self._deepspeed(residents=0),
            "twin_flow": no_gpu_adam or self._deepspeed(self._residents_of_twin_flow()),
            "all_cpu": self._placed(place_all(workload, Placement.CPU)),
            "all_streamed": no_gpu_adam or self._placed(place_all(workload, Placement.STREAMED)),
            "stride_2": no_gpu_adam or self._placed(place_by_stride(workload, 2)),
            "no_offload": no_gpu_adam or self._no_offload(),
        }

    def _placed(self, placements: tuple[Placement, ...]) -> Outcome:
        """Return the iteration of our runtime with these placements, and with the order and slots of training."""
        request, workload = self._of_all_memory, self.planned.plan.workload
        order = forward_order(workload, placements, workload.first_use)
        plan = UpdatePlan(workload=workload, placements=placements, num_slots=DEFAULT_NUM_SLOTS, order=order)
        if self.budgets.missing(memory_of(plan, request.setup)):
            request = _without_sums(request)
        if excess := self.budgets.missing(memory_of(plan, request.setup)):
            return Infeasible(reason=f"does not fit: it exceeds {excess_of(excess)}")
        return self._with_update(request.evaluate(plan), request)

    def _deepspeed(self, residents: int) -> Outcome:
        plan, widths, disk = self._plan_of_deepspeed(residents), self._copied, self.job.disk
        if missing := self.budgets.missing(self._reserved_by_deepspeed(plan)):
            return Infeasible(reason=f"does not fit: it exceeds {excess_of(missing)}")
        cost = CostModel.for_stock(self._profile, widths)
        update_s = simulate(serial_schedule(plan.placements), plan.workload, cost).end_s
        if disk is not None and self._is_on_disk(plan):
            # All states and gradients are read, and all states are written, one sub-group after the other. Backward
            # writes the gradients, which is also counted here.
            each = widths.states + widths.master
            update_s += plan.workload.numel * each * (1 / disk.read + 1 / disk.write)
        if (step_params_per_s := self._profile.get("stock_step_params_per_s")) is not None:
            # The rate includes what the simulation lacks: norm, unscaling and the search for inf.
            update_s = max(update_s, plan.numel(Placement.CPU) / (stock_speed_up(widths) * step_params_per_s))
        rates = replace(self.rates, overheads=self.overheads.of_stock)
        return self._iteration(rates, update_s, AddedTime(update_s, 0.0), GradientPath.for_stock(plan, widths))

    def _is_on_disk(self, plan: UpdatePlan) -> bool:
        return self.planned.plan.workload.on_disk_numel > 0 and Placement.RESIDENT not in plan.placements

    def _reserved_by_deepspeed(self, plan: UpdatePlan) -> MemoryUse:
        """Return the memory of the optimizer.

        With states on disk, these are accumulated gradients, and a buffer per state and gradient of the largest
        sub-group: ``PartitionedOptimizerSwapper`` has ``buffer_count`` of them, 4 by default.
        """
        widths, numel = self._copied, plan.workload.numel
        if self._is_on_disk(plan):
            buffers_bytes = (widths.states + widths.master) * max(plan.workload.sub_group_numels)
            return MemoryUse(gpu_bytes=0, host_bytes=numel * widths.param + buffers_bytes, pinned_bytes=buffers_bytes)
        reserved = MemoryUse.from_reservations(reserved_by_stock(plan, widths))
        if self.job.offload_param and widths.rounds:
            # The trained parameters. The budget is what the frozen ones leave.
            reserved = replace(reserved, host_bytes=reserved.host_bytes + numel * PARAM_BYTES)
        return reserved

    def _plan_of_deepspeed(self, residents: int) -> UpdatePlan:
        """Return the plan with the first sub-groups on the GPU (``stage3.py``, ``subgroup_to_device``)."""
        workload = Workload.from_numels(self.planned.plan.workload.sub_group_numels)
        resident, others = (Placement.RESIDENT,) * residents, (Placement.CPU,) * (len(workload.units) - residents)
        return UpdatePlan(workload=workload, placements=resident + others, num_slots=1)

    def _residents_of_twin_flow(self) -> int:
        def is_too_many(residents: int) -> bool:
            reserved = reserved_by_stock(self._plan_of_deepspeed(residents), self._copied)
            return MemoryUse.from_reservations(reserved).gpu_bytes > self.planned.memory.gpu_bytes

        count = len(self.planned.plan.workload.sub_group_numels)
        return bisect_left(range(1, count + 1), True, key=is_too_many)

    def _no_offload(self) -> Outcome:
        if self._training_limit is not None and self.no_offload_bytes > self._training_limit:
            taken = size_of(self.no_offload_bytes, self._training_limit)
            return Infeasible(reason=f"does not fit: {taken} that --gpu-memory-gb and its margin leave")
        if self._copied.master < self._copied.moment:
            return Infeasible(reason="DeepSpeed offloads bf16 master weights whose moments are fp32")
        cost = CostModel.from_profile(self._profile, self.job.setup.widths)
        update_s = cost.load(ActionKind.GPU_STEP, self.planned.plan.workload.numel).total_s
        job = replace(self.job, offload_param=False)
        rates = replace(self.rates, overheads=self.overheads)
        return self._iteration(rates, update_s, AddedTime(update_s, 0.0), GradientPath(), job)

    @cached_property
    def no_offload_bytes(self) -> int:
        """Return the memory per rank without offloading, on the device that trains."""
        training = TrainingMemory(replace(self.job, offload_param=False))
        each_bytes = self._copied.states + self._copied.grad
        return self._bytes_of(training) + each_bytes * self.planned.plan.workload.numel

    @property
    def memory(self) -> MemoryUse:
        """Return the peak memory of training, per GPU and per node, with PyTorch's cache as far as that fits."""
        return self._with_training(self.planned.memory)

    @property
    def taken_gpu_bytes(self) -> int:
        """Return the GPU memory of ``memory`` without PyTorch's cache."""
        return self.planned.memory.gpu_bytes + self._bytes_of(self._training)

    @property
    def memory_of_stock(self) -> MemoryUse:
        """Return the peak memory of training with stock's offload, also if it does not fit."""
        return self._with_training(self._reserved_by_deepspeed(self._plan_of_deepspeed(residents=0)))

    def _with_training(self, optimizer: MemoryUse) -> MemoryUse:
        ranks, training_bytes = self.job.ranks_on_node, self._bytes_of(self._training)
        gpu_bytes, host_bytes = 0, optimizer.host_bytes + training_bytes
        if self._has_gpu:
            taken_bytes = optimizer.gpu_bytes + training_bytes
            held_bytes = taken_bytes + self._training.cache_bytes
            gpu_bytes = max(taken_bytes, min(held_bytes, self._limits.gpu or held_bytes))
            host_bytes = optimizer.host_bytes + self.job.offloaded_host_bytes
        return MemoryUse(
            gpu_bytes=gpu_bytes,
            host_bytes=self.reserved_host_bytes + ranks * host_bytes,
            pinned_bytes=ranks * optimizer.pinned_bytes,
            eager_bytes=ranks * optimizer.eager_bytes,
        )

    @property
    def disk_bytes(self) -> int:
        return self.job.ranks_on_node * self.job.setup.widths.disk_bytes(self.planned.plan.workload).on_disk

    @property
    def phases_s(self) -> tuple[float, float, float]:
        """Return the seconds of all forwards and backwards alone, without the network, and also without the host."""
        ideal, work = replace(self.rates, network=Network(ranks_per_node=self.job.ranks_on_node)), self.job.work
        all_s, without_network_s, products_s = (
            self.job.accumulation * (work.forward_s(rates) + work.backward_s(rates))
            for rates in (self.rates, ideal, replace(ideal, overheads=NO_OVERHEADS))
        )
        return all_s, without_network_s, products_s

    @cached_property
    def bound(self) -> Bound:
        return work_bound(self.planned.plan.workload, self.cost, self.budgets.gpu_bytes, self.request.setup)

    def speed_up(self, outcome: Outcome) -> float | None:
        """Return how many times as fast as stock ``outcome`` is, or None if one of them cannot run."""
        stock = self.baselines["stock"]
        if isinstance(stock, Infeasible) or isinstance(outcome, Infeasible):
            return None
        return stock.iteration_s / outcome.iteration_s


def _without_sums(request: PlanRequest) -> PlanRequest:
    return replace(request, setup=replace(request.setup, sums_on_accelerator=False))
