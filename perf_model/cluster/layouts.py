"""List the layouts in which DeepSpeed can train a global batch, and predict each with its best plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from perf_model.prediction.memory import DoesNotFit
from perf_model.training_run.forecast import Forecast
from perf_model.training_run.job import Job
from perf_model.training_run.micro_batch import NO_OVERHEADS
from perf_model.training_run.model import ModelError, require_integer

MICRO_BATCHES = range(1, 65)

LAYOUT = ("tensor_parallel", "data_parallel", "micro_batch", "accumulation")
"""The attributes of a job that differ between layouts of one global batch."""


def tensor_parallel_sizes(job: Job) -> list[int]:
    """Return the powers of two that divide the ranks of a node and the key-value heads of the model."""
    sizes = (2**power for power in range(job.ranks_on_node.bit_length()))
    return [size for size in sizes if job.ranks_on_node % size == 0 and job.shape.kv_heads % size == 0]


def layouts_of(
    job: Job, global_batch: int, tensor_parallel: Sequence[int], micro_batches: Sequence[int] | None = None
) -> list[Job]:
    """Return the layouts with these sizes, sorted. Raise ``ModelError`` if one is impossible or none fits the batch."""
    require_integer("global_batch", global_batch, 1, 10**9, "Correct --global-batch.")
    found = []
    of_sizes = [replace(job, tensor_parallel=size) for size in sorted(set(tensor_parallel))]
    for of_size in of_sizes:
        sequences, rest = divmod(global_batch, of_size.data_parallel)
        if not rest and sequences:
            sizes = [each for each in sorted(set(micro_batches or MICRO_BATCHES)) if sequences % each == 0]
            found += [replace(of_size, micro_batch=micro, accumulation=sequences // micro) for micro in sizes]
    if not found:
        units = {of_size.data_parallel * micro for of_size in of_sizes for micro in micro_batches or [1]}
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
    layouts: Iterable[Job], forecast_of: Callable[[Job], Forecast]
) -> tuple[list[Forecast], list[tuple[Job, str]]]:
    """Return the layouts that fit into memory, the fastest first, and the others, each with the reason.

    ``layouts`` must be sorted. Of the others, the smallest micro-batch of each tensor-parallel size is returned.
    """
    fitting: list[Forecast] = []
    unfit: list[tuple[Job, str]] = []
    for layout in layouts:
        if all(layout.tensor_parallel != other.tensor_parallel for other, _ in unfit):
            try:
                fitting.append(forecast_of(layout))
            except DoesNotFit as error:
                unfit.append((layout, error.rule))
    return sorted(fitting, key=lambda found: found.predicted.iteration_s), unfit


def parts_of(found: Forecast) -> dict[str, float | str]:
    """Return the seconds of the iteration's parts: compute with the fixed time, exposed network and exposed update.

    ``limited_by`` is the part whose removal would shorten the iteration the most.
    """
    all_s, without_network_s, _ = found.phases_s
    only_network = replace(found.job.work, forward_flops=0.0, backward_flops=0.0)
    rates = replace(found.rates, overheads=NO_OVERHEADS)
    communication_s = found.job.accumulation * (only_network.forward_s(rates) + only_network.backward_s(rates))
    network_s, compute_s = all_s - without_network_s, without_network_s + found.predicted.fixed_s
    update_s = found.predicted.iteration_s - compute_s - network_s
    gains = {"compute": compute_s + network_s - communication_s, "network": network_s, "update": update_s}
    parts_s = {"compute_s": compute_s, "exposed_network_s": network_s, "exposed_update_s": update_s}
    return {**parts_s, "limited_by": max(gains, key=lambda name: gains[name])}
