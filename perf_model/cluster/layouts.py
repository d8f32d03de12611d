"""List the layouts in which DeepSpeed can train a global batch: tensor-parallel size, micro-batch and accumulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from perf_model.training_run.model import ModelError, ModelShape, require_integer

MAX_MICRO_BATCH = 64
"""The largest micro-batch that is tried, in sequences."""


class Layout(NamedTuple):
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
    """A model, a global batch in sequences, and the GPUs that train it, which are those of a ``Job``."""

    shape: ModelShape
    gpus: int
    ranks_per_node: int
    global_batch: int
    sequence: int

    def __post_init__(self) -> None:
        require_integer("global_batch", self.global_batch, 1, 10**9, "Correct --global-batch.")

    @property
    def ranks_on_node(self) -> int:
        """Return the number of ranks on each node."""
        return min(self.ranks_per_node, self.gpus)

    @property
    def micro_batches(self) -> range:
        """Return the micro-batches that are tried if the user names none."""
        return range(1, MAX_MICRO_BATCH + 1)

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
                rule = f"tensor_parallel: must divide the number of ranks of a node, {self.ranks_on_node}, found {size}"
                raise ModelError(f"{rule}.\nCorrect --tensor-parallel.")
            sequences, rest = divmod(self.global_batch, self.gpus // size)
            if not rest and sequences:
                sizes = [each for each in sorted(set(micro_batches or self.micro_batches)) if sequences % each == 0]
                found += [Layout(size, self.gpus // size, micro, sequences // micro) for micro in sizes]
        if not found:
            units = {self.gpus // size * micro for size in tensor_parallel for micro in micro_batches or [1]}
            least = sorted(unit for unit in units if not any(unit % other == 0 for other in units - {unit}))
            below = max(self.global_batch // unit * unit for unit in units)
            above = min(-(-self.global_batch // unit) * unit for unit in units)
            times = " times the micro-batch" if micro_batches else ""
            raise ModelError(
                f"global_batch: must be a multiple of the data-parallel size{times}, here of "
                f"{' or '.join(map(str, least))}, found {self.global_batch}.\n"
                f"Give --global-batch {f'{below} or {above}' if below else above}, or another number of --gpus."
            )
        return found
