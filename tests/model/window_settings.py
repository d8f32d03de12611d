"""List 60 settings with windows: known machines and models that do not fit in GPU memory without offloading."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from perf_model.prediction.cost import CostModel
from perf_model.prediction.memory import Budgets, memory_of
from perf_model.prediction.overlap_windows import Windows
from perf_model.presets.machines import MACHINES
from perf_model.presets.models import MODELS
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan, place_all
from perf_model.schedule.workload import Workload
from perf_model.training_run.job import Job
from perf_model.training_run.micro_batch import NO_OVERHEADS, PhaseRates
from perf_model.training_run.training_memory import TrainingMemory

KNOWN_MACHINES = ("a100-pcie4", "h100-pcie5", "h200-pcie5", "gh200")
RANKS = (1, 2, 4, 8)
MICRO_BATCHES = (1, 4)
GPU_SHARES = (1.0, 0.5)
"""Shares of the GPU's memory that may be used; half of an A100-80GB is an A100-40GB."""

SEQUENCE = 2048

COUNT = 60
"""The number of settings, taken at equal distances from all that the rule gives."""

UNIT_SIZE = 50_000_000
"""The unit size with which ``needs_offloading`` looks at the memory."""


@dataclass(frozen=True, kw_only=True)
class WindowSetting:
    """A training run with the windows that ``plan`` predicts. A GH200 node has one rank, the others up to 8.

    ``recompute``: activations are recomputed in backward.
    """

    machine: str
    model: str
    ranks: int
    micro_batch: int
    gpu_share: float
    recompute: bool = True

    @cached_property
    def job(self) -> Job:
        """Return the training run."""
        ranks_per_node = 1 if self.machine == "gh200" else self.ranks
        return Job(
            shape=MODELS[self.model],
            world_size=self.ranks,
            ranks_per_node=ranks_per_node,
            micro_batch=self.micro_batch,
            sequence=SEQUENCE,
            recompute=self.recompute,
        )

    @property
    def cost(self) -> CostModel:
        """Return the cost model of one rank."""
        return CostModel.from_profile(MACHINES[self.machine].profile(self.job.ranks_on_node))

    @property
    def windows(self) -> Windows:
        """Return the windows of backward and forward, as ``plan`` predicts them for a host that launches at once."""
        ranks = self.job.ranks_on_node
        rates = PhaseRates.from_profile(MACHINES[self.machine].profile(ranks), ranks, NO_OVERHEADS)
        return Windows(backward_s=self.job.work.backward_s(rates), forward_s=self.job.work.forward_s(rates))

    @property
    def budgets(self) -> Budgets:
        """Return the memory of the GPU that training leaves, and the rank's share of host memory."""
        profile = MACHINES[self.machine].profile(self.job.ranks_on_node)
        assert profile.gpu_memory_bytes is not None
        assert profile.host_memory_bytes is not None
        return Budgets(
            gpu_bytes=int(self.gpu_share * profile.gpu_memory_bytes) - TrainingMemory(self.job).gpu_bytes,
            host_bytes=profile.host_memory_bytes // self.job.ranks_on_node,
        )

    def workload(self, unit_size: int) -> Workload:
        """Return the units of one rank."""
        return self.job.workload(unit_size)

    @property
    def needs_offloading(self) -> bool:
        """Return whether everything fits on the CPU, but not everything in GPU memory."""
        budgets = self.budgets
        if budgets.gpu_bytes is not None and budgets.gpu_bytes < 0:
            return False
        on_cpu, resident = (
            not budgets.missing(memory_of(_uniform_plan(self.workload(UNIT_SIZE), placement), self.job.setup))
            for placement in (Placement.CPU, Placement.RESIDENT)
        )
        return on_cpu and not resident

    def __str__(self) -> str:
        memory = "" if self.gpu_share == 1.0 else f" with {self.gpu_share:.0%} of the memory"
        return f"{self.model}, {self.ranks} x {self.machine}{memory}, micro-batch {self.micro_batch}"


def _uniform_plan(workload: Workload, placement: Placement) -> UpdatePlan:
    return UpdatePlan(workload=workload, placements=place_all(workload, placement), num_slots=1)


def all_settings(*, recompute: bool = True) -> Iterator[WindowSetting]:
    """Yield every combination of machine, model, ranks and micro-batch that needs offloading."""
    for machine, model, ranks, micro_batch, gpu_share in product(
        KNOWN_MACHINES, MODELS, RANKS, MICRO_BATCHES, GPU_SHARES
    ):
        setting = WindowSetting(
            machine=machine,
            model=model,
            ranks=ranks,
            micro_batch=micro_batch,
            gpu_share=gpu_share,
            recompute=recompute,
        )
        if setting.needs_offloading:
            yield setting


def window_settings(count: int = COUNT, *, recompute: bool = True) -> list[WindowSetting]:
    """Return ``count`` settings, or all of them if there are fewer."""
    found = list(all_settings(recompute=recompute))
    count = min(count, len(found))
    return [found[(2 * index + 1) * len(found) // (2 * count)] for index in range(count)]
