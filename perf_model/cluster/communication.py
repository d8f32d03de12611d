"""Compute the communication of each kind of parallelism (arXiv 2104.04473, sections 3.2, 3.3 and 4.1).

Volumes are elements that one GPU sends; multiply by 2 for the bytes of 16-bit tensors.
"""

from __future__ import annotations

from perf_model.prediction.network import ring_share


def pipeline_elements(micro_batch: int, sequence: int, hidden: int) -> int:
    """Return the elements between two pipeline stages, per micro-batch and direction (section 3.2)."""
    return micro_batch * sequence * hidden


def scattered_pipeline_elements(micro_batch: int, sequence: int, hidden: int, tensor_parallel: int) -> float:
    """Return the same with the scatter/gather optimisation, by which each GPU sends a part (section 4.1)."""
    return pipeline_elements(micro_batch, sequence, hidden) / tensor_parallel


def tensor_parallel_elements(micro_batch: int, sequence: int, hidden: int, tensor_parallel: int) -> float:
    """Return the elements of the all-reduces of one layer per micro-batch, 8 b s h (t - 1) / t (section 3.2).

    Forward has two all-reduces, and so has backward. A ring all-reduce sends each element twice. Recomputation repeats
    those of forward, which this number does not contain.
    """
    share = (tensor_parallel - 1) / tensor_parallel
    return 8 * pipeline_elements(micro_batch, sequence, hidden) * share


def gradient_all_reduce_elements(numel: float, data_parallel: int) -> float:
    """Return the elements of the all-reduce of ``numel`` gradients, which runs once per iteration (section 3.3.1)."""
    return 2 * numel * ring_share(data_parallel)


def zero3_elements(numel: float, data_parallel: int) -> float:
    """Return the elements that ZeRO-3 sends per micro-batch for a model of ``numel`` parameters.

    Parameters are gathered in forward and in backward, and gradients are reduced (arXiv 1910.02054, section 7.2.2).
    """
    return 3 * numel * ring_share(data_parallel)
