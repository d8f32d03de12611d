"""List the layouts in which DeepSpeed can train a global batch, and predict each with its best plan.

The *takeaways* are from arXiv 2104.04473, sections 3.2 to 3.4. They assume a pipeline with all states on the GPU, so
the fastest layout may depart from them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from perf_model.prediction.hardware import HardwareProfile
from perf_model.prediction.memory import DoesNotFit
from perf_model.prediction.network import Network
from perf_model.training_run.forecast import Forecast, MemoryLimits, Overlap
from perf_model.training_run.job import Job
from perf_model.training_run.micro_batch import NO_OVERHEADS, PUBLISHED_OVERHEADS, MicroBatch, PhaseRates
from perf_model.training_run.model import ModelError, require_integer
from perf_model.units import percent

MICRO_BATCHES = range(1, 65)

NEGLIGIBLY_LONGER = 1.005
"""The ratio up to which two iterations count as equally long."""


class Layout(NamedTuple):
    """A tensor-parallel size, a micro-batch and a number of accumulation steps that train one global batch."""

    tensor_parallel: int
    data_parallel: int
    micro_batch: int
    accumulation: int


@dataclass(frozen=True, kw_only=True)
class LayoutPrediction:
    """A layout that fits into memory, with the parts of its iteration.

    The parts are compute with the fixed time, exposed communication, and the exposed update with the copies of
    gradients. ``binding`` is the part whose removal would shorten the iteration the most.
    """

    layout: Layout
    found: Forecast
    parts_s: dict[str, float]
    binding: str

    @property
    def iteration_s(self) -> float:
        """Return the seconds of one iteration."""
        return self.found.predicted.iteration_s


def tensor_parallel_sizes(job: Job) -> list[int]:
    """Return the powers of two that divide the ranks of a node and the key-value heads of the model."""
    sizes = (2**power for power in range(job.ranks_on_node.bit_length()))
    return [size for size in sizes if job.ranks_on_node % size == 0 and job.shape.kv_heads % size == 0]


def layouts_of(
    job: Job, global_batch: int, tensor_parallel: Sequence[int], micro_batches: Sequence[int] | None = None
) -> list[Layout]:
    """Return the layouts with these sizes, by tensor-parallel size and micro-batch.

    ``job`` contains everything but the layout. Raise ``ModelError`` if a size is impossible or no layout divides the
    global batch evenly.
    """
    require_integer("global_batch", global_batch, 1, 10**9, "Correct --global-batch.")
    found = []
    data_parallel = {size: replace(job, tensor_parallel=size).data_parallel for size in sorted(set(tensor_parallel))}
    for size, groups in data_parallel.items():
        sequences, rest = divmod(global_batch, groups)
        if not rest and sequences:
            sizes = [each for each in sorted(set(micro_batches or MICRO_BATCHES)) if sequences % each == 0]
            found += [Layout(size, groups, micro, sequences // micro) for micro in sizes]
    if not found:
        units = {groups * micro for groups in data_parallel.values() for micro in micro_batches or [1]}
        least = sorted(unit for unit in units if not any(unit % other == 0 for other in units - {unit}))
        below = max(global_batch // unit * unit for unit in units)
        above = min(-(-global_batch // unit) * unit for unit in units)
        rule = f"must be a multiple of the data-parallel size{' times the micro-batch' if micro_batches else ''}"
        near = f"{below} or {above}" if below else above
        raise ModelError(
            f"global_batch: {rule}, here of {' or '.join(map(str, least))}, found {global_batch}.\n"
            f"Give --global-batch {near}, or another number of --gpus."
        )
    return found


def predict_layouts(
    job: Job,
    layouts: Iterable[Layout],
    profile: HardwareProfile,
    limits: MemoryLimits,
    overlap: Overlap,
    unit_sizes: tuple[int, ...],
) -> tuple[list[LayoutPrediction], dict[Layout, str]]:
    """Return the layouts that fit into memory, the fastest first, and the others with the reason.

    ``layouts`` must be sorted. Of those that do not fit, only the smallest micro-batch of each tensor-parallel size is
    returned.
    """
    fitting: list[LayoutPrediction] = []
    unfit: dict[Layout, str] = {}
    for layout in layouts:
        if any(layout.tensor_parallel == other.tensor_parallel for other in unfit):
            continue
        size, _, micro_batch, accumulation = layout
        laid_out = replace(job, tensor_parallel=size, micro_batch=micro_batch, accumulation=accumulation)
        try:
            found = Forecast(laid_out, profile, limits, overlap, unit_sizes, PUBLISHED_OVERHEADS)
            fitting.append(_prediction(layout, found, profile))
        except DoesNotFit as error:
            unfit[layout] = error.rule
    return sorted(fitting, key=lambda predicted: predicted.iteration_s), unfit


def _prediction(layout: Layout, found: Forecast, profile: HardwareProfile) -> LayoutPrediction:
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
    parts_s = {"compute_s": compute_s, "exposed_network_s": network_s, "exposed_update_s": update_s}
    binding = max(gains, key=lambda name: gains[name])
    return LayoutPrediction(layout=layout, found=found, parts_s=parts_s, binding=binding)


def departures(fitting: Sequence[LayoutPrediction], node_size: int, compared: Collection[int]) -> list[str]:
    """Return one sentence for each takeaway that the fastest layout, the first of ``fitting``, departs from.

    ``node_size`` is the largest possible tensor-parallel size, and ``compared`` contains the sizes of all layouts.
    """
    best, size = fitting[0], fitting[0].layout.tensor_parallel
    fastest = {found.layout.tensor_parallel: found for found in reversed(fitting)}

    def longer(other: LayoutPrediction) -> str:
        return f"an iteration takes {percent(other.iteration_s / best.iteration_s - 1)} longer"

    found = []
    if size < node_size:
        why = f"none with t = {node_size} fits" if node_size in compared else f"t = {node_size} was not compared"
        if node_size in fastest:
            why = f"with t = {node_size} {longer(fastest[node_size])}"
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
