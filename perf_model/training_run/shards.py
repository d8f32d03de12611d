"""Divide the parameters of a model among tensor-parallel ranks, as AutoTP does."""

from __future__ import annotations

from perf_model.training_run.model import has_weight_decay


def shard_numel(name: str, numel: int, tensor_parallel: int) -> int:
    """Return the elements of the parameter ``name``, of ``numel`` elements, that a tensor-parallel rank has.

    AutoTP divides the matrices of layers. It leaves embeddings whole, but under ``zero.Init``, as with Hugging Face
    ``Trainer``, they are partitioned over all ranks, which gives each rank as much as a division does. Without
    ``zero.Init`` a rank has ``tensor_parallel`` times as much of the embeddings as this function returns. Norms and
    biases are counted as whole: they are small.
    """
    return -(-numel // tensor_parallel) if has_weight_decay(name) else numel
