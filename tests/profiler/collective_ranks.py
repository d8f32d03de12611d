"""Measure collectives over Gloo, among ranks that are on one node or on several; ``test_collectives.py`` starts it.

The argument is the number of ranks per node.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any
from unittest import mock

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.profiler import process_groups
from deep_opt_states.profiler.collectives import AllGather, ReduceScatter
from deep_opt_states.profiler.method import sample
from deep_opt_states.profiler.process_groups import CollectiveGroup, collective_groups
from deep_opt_states.profiler.ranks import ProbeError, Ranks, launched_ranks
from tests.launch import answer
from tests.profiler.test_profile import SMALL

WHOLE_BYTES = 2**18


def measured(ranks: Ranks, probe: type[AllGather | ReduceScatter], group: CollectiveGroup | str) -> Any:
    """Return the verified samples in bytes per second, or why there is no group."""
    if isinstance(group, str):
        return group
    return [rates["rate"] for rates in sample(lambda: probe(HostDevice(), group, WHOLE_BYTES, "rate"), SMALL, ranks)]


def why_waived(ranks: Ranks) -> str:
    """Return the reason if rank 1 fails and rank 0 waits for it in a collective."""
    with mock.patch.object(process_groups, "TIMEOUT", timedelta(seconds=1)):
        group = collective_groups(ranks, "gloo", {}).in_node
    assert not isinstance(group, str), group
    if ranks.rank == 1:
        group = mock.Mock(rank=group.rank, size=group.size, all_gather=mock.Mock(side_effect=MemoryError("on purpose")))
    try:
        measured(ranks, AllGather, group)
    except ProbeError as error:
        return str(error)
    return "no error"


with launched_ranks(os.environ) as ranks:
    groups = collective_groups(ranks, "gloo", {"LOCAL_WORLD_SIZE": sys.argv[1]})
    answer(
        {
            "all-gather in a node": measured(ranks, AllGather, groups.in_node),
            "reduce-scatter in a node": measured(ranks, ReduceScatter, groups.in_node),
            "all-gather across nodes": measured(ranks, AllGather, groups.across_nodes),
            "places": [
                None if isinstance(group, str) else [group.rank, group.size]
                for group in (groups.in_node, groups.across_nodes)
            ],
            "after a failure": why_waived(ranks),
            "without a backend": collective_groups(ranks, "no_such_backend", {}).in_node,
        }
    )
