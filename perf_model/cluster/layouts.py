"""List the layouts in which DeepSpeed can train a global batch: tensor-parallel size, micro-batch and accumulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perf_model.training_run.job import MAX_TOKENS
from perf_model.training_run.model import ModelError, ModelShape, require_integer

MAX_MICRO_BATCH = 64
"""The largest micro-batch that is tried, in sequences."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A way to train one global batch.

    Each of ``data_parallel`` groups of ``tensor_parallel`` ranks trains ``accumulation`` micro-batches of
    ``micro_batch`` sequences, one after another, for one update.
    """

    tensor_parallel: int
    data_parallel: int
    micro_batch: int
    accumulation: int


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A model, a global batch in sequences, and the GPUs that train it. Raise ``ModelError`` for impossible numbers."""

    shape: ModelShape
    gpus: int
    ranks_per_node: int
    global_batch: int
    sequence: int

    def __post_init__(self) -> None:
        maxima = {"gpus": 10**6, "ranks_per_node": 10**4, "global_batch": 10**9, "sequence": MAX_TOKENS}
        for key, most in maxima.items():
            require_integer(key, getattr(self, key), 1, most, f"Correct --{key.replace('_', '-')}.")

    @property
    def ranks_on_node(self) -> int:
        """Return the number of ranks on each node."""
        return min(self.ranks_per_node, self.gpus)

    @property
    def tokens(self) -> int:
        """Return the tokens of a global batch."""
        return self.global_batch * self.sequence

    @property
    def largest_micro_batch(self) -> int:
        """Return the largest micro-batch that is tried if the user names none."""
        return max(1, min(MAX_MICRO_BATCH, MAX_TOKENS // self.sequence))

    def tensor_parallel_sizes(self) -> list[int]:
        """Return the powers of two that divide the ranks of a node and the key-value heads of the model."""
        sizes = (2**power for power in range(self.ranks_on_node.bit_length()))
        return [size for size in sizes if self.ranks_on_node % size == 0 and self.shape.kv_heads % size == 0]

    def layouts(self, tensor_parallel: Sequence[int], micro_batches: Sequence[int] | None) -> list[Layout]:
        """Return the layouts with these sizes, by tensor-parallel size and micro-batch.

        If ``micro_batches`` is None, all divisors of the sequences of a rank are tried, up to ``MAX_MICRO_BATCH``.
        Raise ``ModelError`` if no layout divides the global batch evenly.
        """
        found = []
        for size in sorted(set(tensor_parallel)):
            if self.ranks_on_node % size:
                raise ModelError(
                    f"tensor_parallel: must divide the number of ranks of a node, {self.ranks_on_node}, found {size}.\n"
                    "Correct --tensor-parallel."
                )
            data_parallel = self.gpus // size
            sequences, rest = divmod(self.global_batch, data_parallel)
            if rest or not sequences:
                continue
            for micro_batch in sorted(set(micro_batches or range(1, self.largest_micro_batch + 1))):
                if sequences % micro_batch == 0:
                    found.append(
                        Layout(
                            tensor_parallel=size,
                            data_parallel=data_parallel,
                            micro_batch=micro_batch,
                            accumulation=sequences // micro_batch,
                        )
                    )
        if not found:
            raise ModelError(self._indivisible(tensor_parallel, micro_batches))
        return found

    def _indivisible(self, tensor_parallel: Sequence[int], micro_batches: Sequence[int] | None) -> str:
        """Return the error of a global batch that no layout divides, with the nearest batches that one divides."""
        units = {self.gpus // size * micro for size in tensor_parallel for micro in micro_batches or [1]}
        below = max(self.global_batch // unit * unit for unit in units)
        above = min(-(-self.global_batch // unit) * unit for unit in units)
        nearest = f"{below} or {above}" if below else str(above)
        divisor = "the data-parallel size times the micro-batch" if micro_batches else "the data-parallel size"
        least = (unit for unit in units if not any(unit % other == 0 for other in units - {unit}))
        multiples = " or ".join(map(str, sorted(least)))
        return (
            f"global_batch: must be a multiple of {divisor}, here of {multiples}, found {self.global_batch}.\n"
            f"Give --global-batch {nearest}, or another number of --gpus."
        )
