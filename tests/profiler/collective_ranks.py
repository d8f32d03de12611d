"""Measure collectives over Gloo, among ranks that are on one node or on several; ``test_collectives.py`` starts it.

The argument is the number of ranks per node.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import torch

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.profiler import ranks as ranks_module
from deep_opt_states.profiler.probes import ProbeError
from deep_opt_states.profiler.profile import sample
from deep_opt_states.profiler.ranks import ProcessGroup, Ranks, collective, collective_groups, launched_ranks
from tests.launch import answer
from tests.profiler.test_profile import SMALL

WHOLE_BYTES = 2**18


def measured(ranks: Ranks, group: ProcessGroup | str, *, reduces: bool = False) -> Any:
    """Return the samples in bytes per second, or why there is no group."""
    if isinstance(group, str):
        return group
    prepare = partial(collective, HostDevice(), group, WHOLE_BYTES, "rate", reduces=reduces)
    return [rates["rate"] for rates in sample(prepare, SMALL, ranks)]


def results(group: ProcessGroup | str) -> list[list[float]] | str:
    """Return what this rank gathers and reduces of the numbers of all ranks, or why there is no group."""
    if isinstance(group, str):
        return group
    part, whole = torch.full((2,), float(group.rank)), torch.empty(2 * group.size)
    group.all_gather(whole, part)
    group.reduce_scatter(part, whole)
    return [whole.tolist(), part.tolist()]


def why_waived(ranks: Ranks) -> str:
    """Return the reason if rank 1 fails and rank 0 waits for it in a collective."""
    with mock.patch.object(ranks_module, "TIMEOUT", timedelta(seconds=1)):
        group = collective_groups(ranks, "gloo", {}).in_node
    assert not isinstance(group, str), group
    if ranks.rank == 1:
        group = mock.Mock(rank=group.rank, size=group.size, all_gather=mock.Mock(side_effect=MemoryError("on purpose")))
    try:
        measured(ranks, group)
    except ProbeError as error:
        return str(error)
    return "no error"


with launched_ranks(os.environ) as ranks:
    groups = collective_groups(ranks, "gloo", {"LOCAL_WORLD_SIZE": sys.argv[1]})
    answer(
        {
            "all-gather in a node": measured(ranks, groups.in_node),
            "reduce-scatter in a node": measured(ranks, groups.in_node, reduces=True),
            "all-gather across nodes": measured(ranks, groups.across_nodes),
            "places": [
                None if isinstance(group, str) else [group.rank, group.size]
                for group in (groups.in_node, groups.across_nodes)
            ],
            "results": results(groups.in_node),
            "after a failure": why_waived(ranks),
            "without a backend": collective_groups(ranks, "no_such_backend", {}).in_node,
        }
    )
