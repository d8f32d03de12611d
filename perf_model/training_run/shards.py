"""Divide the parameters of a model among tensor-parallel ranks, as AutoTP does."""

from __future__ import annotations

from perf_model.training_run.model import has_weight_decay


def shard_numel(name: str, numel: int, tensor_parallel: int) -> int:
    """Return the elements of the parameter ``name``, of ``numel`` elements, that a tensor-parallel rank has.

    AutoTP divides matrices. Norms and biases are counted as whole, although it divides some of the biases.
    """
    return -(-numel // tensor_parallel) if has_weight_decay(name) else numel
