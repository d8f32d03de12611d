"""Forecast a training run with the best plan and with the alternatives: stock DeepSpeed, Twin-Flow and simple rules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from perf_model.plan_request import PlanRequest, SizedPlan
from perf_model.planner import PlannedUpdate
from perf_model.prediction.cost import CostModel
from perf_model.prediction.hardware import HardwareProfile
from perf_model.prediction.memory import Budgets, DoesNotFit, MemoryUse
from perf_model.prediction.overlap_windows import Windows
from perf_model.prediction.work_bound import Bound, work_bound
from perf_model.training_run.job import GradientPath, Job
from perf_model.training_run.micro_batch import NO_OVERHEADS, Overheads
from perf_model.training_run.predictor import Infeasible, MemoryLimits, Outcome, Overlap, PredictedIteration, Predictor


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The predicted iteration with the best plan, which was found for ``request``, and with the alternatives."""

    job: Job
    predictor: Predictor
    request: PlanRequest
    chosen: SizedPlan
    predicted: PredictedIteration

    @cached_property
    def baselines(self) -> dict[str, Outcome]:
        """Return the alternatives."""
        return self.predictor.baselines(self.planned, self.budgets)

    @property
    def memory(self) -> MemoryUse:
        """Return the peak memory of training: per GPU, and the other bytes per node.

        It includes the model, its activations and the cache of PyTorch on the device that trains, and
        ``reserved_host_bytes`` of host memory for everything else. It is the peak of every phase, because the memory of
        the optimizer is also reserved during forward and backward.
        """
        return self.predictor.memory(self.planned.memory)

    @property
    def reserved_host_bytes(self) -> int:
        """Return the host memory of a node for the system and the processes."""
        return self.predictor.reserved_host_bytes

    @property
    def no_offload_bytes(self) -> int:
        """Return the memory per rank of training without offloading, on the device that trains."""
        return self.predictor.no_offload_bytes(self.planned.plan.workload)

    @property
    def planned(self) -> PlannedUpdate:
        """Return the plan with its prediction."""
        return self.chosen.planned

    @property
    def unit_size(self) -> int:
        """Return the size that the units of the plan were cut to."""
        return self.chosen.unit_size

    @property
    def cost(self) -> CostModel:
        """Return the costs that the plan was made with."""
        return self.request.cost

    @property
    def budgets(self) -> Budgets:
        """Return the memory that the plan may take."""
        return self.request.budgets

    @property
    def windows(self) -> Windows:
        """Return the windows that the plan was made for."""
        return self.request.windows

    @cached_property
    def bound(self) -> Bound:
        """Return the lower bound of the update's work."""
        return work_bound(self.planned.plan.workload, self.cost, self.budgets.gpu_bytes, self.request.setup)

    @property
    def first_use(self) -> tuple[int, ...]:
        """Return the units of the plan in the order in which forward first uses them."""
        workload = self.planned.plan.workload
        first_use = self.request.first_use_of(workload)
        return tuple(range(len(workload.units))) if first_use is None else first_use

    def speed_up(self, outcome: Outcome) -> float | None:
        """Return how many times as fast as stock an iteration of ``outcome`` is, or None if one of both cannot run."""
        stock = self.baselines["stock"]
        if isinstance(stock, Infeasible) or isinstance(outcome, Infeasible):
            return None
        return stock.iteration_s / outcome.iteration_s


def forecast(
    job: Job,
    profile: HardwareProfile,
    limits: MemoryLimits,
    overlap: Overlap,
    unit_sizes: Iterable[int],
    overheads: Overheads = NO_OVERHEADS,
) -> Forecast:
    """Return the forecast of the plan that exposes the least time over the unit sizes.

    ``overheads`` are the fixed seconds of the host, which no profile measures. Raise ``DoesNotFit``, with the remedy,
    if no plan fits, and ``ProfileError`` if the profile lacks a rate.
    """
    predictor = Predictor(job, profile, limits, overlap, overheads)
    request = predictor.request(unit_sizes)
    try:
        chosen = request.plan()
    except DoesNotFit as error:
        raise DoesNotFit(error.missing, predictor.remedy(error.missing)) from None
    planned, path = chosen.planned, GradientPath.for_plan(chosen.planned.plan, request.setup)
    predicted = predictor.iteration(planned.update_s, planned.exposed_s, path)
    return Forecast(job=job, predictor=predictor, request=request, chosen=chosen, predicted=predicted)
