"""Predict the iteration of each layout with the best plan for its updates, and sort the layouts by it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from perf_model.cluster.layouts import Layout
from perf_model.prediction.hardware import HardwareProfile
from perf_model.prediction.memory import DoesNotFit
from perf_model.prediction.network import Network
from perf_model.training_run.forecast import Forecast, forecast_plan
from perf_model.training_run.job import Job
from perf_model.training_run.micro_batch import NO_OVERHEADS, PUBLISHED_OVERHEADS, MicroBatch, PhaseRates
from perf_model.training_run.predictor import MemoryLimits, Overlap

DAY_S = 86_400
HOUR_S = 3_600


@dataclass(frozen=True, kw_only=True)
class LayoutPrediction:
    """A layout that fits into memory, with the seconds of its iteration.

    ``compute_s`` are forward and backward of all micro-batches without communication, and the fixed time of an
    iteration. ``network_s`` is the time by which communication prolongs them, and ``update_s`` the exposed time of the
    update. ``communication_s`` is the time of all communication, whether hidden or not.
    """

    layout: Layout
    found: Forecast
    compute_s: float
    network_s: float
    update_s: float
    communication_s: float

    @property
    def iteration_s(self) -> float:
        """Return the seconds of one iteration, which is the sum of the three parts."""
        return self.found.predicted.iteration_s

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens that all GPUs train per second."""
        return self.found.predicted.tokens_per_s

    @property
    def mfu(self) -> float | None:
        """Return the model FLOPs utilisation, or None if the peak of the GPU is not known."""
        return self.found.predicted.mfu

    @property
    def binding(self) -> str:
        """Return what limits the iteration: the resource that would shorten it the most if it took no time."""
        gains = {
            "compute": self.compute_s + self.network_s - self.communication_s,
            "network": self.network_s,
            "update": self.update_s,
        }
        return max(gains, key=lambda name: gains[name])

    def days(self, tokens: float) -> float:
        """Return the days that training on ``tokens`` takes (arXiv 2104.04473, section 5.1)."""
        return tokens / self.tokens_per_s / DAY_S

    def gpu_hours(self, tokens: float) -> float:
        """Return the hours that all GPUs together spend on ``tokens``."""
        return tokens / self.tokens_per_s / HOUR_S * self.found.job.world_size


@dataclass(frozen=True, kw_only=True)
class UnfitLayout:
    """A layout that does not fit into memory, and the reason. No larger micro-batch fits either."""

    layout: Layout
    reason: str


def predict_layouts(
    job: Job,
    layouts: Iterable[Layout],
    profile: HardwareProfile,
    limits: MemoryLimits,
    overlap: Overlap,
    unit_sizes: tuple[int, ...],
) -> tuple[list[LayoutPrediction], list[UnfitLayout]]:
    """Return the layouts that fit into memory, the fastest first, and the others.

    ``job`` has everything but the layout. ``layouts`` are sorted by tensor-parallel size and micro-batch: of those that
    do not fit, only the smallest micro-batch of a tensor-parallel size is returned.
    """
    fitting: list[LayoutPrediction] = []
    unfit: dict[int, UnfitLayout] = {}
    for layout in layouts:
        # A larger micro-batch needs more memory.
        if layout.tensor_parallel in unfit:
            continue
        laid_out = replace(
            job,
            tensor_parallel=layout.tensor_parallel,
            micro_batch=layout.micro_batch,
            accumulation=layout.accumulation,
        )
        try:
            found = forecast_plan(laid_out, profile, limits, overlap, unit_sizes, PUBLISHED_OVERHEADS)
        except DoesNotFit as error:
            unfit[layout.tensor_parallel] = UnfitLayout(layout=layout, reason=error.rule)
            continue
        fitting.append(_prediction(layout, found, profile))
    return sorted(fitting, key=lambda predicted: predicted.iteration_s), list(unfit.values())


def _prediction(layout: Layout, found: Forecast, profile: HardwareProfile) -> LayoutPrediction:
    """Divide the predicted iteration into matrix products, exposed communication, and the rest, which is the update's.

    The copies of gradients to host memory belong to the update, too.
    """
    job, work = found.job, found.job.work
    rates = PhaseRates.from_profile(profile, job.ranks_on_node, PUBLISHED_OVERHEADS)
    without_network = replace(rates, network=Network(ranks_per_node=job.ranks_on_node))
    only_network = replace(work, forward_flops=0.0, backward_flops=0.0)
    without_launches = replace(rates, overheads=NO_OVERHEADS)
    phases_s = job.accumulation * _phases_s(work, without_network)
    network_s = job.accumulation * _phases_s(work, rates) - phases_s
    compute_s = phases_s + found.predicted.fixed_s
    return LayoutPrediction(
        layout=layout,
        found=found,
        compute_s=compute_s,
        network_s=network_s,
        update_s=found.predicted.iteration_s - compute_s - network_s,
        communication_s=job.accumulation * _phases_s(only_network, without_launches),
    )


def _phases_s(work: MicroBatch, rates: PhaseRates) -> float:
    """Return the seconds of forward and backward of one micro-batch."""
    return work.forward_s(rates) + work.backward_s(rates)
