"""Predict the iteration of each layout with the best plan for its updates, and sort the layouts by it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from perf_model.cluster.layouts import Layout
from perf_model.prediction.hardware import HardwareProfile
from perf_model.prediction.memory import DoesNotFit
from perf_model.prediction.network import Network
from perf_model.training_run.forecast import Forecast, MemoryLimits, Overlap
from perf_model.training_run.job import Job
from perf_model.training_run.micro_batch import NO_OVERHEADS, PUBLISHED_OVERHEADS, MicroBatch, PhaseRates
from perf_model.units import percent

NEGLIGIBLY_LONGER = 1.005
"""The ratio of two iterations up to which they count as equally long."""


@dataclass(frozen=True, kw_only=True)
class LayoutPrediction:
    """A layout that fits into memory, with the three parts of its iteration.

    ``compute_s`` are forward and backward of all micro-batches without communication, and the fixed time of an
    iteration. ``network_s`` is the time by which communication prolongs them, and ``update_s`` the exposed time of the
    update. ``binding`` is what limits the iteration: what would shorten it the most if it took no time.
    """

    layout: Layout
    found: Forecast
    compute_s: float
    network_s: float
    update_s: float
    binding: str

    @property
    def iteration_s(self) -> float:
        """Return the seconds of one iteration, which is the sum of the three parts."""
        return self.found.predicted.iteration_s


def predict_layouts(
    job: Job,
    layouts: Iterable[Layout],
    profile: HardwareProfile,
    limits: MemoryLimits,
    overlap: Overlap,
    unit_sizes: tuple[int, ...],
) -> tuple[list[LayoutPrediction], dict[Layout, str]]:
    """Return the layouts that fit into memory, the fastest first, and the others with the reason.

    ``job`` has everything but the layout. ``layouts`` are sorted by tensor-parallel size and micro-batch: of those that
    do not fit, only the smallest micro-batch of a tensor-parallel size is returned, because a larger one needs more.
    """
    fitting: list[LayoutPrediction] = []
    unfit: dict[Layout, str] = {}
    for layout in layouts:
        if any(layout.tensor_parallel == other.tensor_parallel for other in unfit):
            continue
        sizes = layout._asdict()
        del sizes["data_parallel"]
        try:
            found = Forecast(replace(job, **sizes), profile, limits, overlap, unit_sizes, PUBLISHED_OVERHEADS)
            fitting.append(_prediction(layout, found, profile))
        except DoesNotFit as error:
            unfit[layout] = error.rule
    return sorted(fitting, key=lambda predicted: predicted.iteration_s), unfit


def _prediction(layout: Layout, found: Forecast, profile: HardwareProfile) -> LayoutPrediction:
    """Divide the predicted iteration into matrix products, exposed communication, and the rest, which is the update's.

    The copies of gradients to host memory also belong to the update.
    """
    job, work = found.job, found.job.work
    rates = PhaseRates.from_profile(profile, job.ranks_on_node, PUBLISHED_OVERHEADS)

    def phases_s(work: MicroBatch, rates: PhaseRates) -> float:
        return job.accumulation * (work.forward_s(rates) + work.backward_s(rates))

    without_network_s = phases_s(work, replace(rates, network=Network(ranks_per_node=job.ranks_on_node)))
    only_network = replace(work, forward_flops=0.0, backward_flops=0.0)
    communication_s = phases_s(only_network, replace(rates, overheads=NO_OVERHEADS))
    network_s = phases_s(work, rates) - without_network_s
    compute_s = without_network_s + found.predicted.fixed_s
    update_s = found.predicted.iteration_s - compute_s - network_s
    gains = {"compute": compute_s + network_s - communication_s, "network": network_s, "update": update_s}
    return LayoutPrediction(
        layout=layout,
        found=found,
        compute_s=compute_s,
        network_s=network_s,
        update_s=update_s,
        binding=max(gains, key=lambda name: gains[name]),
    )


def departures(fitting: Sequence[LayoutPrediction], node_size: int, compared: Collection[int]) -> list[str]:
    """Return a sentence per takeaway of arXiv 2104.04473, sections 3.2 to 3.4, that the fastest layout departs from.

    The takeaways are about a pipeline whose states are on the GPU. ``fitting`` are the layouts that fit into memory,
    the fastest first. ``node_size`` is the largest tensor-parallel size that a node and the model permit, and
    ``compared`` are the sizes of all layouts, whether they fit or not.
    """
    best, size = fitting[0], fitting[0].layout.tensor_parallel
    fastest = {found.layout.tensor_parallel: found for found in reversed(fitting)}

    def longer(other: LayoutPrediction) -> str:
        return f"an iteration takes {percent(other.iteration_s / best.iteration_s - 1)} longer"

    found = []
    if size < node_size:
        why = f"with t = {node_size} {longer(fastest[node_size])}" if node_size in fastest else ""
        why = (
            why
            or f"{f'none with t = {node_size} fits' if node_size in compared else f't = {node_size} was not compared'}"
        )
        rule = "Takeaway 1 (tensor parallelism up to the GPUs of a node) is not followed: ZeRO-3 divides the model, too"
        found.append(f"{rule}; {why}.")
    least = min(fastest)
    if least < size:
        rule = "Takeaway 2 (a model-parallel size just large enough to fit, and data parallelism for the rest)"
        why = f"with t = {least} {longer(fastest[least])}, limited by {fastest[least].binding}"
        found.append(f"{rule} is not followed: {why}.")
    alike = [other for other in fitting if other.layout.tensor_parallel == size]
    other = max(alike, key=lambda found: found.layout.micro_batch)
    if other.iteration_s > NEGLIGIBLY_LONGER * best.iteration_s:
        rule = "Takeaway 3 (the micro-batch by equation 1) is not followed: without a pipeline it gives the largest"
        why = f"with {other.layout.micro_batch} sequences {longer(other)}, limited by {other.binding}"
        found.append(f"{rule} that fits, but {why}.")
    return found
