"""Predict one training run: seconds and memory of a plan, and the alternatives to plan against."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace

from perf_model.plan_request import PlanRequest
from perf_model.planner import PlannedUpdate
from perf_model.prediction.cost import CostModel
from perf_model.prediction.hardware import HardwareProfile
from perf_model.prediction.memory import (
    GPU_MARGIN_BYTES,
    Budgets,
    MemoryKind,
    MemoryUse,
    Reservation,
    TrainingSetup,
    excess_of,
    memory_of,
    reserved_by_stock,
)
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.simulate import simulate
from perf_model.schedule.action import ActionKind
from perf_model.schedule.lowering import forward_order, serial_schedule
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import DEFAULT_NUM_SLOTS, UpdatePlan, place_all, place_by_stride
from perf_model.schedule.workload import Workload
from perf_model.training_run.host_reserve import reserved_host_bytes
from perf_model.training_run.job import GradientPath, Job
from perf_model.training_run.micro_batch import NO_OVERHEADS, Overheads, PhaseRates
from perf_model.training_run.training_memory import PARAM_BYTES
from perf_model.units import DIGITS, size

NO_OFFLOAD_BYTES_PER_PARAM = 14
"""Bytes per parameter of the partition of a rank without offloading: fp32 p, m, v and the 16-bit gradient."""

LIMITS_TO_LIFT = {
    "gpu_bytes": "GPU memory: raise --gpu-memory-gb, or lower --gpu-memory-margin-gb.",
    "host_bytes": "Host memory, which includes the system and the processes: raise --host-memory-gb.",
    "pinned_bytes": "Pinned memory: raise --pinned-memory-gb.",
}
"""The options that raise each budget."""

CPU_ONLY_REASON = "the CPU is the only accelerator"


@dataclass(frozen=True, kw_only=True)
class PredictedIteration:
    """The predicted seconds of one training iteration, over all of its micro-batches.

    ``update_s`` is exposed and hidden time together. ``fixed_s`` is in none of the phases.
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
        """Return the seconds of the iteration: of the update, only the exposed time counts."""
        return self.forward_s + self.backward_s + self.exposed_update_s + self.fixed_s

    @property
    def hidden_update_s(self) -> float:
        """Return the seconds of the update that backward and forward hide."""
        return max(0.0, self.update_s - self.exposed_update_s)

    def to_json_dict(self) -> dict[str, float | None]:
        """Return the figures as they are written to JSON; ``mfu`` is None if the peak of the GPU is unknown."""
        return {**asdict(self), "iteration_s": self.iteration_s}


@dataclass(frozen=True, kw_only=True)
class Infeasible:
    """An alternative that cannot run, and the reason."""

    reason: str


Outcome = PredictedIteration | Infeasible


@dataclass(frozen=True, kw_only=True)
class MemoryLimits:
    """Memory in bytes: ``gpu`` per GPU, ``host`` per node, ``pinned`` per rank; None is unlimited.

    Every way to train leaves ``gpu_margin`` of the GPU memory free. Only units that rules by name place on the GPU may
    use it, as in training.
    """

    gpu: int | None
    host: int | None
    pinned: int | None = None
    gpu_margin: int = GPU_MARGIN_BYTES


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Whether the update may overlap with backward and with the next forward; by default as in training."""

    backward: bool = True
    forward: bool = True


NO_OVERLAP = Overlap(backward=False, forward=False)


class Predictor:
    """The predictions for one job on one machine.

    Whether a plan fits does not depend on ``overlap`` or ``overheads``: slots, residents and gradients take memory in
    every phase. The windows of the update are the last backward of a step and the first forward of the next one.
    """

    def __init__(
        self,
        job: Job,
        profile: HardwareProfile,
        limits: MemoryLimits,
        overlap: Overlap = NO_OVERLAP,
        overheads: Overheads = NO_OVERHEADS,
    ) -> None:
        rates = PhaseRates.from_profile(profile, job.ranks_on_node, overheads)
        self._job = job
        self._profile = profile
        self._limits = limits
        self._overheads = overheads
        # A CPU that trains updates the parameters of the model in place, so that none are rounded in a buffer.
        publishes = profile.has_accelerator
        self._setup = replace(job.setup, widths=replace(job.setup.widths, publishes=publishes))
        # A CPU that trains cannot update at the same time.
        overlap = overlap if profile.has_accelerator else NO_OVERLAP
        self._forward_s, self._compute_s = job.work.forward_s(rates), job.work.backward_s(rates)
        self._fixed_s = overheads.iteration_s
        self.windows = Windows(
            backward_s=self._compute_s if overlap.backward else 0.0,
            forward_s=self._forward_s if overlap.forward else 0.0,
        )
        self.reserved_host_bytes = reserved_host_bytes(job.ranks_on_node, has_gpu=profile.has_accelerator)
        host = None if limits.host is None else (limits.host - self.reserved_host_bytes) // job.ranks_on_node
        host = _less(host, job.frozen_host_bytes)
        self._training_limit = _less(limits.gpu, limits.gpu_margin) if profile.has_accelerator else host
        self._training_bytes = job.gpu_bytes if profile.has_accelerator else job.memory.allocated_bytes
        left_bytes = _less(self._training_limit, self._training_bytes)
        self.cost = CostModel.from_profile(profile, PARAM_BYTES, params_on_host=job.offload_param)
        if profile.has_accelerator:
            if left_bytes is not None and left_bytes >= 0:
                # PyTorch gives up its cache if training needs the memory, but a plan takes its memory for good.
                left_bytes = max(0, left_bytes + limits.gpu_margin - job.memory.cache_bytes)
            self._available = Budgets(gpu_bytes=left_bytes, host_bytes=host, pinned_bytes=limits.pinned)
        else:
            # The model is in host memory, too, and there is no accelerator to stream to.
            self.cost = self.cost.without_accelerator()
            self._available = Budgets(gpu_bytes=0, host_bytes=left_bytes, pinned_bytes=limits.pinned)

    def request(self, unit_sizes: Iterable[int]) -> PlanRequest:
        """Return the request for the best plan with one of these unit sizes, which leaves the margin free.

        As in training, rules by name do not ask for the sums of other units on the accelerator: these are in host
        memory if they do not fit.
        """
        request = self._request_of_all_memory(unit_sizes)
        budgets = self._available.with_gpu_margin(self._limits.gpu_margin, request.fixed_bytes)
        if budgets.gpu_bytes is not None and budgets.gpu_bytes < request.fixed_bytes:
            request = replace(request, setup=_without_sums(request.setup))
        return replace(request, budgets=budgets)

    def _request_of_all_memory(self, unit_sizes: Iterable[int]) -> PlanRequest:
        return PlanRequest(
            sub_groups=self._job.sub_groups,
            unit_sizes=tuple(unit_sizes),
            cost=self.cost,
            budgets=self._available,
            windows=self.windows,
            setup=self._setup,
            rules=self._job.rules,
            uses=self._job.shape.uses(),
        )

    def remedy(self, missing: Iterable[str]) -> str:
        """Return which options raise the budgets ``missing``, and which changes of the job take less memory."""
        job, limit, has_gpu = self._job, self._training_limit, self._profile.has_accelerator
        alone = ""
        if limit is not None and limit < self._training_bytes:
            memory = "GPU memory less the margin" if has_gpu else "host memory per rank"
            alone = (
                f"Without the optimizer, training takes {size(self._training_bytes, DIGITS)} of the "
                f"{size(max(0, limit))} of {memory}, {size(job.activation_bytes, DIGITS)} of them for activations. "
            )
        changes = ["more ranks", "a smaller --micro-batch", "a shorter --sequence"]
        changes += ["--offload-param"] if has_gpu and not job.offload_param else []
        changes += [] if job.recompute else ["recomputation (leave out --no-recompute)"]
        lifted = " ".join(LIMITS_TO_LIFT[name] for name in missing)
        return f"{lifted}\n{alone}Or train with {', '.join(changes[:-1])} or {changes[-1]}."

    def memory(self, optimizer: MemoryUse) -> MemoryUse:
        """Return the memory of training: per GPU, and of all ranks of a node; ``optimizer`` is that of one rank."""
        ranks, has_gpu = self._job.ranks_on_node, self._profile.has_accelerator
        host_bytes = optimizer.host_bytes + (self._job.frozen_host_bytes if has_gpu else self._training_bytes)
        return MemoryUse(
            gpu_bytes=self._with_cache(self._training_bytes + optimizer.gpu_bytes) if has_gpu else 0,
            host_bytes=self.reserved_host_bytes + ranks * host_bytes,
            pinned_bytes=ranks * optimizer.pinned_bytes,
        )

    def _with_cache(self, gpu_bytes: int) -> int:
        """Return ``gpu_bytes`` and those of PyTorch's cache, as far as the GPU has memory for it."""
        held_bytes = gpu_bytes + self._job.memory.cache_bytes
        return held_bytes if self._limits.gpu is None else max(gpu_bytes, min(held_bytes, self._limits.gpu))

    def iteration(self, update_s: float, exposed_s: float, gradients: GradientPath) -> PredictedIteration:
        """Return the iteration; each backward takes at least as long as the copies of its gradients."""
        job = self._job
        last_s, earlier_s = (max(self._compute_s, copies_s) for copies_s in gradients.seconds(self._profile))
        found = PredictedIteration(
            forward_s=job.accumulation * self._forward_s,
            backward_s=(job.accumulation - 1) * earlier_s + last_s,
            update_s=update_s,
            exposed_update_s=exposed_s,
            fixed_s=self._fixed_s,
            tokens_per_s=0.0,
            mfu=None,
        )
        peak = self._profile.gpu_peak_flops
        return replace(
            found,
            tokens_per_s=job.tokens / found.iteration_s,
            mfu=None if peak is None else job.mfu(found.iteration_s, peak),
        )

    def baselines(self, planned: PlannedUpdate, budgets: Budgets) -> dict[str, Outcome]:
        """Return the alternatives: of our runtime on the same units, and of DeepSpeed on its sub-groups.

        Twin-Flow gets as much GPU memory as the plan takes. All of them keep to the ``budgets`` of the plan.
        """
        workload = planned.plan.workload
        sub_groups = Workload.from_numels(workload.sub_group_numels)
        predictions: dict[str, Callable[[], Outcome]] = {
            "stock": lambda: self._deepspeed(budgets, sub_groups, residents=0),
            "twin_flow": lambda: self._deepspeed(
                budgets, sub_groups, _residents_in(planned.memory.gpu_bytes, sub_groups)
            ),
            "all_cpu": lambda: self._fixed_placements(budgets, workload, place_all(workload, Placement.CPU)),
            "all_streamed": lambda: self._fixed_placements(budgets, workload, place_all(workload, Placement.STREAMED)),
            "stride_2": lambda: self._fixed_placements(budgets, workload, place_by_stride(workload, 2)),
            "no_offload": lambda: self._no_offload(workload),
        }
        if Placement.STREAMED in self.cost.placements:
            return {name: predict() for name, predict in predictions.items()}
        has_gpu = self._profile.has_accelerator
        reason = "the profile has no rate of Adam on the accelerator" if has_gpu else CPU_ONLY_REASON
        return {
            name: predict() if name in ("stock", "all_cpu") else Infeasible(reason=reason)
            for name, predict in predictions.items()
        }

    def _fixed_placements(self, budgets: Budgets, workload: Workload, placements: tuple[Placement, ...]) -> Outcome:
        """Return the iteration of our runtime with these placements.

        As training does with placements of the config, units are updated in the order in which forward first uses them,
        through the default number of slots. The sums of accumulated gradients of units of the CPU are in host memory if
        they do not fit.
        """
        request = self._request_of_all_memory(())
        order = forward_order(workload, placements, request.first_use_of(workload))

        plan = UpdatePlan(workload=workload, placements=placements, num_slots=DEFAULT_NUM_SLOTS, order=order)
        setup = self._setup
        if budgets.missing(memory_of(plan, setup)):
            setup = _without_sums(setup)
        if excess := budgets.missing(memory_of(plan, setup)):
            return Infeasible(reason=f"does not fit: it exceeds {excess_of(excess)}")
        update = request.evaluate(plan)
        return self.iteration(update.update_s, update.exposed_s, GradientPath.for_plan(plan, setup))

    def _deepspeed(self, budgets: Budgets, workload: Workload, residents: int) -> Outcome:
        """Return the iteration of stock DeepSpeed, or Twin-Flow: the actions run one by one, and nothing is hidden."""
        plan = _plan_of_deepspeed(workload, residents)
        reserved = reserved_by_stock(plan, PARAM_BYTES)
        if self._job.offload_param:
            # The trained parameters. The budget is what the frozen ones leave.
            reserved.append(Reservation(kind=MemoryKind.HOST, each_bytes=workload.numel * PARAM_BYTES))
        if missing := budgets.missing(MemoryUse.from_reservations(reserved)):
            return Infeasible(reason=f"does not fit: it exceeds {excess_of(missing)}")
        cost = CostModel.for_stock(self._profile, PARAM_BYTES, params_on_host=self._job.offload_param)
        update_s = simulate(serial_schedule(plan.placements), workload, cost).end_s
        return self.iteration(update_s, update_s, GradientPath.for_stock(plan))

    def no_offload_bytes(self, workload: Workload) -> int:
        """Return the memory of training without offloading, on the device that trains."""
        return self._without_offload()._training_bytes + NO_OFFLOAD_BYTES_PER_PARAM * workload.numel

    def _without_offload(self) -> Predictor:
        """Return the predictor of the job with its parameters on the device that trains."""
        job = replace(self._job, offload_param=False)
        return self if job == self._job else Predictor(job, self._profile, self._limits, overheads=self._overheads)

    def _no_offload(self, workload: Workload) -> Outcome:
        needed = self.no_offload_bytes(workload)
        if self._training_limit is not None and needed > self._training_limit:
            limit = f"{size(self._training_limit)} that --gpu-memory-gb and its margin leave"
            return Infeasible(reason=f"does not fit: {size(needed, DIGITS)} of {limit}")
        predictor = self._without_offload()
        update_s = predictor.cost.load(ActionKind.GPU_STEP, workload.numel).total_s
        return predictor.iteration(update_s, update_s, GradientPath())


def _without_sums(setup: TrainingSetup) -> TrainingSetup:
    """Return ``setup`` if the gradients of units that the CPU updates are accumulated in host memory."""
    return replace(setup, sums_on_accelerator=False)


def _less(limit: int | None, taken_bytes: int) -> int | None:
    """Return the rest of ``limit``, None if it is unlimited."""
    return None if limit is None else limit - taken_bytes


def _plan_of_deepspeed(workload: Workload, residents: int) -> UpdatePlan:
    """Return the plan of stock DeepSpeed, without residents, or of Twin-Flow.

    The first sub-groups are the GPU part of Twin-Flow (``stage3.py``, ``subgroup_to_device``).
    """
    on_cpu = len(workload.units) - residents
    placements = (Placement.RESIDENT,) * residents + (Placement.CPU,) * on_cpu
    return UpdatePlan(workload=workload, placements=placements, num_slots=1)


def _residents_in(gpu_bytes: int, workload: Workload) -> int:
    """Return how many sub-groups Twin-Flow can keep in ``gpu_bytes`` of GPU memory."""

    def is_too_many(residents: int) -> bool:
        reserved = reserved_by_stock(_plan_of_deepspeed(workload, residents), PARAM_BYTES)
        return MemoryUse.from_reservations(reserved).gpu_bytes > gpu_bytes

    return bisect_left(range(1, len(workload.units) + 1), True, key=is_too_many)
