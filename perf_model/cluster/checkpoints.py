"""Compute the memory of activation checkpoints (arXiv 2104.04473, section 3.5)."""

from __future__ import annotations

from math import sqrt


def activation_bytes(layers: int, checkpoints: float, input_bytes: float, intermediate_bytes: float) -> float:
    """Return the bytes of activations of a stage of ``layers`` layers with this number of checkpoints.

    ``input_bytes`` are those of the input of a layer, which a checkpoint stores, and ``intermediate_bytes`` those of
    all activations inside a layer, which are recomputed from one checkpoint to the next.
    """
    return checkpoints * input_bytes + layers / checkpoints * intermediate_bytes


def best_number_of_checkpoints(layers: int, input_bytes: float, intermediate_bytes: float) -> float:
    """Return the number of checkpoints with the least memory. It is at most one per layer in practice."""
    return sqrt(layers * intermediate_bytes / input_bytes)
