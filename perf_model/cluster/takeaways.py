"""State where the fastest layout departs from the three takeaways of the Megatron paper, and why.

The takeaways are in sections 3.2 to 3.4 of arXiv 2104.04473. They are about a pipeline whose states are on the GPU, so
a layout with ZeRO-3 and offloading may depart from them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from perf_model.cluster.prediction import LayoutPrediction
from perf_model.units import percent

NEGLIGIBLY_LONGER = 1.005
"""The ratio of two iterations up to which they count as equally long."""


def departures(fitting: Sequence[LayoutPrediction], node_size: int, compared: Collection[int]) -> list[str]:
    """Return a sentence per takeaway that the first of ``fitting``, the fastest, departs from.

    ``fitting`` are all layouts that fit into memory, the fastest first. ``node_size`` is the largest tensor-parallel
    size that a node and the model permit, and ``compared`` are the sizes of all layouts, whether they fit or not.
    """
    best = fitting[0]
    size = best.layout.tensor_parallel
    found = []
    if size < node_size:
        found.append(
            "Takeaway 1 (tensor parallelism up to the GPUs of a node) is not followed: ZeRO-3 divides the model, too; "
            f"{_with_size(fitting, node_size, compared)}."
        )
    least = min(other.layout.tensor_parallel for other in fitting)
    if least < size:
        found.append(
            "Takeaway 2 (a model-parallel size just large enough to fit, and data parallelism for the rest) is not "
            f"followed: {_with_size(fitting, least, compared)}, limited by {_fastest(fitting, least).binding}."
        )
    larger = [
        other
        for other in fitting
        if other.layout.tensor_parallel == size and other.layout.micro_batch > best.layout.micro_batch
    ]
    other = max(larger, key=lambda found: found.layout.micro_batch, default=best)
    if other.iteration_s > NEGLIGIBLY_LONGER * best.iteration_s:
        found.append(
            "Takeaway 3 (the micro-batch by equation 1) is not followed: without a pipeline it gives the largest that "
            f"fits, but with {other.layout.micro_batch} sequences an iteration takes "
            f"{_longer(other, best)}, limited by {other.binding}."
        )
    return found


def _fastest(fitting: Sequence[LayoutPrediction], tensor_parallel: int) -> LayoutPrediction:
    return next(other for other in fitting if other.layout.tensor_parallel == tensor_parallel)


def _with_size(fitting: Sequence[LayoutPrediction], tensor_parallel: int, compared: Collection[int]) -> str:
    """Return how much longer the fastest layout with another tensor-parallel size takes, or why there is none."""
    if tensor_parallel not in compared:
        return f"t = {tensor_parallel} was not compared"
    if all(other.layout.tensor_parallel != tensor_parallel for other in fitting):
        return f"none with t = {tensor_parallel} fits"
    return f"with t = {tensor_parallel} an iteration takes {_longer(_fastest(fitting, tensor_parallel), fitting[0])}"


def _longer(other: LayoutPrediction, best: LayoutPrediction) -> str:
    return f"{percent(other.iteration_s / best.iteration_s - 1)} longer"
