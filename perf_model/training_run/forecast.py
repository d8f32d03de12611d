"""What a training run is predicted to take with each way to update: the plan found, DeepSpeed's own, and the rules."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from perf_model.prediction.cost import CostModel
from perf_model.prediction.hardware import HardwareProfile
from perf_model.prediction.memory import Memory, memory_of, reserved_by_stock
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.simulate import simulate
from perf_model.schedule.action import ActionKind
from perf_model.schedule.happens_before import CHAINS
from perf_model.schedule.lowering import serial_schedule
from perf_model.schedule.placement import Placement, place_all, place_by_stride
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from perf_model.search.budgets import Budgets, DoesNotFit
from perf_model.search.planner import MAX_SLOTS, SUB_GROUP_SIZES, PlannedUpdate, evaluate, plan_sub_groups
from perf_model.training_run.job import PARAM_BYTES, GradientPath, Job
from perf_model.units import gigabytes

NO_OFFLOAD_BYTES_PER_PARAM = 14
"""fp32 p, m, v and the 16-bit gradient of a rank's partition, on the GPU."""

MOST_RANKS = 2**16

NO_ACCELERATOR = "no accelerator beside the CPU"


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """Seconds of one training iteration; ``update_s`` is exposed and hidden together."""

    forward_s: float
    backward_s: float
    update_s: float
    exposed_update_s: float
    tokens_per_s: float
    mfu: float | None

    @property
    def iteration_s(self) -> float:
        return self.forward_s + self.backward_s + self.exposed_update_s

    @property
    def hidden_update_s(self) -> float:
        return max(0.0, self.update_s - self.exposed_update_s)

    def to_json_dict(self) -> dict[str, float | None]:
        return {
            "forward_s": self.forward_s,
            "backward_s": self.backward_s,
            "update_s": self.update_s,
            "exposed_update_s": self.exposed_update_s,
            "iteration_s": self.iteration_s,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
        }


@dataclass(frozen=True, kw_only=True)
class Unfit:
    """An arm that cannot run, and why."""

    why: str


Arm = Iteration | Unfit


@dataclass(frozen=True, kw_only=True)
class MemoryLimits:
    """Bytes: ``gpu`` of one GPU, ``host`` of one node, ``pinned`` of one rank; None is unlimited."""

    gpu: int | None
    host: int | None
    pinned: int | None = None


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """What of the update may run beside backward and beside the next forward: by default what the runtime does."""

    backward: bool = True
    forward: bool = True


NO_OVERLAP = Overlap(backward=False, forward=False)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """``memory``: ``gpu_bytes`` of one GPU, the others of one node; where the model is, its activations are included.
    It is the peak of every phase: what the optimizer takes, it takes in forward and backward, too.

    ``cost``, ``budgets`` and ``windows`` are what the plan was made with.
    """

    job: Job
    cost: CostModel
    budgets: Budgets
    windows: Windows
    sub_group_size: int
    planned: PlannedUpdate
    predicted: Iteration
    baselines: dict[str, Arm]
    memory: Memory


def forecast(
    job: Job, profile: HardwareProfile, limits: MemoryLimits, overlap: Overlap, sub_group_sizes: Iterable[int]
) -> Forecast:
    """The plan with the least exposed time over the sub-group sizes, and the others beside it.

    Raises ``DoesNotFit`` where no plan fits, ``ProfileError`` where a rate is missing.
    """
    arms = _Arms(job, profile, limits, overlap)
    sub_group_size, planned = arms.plan(sub_group_sizes)
    return Forecast(
        job=job,
        cost=arms.cost,
        budgets=arms.budgets,
        windows=arms.windows,
        sub_group_size=sub_group_size,
        planned=planned,
        predicted=arms.iteration(planned.update_s, planned.exposed_s, GradientPath.of(planned.plan)),
        baselines=arms.baselines(planned),
        memory=arms.memory(planned.memory),
    )


def what_would_fit(
    job: Job, profile: HardwareProfile, limits: MemoryLimits, sub_group_sizes: tuple[int, ...] = SUB_GROUP_SIZES
) -> str:
    """The remedy where no plan fits with any of these sizes."""
    if sub_group_sizes != SUB_GROUP_SIZES:
        size = _Arms(job, profile, limits).size_that_fits(SUB_GROUP_SIZES)
        if size is not None:
            return f'It fits with "sub_group_size": {size}.'
    ranks = least_world_size_that_fits(job, profile, limits, sub_group_sizes)
    if ranks is not None:
        return f"It fits with {ranks} ranks."
    most = replace(job, world_size=max(_more_ranks(job), default=job.world_size))
    return _Arms(most, profile, limits).why_never()


def least_world_size_that_fits(
    job: Job, profile: HardwareProfile, limits: MemoryLimits, sub_group_sizes: Iterable[int] = SUB_GROUP_SIZES
) -> int | None:
    """The first of twice, four times ... the ranks with which a plan fits."""
    sizes = tuple(sub_group_sizes)
    for ranks in _more_ranks(job):
        if _Arms(replace(job, world_size=ranks), profile, limits).size_that_fits(sizes) is not None:
            return ranks
    return None


def _more_ranks(job: Job) -> Iterator[int]:
    """Doubled again and again, a full node's ranks among them."""
    ranks = job.world_size
    while 2 * ranks <= MOST_RANKS:
        ranks = 2 * ranks if ranks >= job.ranks_per_node else min(2 * ranks, job.ranks_per_node)
        yield ranks


class _Arms:
    def __init__(self, job: Job, profile: HardwareProfile, limits: MemoryLimits, overlap: Overlap = NO_OVERLAP) -> None:
        """What fits does not depend on ``overlap``: slots, residents and gradients are there in every phase."""
        flops = profile.rate("matmul_flops_per_s")
        self._job = job
        self._profile = profile
        self._limits = limits
        # Where the CPU trains, it is the one that updates, too.
        overlap = overlap if profile.has_accelerator else NO_OVERLAP
        self._forward_s, self._compute_s = job.forward_s(flops), job.backward_s(flops)
        self.windows = Windows(
            backward_s=self._compute_s if overlap.backward else 0.0,
            forward_s=self._forward_s if overlap.forward else 0.0,
        )
        host = None if limits.host is None else limits.host // job.ranks_of_a_node
        self._around_model = limits.gpu if profile.has_accelerator else host
        beside_model = None if self._around_model is None else self._around_model - job.gpu_bytes
        self.cost = CostModel.of(profile, PARAM_BYTES)
        if profile.has_accelerator:
            self.budgets = Budgets(gpu_bytes=beside_model, host_bytes=host, pinned_bytes=limits.pinned)
        else:
            # The model is in host memory, too, and there is nothing to stream through.
            on_cpu = {kind: self.cost.per_param[kind] for kind in CHAINS[Placement.CPU]}
            self.cost = replace(self.cost, per_param=on_cpu)
            self.budgets = Budgets(gpu_bytes=0, host_bytes=beside_model, pinned_bytes=limits.pinned)

    def plan(self, sub_group_sizes: Iterable[int]) -> tuple[int, PlannedUpdate]:
        workload_of = self._job.workload
        return plan_sub_groups(workload_of, sub_group_sizes, self.cost, self.budgets, self.windows, PARAM_BYTES)

    def size_that_fits(self, sub_group_sizes: Iterable[int]) -> int | None:
        """The largest of them with which a plan fits."""
        if self._around_model is not None and self._around_model < self._job.gpu_bytes:
            return None
        for size in sorted(sub_group_sizes, reverse=True):
            try:
                self.plan([size])
            except DoesNotFit:
                continue
            return size
        return None

    def why_never(self) -> str:
        """What to say where no number of ranks makes it fit, this being the largest."""
        job, around = self._job, self._around_model
        if around is None or job.gpu_bytes <= around:
            return f"No number of ranks up to {MOST_RANKS:,} makes it fit."
        where = "a GPU" if self._profile.has_accelerator else "host memory a rank"
        told = (
            f"No number of ranks makes it fit: beside the optimizer, training takes {gigabytes(job.gpu_bytes)} of the "
            f"{gigabytes(around)} of {where}, {gigabytes(job.activation_bytes)} of them for activations."
        )
        if job.gpu_bytes - job.activation_bytes > around:
            return f"{told} Train where there is more."
        without = "" if job.recompute else ", or leave out --no-recompute"
        return f"{told} Lower --micro-batch or --sequence{without}."

    def memory(self, optimizer: Memory) -> Memory:
        ranks, has_gpu = self._job.ranks_of_a_node, self._profile.has_accelerator
        model_bytes = self._job.gpu_bytes
        return Memory(
            gpu_bytes=model_bytes + optimizer.gpu_bytes if has_gpu else 0,
            host_bytes=ranks * (optimizer.host_bytes if has_gpu else model_bytes + optimizer.host_bytes),
            pinned_bytes=ranks * optimizer.pinned_bytes,
        )

    def iteration(self, update_s: float, exposed_s: float, gradients: GradientPath) -> Iteration:
        """Backward hides the gradients' way to host memory as far as it lasts."""
        backward_s = max(self._compute_s, self._job.gradients_s(gradients, self._profile))
        iteration_s = self._forward_s + backward_s + exposed_s
        peak = self._profile.gpu_peak_flops
        return Iteration(
            forward_s=self._forward_s,
            backward_s=backward_s,
            update_s=update_s,
            exposed_update_s=exposed_s,
            tokens_per_s=self._job.tokens / iteration_s,
            mfu=None if peak is None else self._job.mfu(iteration_s, peak),
        )

    def baselines(self, planned: PlannedUpdate) -> dict[str, Arm]:
        """On the same sub-groups; Twin-Flow with as much memory of the GPU as the plan takes."""
        workload = planned.plan.workload
        arms: dict[str, Callable[[], Arm]] = {
            "stock": lambda: self._of_deepspeed(workload, residents=0),
            "twin_flow": lambda: self._of_deepspeed(workload, _residents_in(planned.memory.gpu_bytes, workload)),
            "all_cpu": lambda: self._of_rule(workload, place_all(workload, Placement.CPU)),
            "all_streamed": lambda: self._of_rule(workload, place_all(workload, Placement.STREAMED)),
            "stride_2": lambda: self._of_rule(workload, place_by_stride(workload, 2)),
            "no_offload": lambda: self._no_offload(workload),
        }
        if Placement.STREAMED in self.cost.placements:
            return {name: arm() for name, arm in arms.items()}
        has_gpu = self._profile.has_accelerator
        unknown = Unfit(why="the profile has no rate of Adam on the accelerator" if has_gpu else NO_ACCELERATOR)
        return {name: arm() if name in ("stock", "all_cpu") else unknown for name, arm in arms.items()}

    def _of_rule(self, workload: Workload, placements: tuple[Placement, ...]) -> Arm:
        """Ours, with the most slots that fit."""
        missing: dict[str, int] = {}
        for num_slots in range(MAX_SLOTS, 0, -1):
            plan = UpdatePlan(workload=workload, placements=placements, num_slots=num_slots)
            missing = self.budgets.missing(memory_of(plan, PARAM_BYTES))
            if not missing:
                update = evaluate(plan, self.cost, self.budgets, self.windows, PARAM_BYTES)
                return self.iteration(update.update_s, update.exposed_s, GradientPath.of(plan))
        return Unfit(why=DoesNotFit(missing).rule)

    def _of_deepspeed(self, workload: Workload, residents: int) -> Arm:
        """Serial, nothing hidden."""
        plan = _deepspeeds_plan(workload, residents)
        if missing := self.budgets.missing(Memory.of(reserved_by_stock(plan, PARAM_BYTES))):
            return Unfit(why=DoesNotFit(missing).rule)
        cost = CostModel.of_stock(self._profile, PARAM_BYTES)
        update_s = simulate(serial_schedule(plan.placements), workload, cost).end_s
        return self.iteration(update_s, update_s, GradientPath.of_stock(plan))

    def _no_offload(self, workload: Workload) -> Arm:
        needed = self._job.gpu_bytes + NO_OFFLOAD_BYTES_PER_PARAM * workload.numel
        if self._limits.gpu is not None and needed > self._limits.gpu:
            return Unfit(why=f"does not fit: {needed / 1e9:.0f} GB of {self._limits.gpu / 1e9:.0f} GB")
        update_s = self.cost.load(ActionKind.GPU_STEP, workload.numel).total_s
        return self.iteration(update_s, update_s, GradientPath())


def _deepspeeds_plan(workload: Workload, residents: int) -> UpdatePlan:
    """Stock's, or Twin-Flow's: the first sub-groups are its GPU part (``stage3.py``, ``subgroup_to_device``)."""
    on_cpu = len(workload.sub_groups) - residents
    placements = (Placement.RESIDENT,) * residents + (Placement.CPU,) * on_cpu
    return UpdatePlan(workload=workload, placements=placements, num_slots=1)


def _residents_in(gpu_bytes: int, workload: Workload) -> int:
    """How many sub-groups Twin-Flow can keep in as much of the GPU's memory."""

    def is_too_many(residents: int) -> bool:
        reserved = reserved_by_stock(_deepspeeds_plan(workload, residents), PARAM_BYTES)
        return Memory.of(reserved).gpu_bytes > gpu_bytes

    return bisect_left(range(1, len(workload.sub_groups) + 1), True, key=is_too_many)
