"""Test the probes of collectives: exact rates on a virtual clock, nodes, and real ranks over Gloo."""

from __future__ import annotations

import platform

import pytest
import torch

from deep_opt_states.profiler.ranks import (
    COLLECTIVES,
    CollectiveGroups,
    Ranks,
    collective,
    collective_groups,
    ranks_by_node,
)
from perf_model.prediction.hardware import QUANTITIES
from tests.launch import run_ranks
from tests.profiler.test_profile import SMALL
from tests.profiler.threads import on_ranks
from tests.profiler.virtual import VirtualDevice

WHOLE_BYTES = 8 * 1000

LATE_S, COLLECTIVE_S = 0.5, 1e-3
"""The seconds of the first collective of a repetition, which waits for the last rank, and of each later one."""


class GroupOfThreads:
    """A group of ranks that are threads. Its collectives take time on the stream of this rank's virtual device."""

    def __init__(self, ranks: Ranks, device: VirtualDevice) -> None:
        self._ranks = ranks
        self._device = device
        self._issued = 0
        self.rank, self.size = ranks.rank, ranks.size

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        whole.copy_(torch.cat(self._ranks.gather(part)))
        self._run()

    def reduce_scatter(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        part.copy_(sum(other.view(self.size, -1)[self.rank] for other in self._ranks.gather(whole)))
        self._run()

    def _run(self) -> None:
        self._device.issuing.run(COLLECTIVE_S if self._issued % (1 + COLLECTIVES) else LATE_S)
        self._issued += 1
        self._ranks.gather(None)


@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_rate_of_a_collective_leaves_out_the_own_part_and_the_wait_for_the_last_rank(
    reduces: bool, size: int
) -> None:
    def program(ranks: Ranks) -> float:
        """Return the rate of the second repetition."""
        device = VirtualDevice()
        repeat = collective(device, GroupOfThreads(ranks, device), WHOLE_BYTES, "rate", reduces=reduces)
        repeat()
        return repeat()["rate"]

    passed_bytes = WHOLE_BYTES * (size - 1) / size
    assert on_ranks(size, program) == [pytest.approx(passed_bytes / COLLECTIVE_S)] * size


# The groups


@pytest.mark.parametrize(
    ("hosts", "local_world_size", "nodes"),
    [
        ("aaaa", None, [[0, 1, 2, 3]]),
        ("aabb", "2", [[0, 1], [2, 3]]),
        ("abab", None, [[0, 2], [1, 3]]),
        ("aaaa", "2", [[0, 1], [2, 3]]),
    ],
)
def test_ranks_of_one_host_name_are_on_one_node_unless_torchrun_started_fewer_there(
    hosts: str, local_world_size: str | None, nodes: list[list[int]]
) -> None:
    gathered = iter([[(host, local_world_size) for host in hosts]])

    class OnHosts(Ranks):
        def gather(self, value: object) -> list[object]:
            return next(gathered)

    assert ranks_by_node(OnHosts(), {}) == nodes


def test_no_group_is_created_for_one_rank_or_for_nodes_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    assert collective_groups(Ranks(), "gloo", {}) == CollectiveGroups(in_node="one rank", across_nodes="one rank")
    names = iter("aab")
    monkeypatch.setattr(platform, "node", lambda: next(names))
    expected = CollectiveGroups(
        in_node="one rank on a node", across_nodes="the nodes have different numbers of ranks, 1 to 2"
    )
    assert on_ranks(3, lambda ranks: collective_groups(ranks, "gloo", {})) == [expected] * 3


@pytest.mark.parametrize(
    ("world_size", "ranks_per_node", "in_node", "across_nodes"),
    [(2, 2, None, "one node"), (4, 2, None, None), (2, 1, "one rank on a node", None)],
    ids=["one node", "two nodes", "two nodes of one rank"],
)
def test_collectives_over_gloo_are_right_and_agreed(
    world_size: int, ranks_per_node: int, in_node: str | None, across_nodes: str | None
) -> None:
    finished = run_ranks(world_size, ["-m", "tests.profiler.collective_ranks", str(ranks_per_node)], timeout_s=100)
    for rank in finished:
        assert rank.returncode == 0, rank.output[-5000:]
    answers = [answer for rank in finished for answer in rank.answers()]
    assert len(answers) == world_size
    for rank, answer in enumerate(answers):
        places = [rank % ranks_per_node, ranks_per_node], [rank // ranks_per_node, world_size // ranks_per_node]
        assert answer.pop("places") == [
            None if why else place for why, place in zip((in_node, across_nodes), places, strict=True)
        ]
        if in_node is None:
            ranks, own = [float(other) for other in range(ranks_per_node)], float(rank % ranks_per_node)
            gathered = [other for other in ranks for _ in range(2)]
            assert answer.pop("results") == [gathered, [own * ranks_per_node] * 2]
        else:
            assert answer.pop("results") == in_node
    assert answers == answers[:1] * world_size, "the same samples and reasons on all ranks"
    (seen,) = answers[:1]
    assert "rank 1: MemoryError: on purpose" in seen.pop("after a failure")
    assert "no_such_backend" in seen.pop("without a backend").lower()
    for name, samples in seen.items():
        why = across_nodes if name == "all-gather across nodes" else in_node
        if why is not None:
            assert samples == why
        else:
            assert len(samples) >= SMALL.min_samples
            assert all(0 < rate < QUANTITIES["all_gather_bytes_per_s"].high for rate in samples)
