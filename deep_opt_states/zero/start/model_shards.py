"""Check that ranks that share a model, by AutoTP or by an ``mpu``, have shards of the same sizes.

Rank 0 plans for all ranks, so all of them must have the same units. Data-parallel ranks always have: DeepSpeed pads
their partitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from deep_opt_states.names import CONFIG_KEY
from deep_opt_states.zero.internals.agreement import gather_values
from deep_opt_states.zero.start.unsupported import Unsupported
from perf_model.schedule.workload import Partition


def check_even_shards(sub_groups: Sequence[Sequence[Partition]]) -> None:
    """Raise ``Unsupported`` on every rank if this rank's partitions have other sizes than another rank's.

    ``sub_groups`` has the partitions of this rank. This is a collective over all ranks.
    """
    partitions = [(partition.name, partition.numel) for sub_group in sub_groups for partition in sub_group]
    by_rank = gather_values(partitions)
    if all(other == by_rank[0] for other in by_rank):
        return
    rank = next(rank for rank, other in enumerate(by_rank) if other != by_rank[0])
    pairs = zip_longest(by_rank[0], by_rank[rank], fillvalue=("parameters", 0))
    (name, numel), (other_name, other_numel) = next(pair for pair in pairs if pair[0] != pair[1])
    raise Unsupported(
        f"tensor_parallel.autotp_size, or the model-parallel size of the mpu: must divide the layers into shards of "
        f"the same sizes on all ranks, found {numel:,} elements of {name} on rank 0 and {other_numel:,} elements of "
        f"{other_name} on rank {rank}.\n"
        f"Choose a size that divides the attention heads, the key-value heads and the widths of the model: AutoTP "
        f"divides others unevenly. Without tensor parallelism, build the same model on every rank. "
        f'Or set "enabled": false in "{CONFIG_KEY}".'
    )
