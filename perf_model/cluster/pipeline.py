"""Compute the costs of pipeline parallelism (arXiv 2104.04473, sections 2.2, 3.3 and 3.4).

DeepSpeed has no pipeline with ZeRO-3, so these functions serve as a comparison.
"""

from __future__ import annotations

from collections.abc import Callable


def bubble_share(stages: int, micro_batches: int) -> float:
    """Return the time in which a stage is idle, as a share of the time in which it computes (section 2.2.1)."""
    return (stages - 1) / micro_batches


def micro_batches_in_flight(stages: int, micro_batches: int) -> int:
    """Return the largest number of micro-batches whose activations the first stage keeps, with 1F1B (section 2.2.1)."""
    return min(stages, micro_batches)


def batch_s(sequences: int, micro_batch: int, stages: int, micro_batch_s: Callable[[int], float]) -> float:
    """Return the seconds of a batch of ``sequences`` per pipeline (section 3.4, equation 1).

    ``micro_batch_s`` returns the seconds of forward and backward of one stage for a micro-batch of a given size.
    Communication is not included.
    """
    return (sequences / micro_batch + stages - 1) * micro_batch_s(micro_batch)
