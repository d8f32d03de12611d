"""Divide the parameters of a model among tensor-parallel ranks, as AutoTP does."""

from __future__ import annotations


def shard_numel(name: str, numel: int, tensor_parallel: int) -> int:
    """Return the elements of the parameter ``name``, of ``numel`` elements, that a tensor-parallel rank has.

    AutoTP divides matrices. Norms and biases are counted as whole, although it divides some of the biases.
    """
    is_vector = "norm" in name or ".ln_" in name or name.endswith(".bias")
    return numel if is_vector else -(-numel // tensor_parallel)
