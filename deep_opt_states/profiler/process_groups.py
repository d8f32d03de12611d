"""Create the groups of ranks whose collectives are measured: those of one node, and one rank of each node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed

from deep_opt_states.profiler.provenance import ranks_by_node
from deep_opt_states.profiler.ranks import ProbeError, Ranks, call_on_all_ranks

TIMEOUT = timedelta(seconds=60)
"""The time after which a collective fails because another rank takes no part in it."""

ONE_RANK = "one rank"

# PyTorch 2.13 warns about the older names, which DeepSpeed uses.
_ALL_GATHER = getattr(torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(torch.distributed, "reduce_scatter_single", torch.distributed.reduce_scatter_tensor)


class CollectiveGroup(Protocol):
    """Ranks that communicate, as one of them sees them."""

    @property
    def rank(self) -> int:
        """Return the number of this rank in the group."""

    @property
    def size(self) -> int:
        """Return the number of ranks in the group."""

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Gather every rank's ``part``, [n], in ``whole``, [n * size], in the order of the ranks."""

    def reduce_scatter(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Sum every rank's ``whole``, [n * size], and write this rank's part of the sum to ``part``, [n]."""


@dataclass(frozen=True, kw_only=True)
class CollectiveGroups:
    """The groups whose collectives this rank measures. A string, the same on all ranks, is why there is no group.

    ``in_node`` are the ranks of this rank's node, and ``across_nodes`` are those with this rank's place on every node.
    All groups communicate at the same time.
    """

    in_node: CollectiveGroup | str
    across_nodes: CollectiveGroup | str

    @classmethod
    def none(cls, why: str) -> CollectiveGroups:
        """Return no groups, for the reason ``why``."""
        return cls(in_node=why, across_nodes=why)


class ProcessGroup:
    """The ranks of a process group of ``torch.distributed``, with the collectives that DeepSpeed calls."""

    def __init__(self, group: torch.distributed.ProcessGroup) -> None:
        self._group = group

    @property
    def rank(self) -> int:
        """Return the number of this rank in the group."""
        return torch.distributed.get_rank(self._group)

    @property
    def size(self) -> int:
        """Return the number of ranks in the group."""
        return torch.distributed.get_world_size(self._group)

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Gather every rank's ``part`` in ``whole``; the current stream waits for the result."""
        _ALL_GATHER(whole, part, group=self._group)

    def reduce_scatter(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Write this rank's part of the sum to ``part``; the current stream waits for the result."""
        _REDUCE_SCATTER(part, whole, group=self._group)


def collective_groups(ranks: Ranks, backend: str, environ: Mapping[str, str]) -> CollectiveGroups:
    """Return groups of ``ranks`` that communicate by ``backend``. A collective over all ranks, which raises no error.

    The groups exist until the default process group is destroyed.
    """
    if ranks.size == 1:
        return CollectiveGroups.none(ONE_RANK)
    nodes = ranks_by_node(ranks, environ)
    # The k-th ranks of all nodes are a group.
    across = list(zip(*nodes, strict=False))
    return CollectiveGroups(
        in_node=_why_not_in_node(nodes) or _own_group(ranks, nodes, backend),
        across_nodes=_why_not_across(nodes) or _own_group(ranks, across, backend),
    )


def _why_not_in_node(nodes: Sequence[Sequence[int]]) -> str:
    return "one rank on a node" if min(map(len, nodes)) == 1 else ""


def _why_not_across(nodes: Sequence[Sequence[int]]) -> str:
    if len(nodes) == 1:
        return "one node"
    counts = sorted(set(map(len, nodes)))
    return f"the nodes have different numbers of ranks, {counts[0]} to {counts[-1]}" if len(counts) > 1 else ""


def _own_group(ranks: Ranks, groups: Sequence[Sequence[int]], backend: str) -> ProcessGroup | str:
    """Create a process group for each of ``groups``, in which all ranks take part, and return this rank's own.

    Return the reason on all ranks if it failed on any of them.
    """

    def create() -> ProcessGroup:
        created = [torch.distributed.new_group(list(group), timeout=TIMEOUT, backend=backend) for group in groups]
        (with_this_rank,) = (group for group, members in zip(created, groups, strict=True) if ranks.rank in members)
        return ProcessGroup(with_this_rank)

    try:
        return call_on_all_ranks(ranks, create)
    except ProbeError as error:
        return str(error)
