"""Test which rank gets which cores, on simulated machines of all sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deep_opt_states.config import ConfigError
from deep_opt_states.host.cores import CoreShare, RankPlace, choose_cores, part_of_quota
from deep_opt_states.host.machine import Core


def machine_of(cores_per_node: Sequence[int], smt: int = 1, holes: frozenset[int] = frozenset()) -> tuple[Core, ...]:
    """Return the cores of a machine with ``cores_per_node`` physical cores on each NUMA node.

    Logical CPUs are numbered by first threads first. The CPUs in ``holes`` are missing.
    """
    total = sum(cores_per_node)
    nodes = [node for node, count in enumerate(cores_per_node) for _ in range(count)]
    cpus = [tuple(core + thread * total for thread in range(smt)) for core in range(total)]
    remaining = [tuple(cpu for cpu in siblings if cpu not in holes) for siblings in cpus]
    return tuple(Core(cpus=siblings, node=node) for siblings, node in zip(remaining, nodes, strict=True) if siblings)


def node_of(
    cores: tuple[Core, ...], gpu_nodes: Sequence[int | None], quota: float | None = None
) -> tuple[RankPlace, ...]:
    return tuple(
        RankPlace(cores=cores, gpu_node=gpu_node, quota=part_of_quota(quota, rank, len(gpu_nodes)))
        for rank, gpu_node in enumerate(gpu_nodes)
    )


def shares(places: Sequence[RankPlace], **options: bool | int) -> list[CoreShare]:
    keywords: dict[str, bool | int] = {"on_accelerator": True, **options}
    return [choose_cores(places, rank, **keywords) for rank in range(len(places))]  # type: ignore[arg-type]


def physical(places: Sequence[RankPlace], cpus: Sequence[int]) -> set[Core]:
    return {core for place in places for core in place.cores if set(core.cpus) & set(cpus)}


def test_eight_ranks_share_the_cores_of_the_two_sockets_of_their_gpus() -> None:
    places = node_of(machine_of([32, 32], smt=2), [0] * 4 + [1] * 4)
    first, *_, last = shares(places)
    # Two launch cores per rank: the main thread or autograd's keeps one busy, and NCCL's and others need another.
    assert first.cores == tuple(range(6))
    assert first.launch_cores == (6, 7, 70, 71)
    assert last.cores == tuple(range(56, 62))
    assert last.launch_cores == (62, 63, 126, 127)
    assert str(first) == (
        "6 threads on CPU 0-5, all others of the process on CPU 6-7,70-71 (8 of 64 physical cores, on NUMA node 0 like "
        "its GPU)"
    )


def test_a_rank_gets_cores_near_its_gpu_whatever_its_number() -> None:
    a, b, c, d = shares(node_of(machine_of([4, 4]), [1, 0, 1, 0]))
    assert [share.cores + share.launch_cores for share in (a, b, c, d)] == [(4, 5), (0, 1), (6, 7), (2, 3)]


def test_shares_are_even_and_in_order_if_the_nodes_are_unknown() -> None:
    a, b, c = shares(node_of(machine_of([8]), [None] * 3))
    assert [share.cores + share.launch_cores for share in (a, b, c)] == [(0, 1, 2), (3, 4, 5), (6, 7)]


def test_a_single_rank_stays_on_the_node_of_its_gpu() -> None:
    (share,) = shares(node_of(machine_of([16, 16, 16, 16]), [2]))
    assert share.cores == tuple(range(32, 46))
    assert share.launch_cores == (46, 47)


def test_shares_are_even_if_near_cores_would_be_less_than_half_an_even_share() -> None:
    """Check it for an affinity with only 2 cores of node 0: all ranks would wait for those on node 0."""
    cores = machine_of([2, 30])
    assert [share.threads for share in shares(node_of(cores, [0, 0, 1, 1]))] == [6] * 4
    first = shares(node_of(cores, [1, 0]))[1]
    assert set(first.cores + first.launch_cores) == set(range(16)), "the cores are near as far as possible"


def test_a_rank_that_the_launcher_bound_uses_all_its_cores() -> None:
    """Check the case of ``deepspeed --bind_cores_to_rank``: each rank has CPUs of its own, wherever its GPU is."""
    cores = machine_of([4, 4])
    places = [RankPlace(cores=cores[5:8], gpu_node=0), RankPlace(cores=cores[:5], gpu_node=1)]
    a, b = shares(places)
    assert (a.cores, a.launch_cores) == ((5, 6), (7,))
    assert (b.cores, b.launch_cores) == ((0, 1, 2), (3, 4)), "2 of more than 3 cores are launch cores"


def test_ranks_that_the_launcher_bound_to_the_same_cores_divide_them() -> None:
    """Check the case of ``torchrun --numa-binding=node``."""
    cores = machine_of([4, 4])
    places = [RankPlace(cores=part, gpu_node=node) for part, node in ((cores[4:], 1), (cores[:4], 0)) for _ in range(2)]
    assert [share.cores + share.launch_cores for share in shares(places)] == [(4, 5), (6, 7), (0, 1), (2, 3)]


def test_nothing_is_bound_if_affinities_overlap_in_part() -> None:
    cores = machine_of([12])
    places = [RankPlace(cores=cores[:8]), RankPlace(cores=cores[4:]), RankPlace(cores=cores[:4])]
    a, b, c = shares(places)
    assert [share.cores for share in (a, b, c)] == [()] * 3
    assert "overlap in part" in str(a)
    assert [share.threads for share in (a, b, c)] == [1, 2, 1], "2 of 4 cores are launch cores, and 1 of 2"


def test_nothing_is_bound_if_there_are_fewer_cores_than_ranks() -> None:
    for share in shares(node_of(machine_of([2], smt=2), [None] * 3)):
        assert (share.threads, share.cores, share.launch_cores) == (1, (), ())
        assert str(share) == "1 thread, not bound (1 of 2 physical cores, 3 ranks share them)"


def test_with_one_core_per_rank_the_launch_core_is_the_sibling_or_else_the_core_itself() -> None:
    a, b = shares(node_of(machine_of([2], smt=2), [None] * 2))
    assert (a.cores, a.launch_cores, b.cores, b.launch_cores) == ((0,), (2,), (1,), (3,))
    a, b = shares(node_of(machine_of([2]), [None] * 2))
    assert (a.cores, a.launch_cores, b.cores, b.launch_cores) == ((0,), (0,), (1,), (1,))


def test_cores_beyond_the_cgroups_limit_are_launch_cores() -> None:
    a, b = shares(node_of(machine_of([16]), [None] * 2, quota=9.5))
    assert (a.threads, b.threads) == (3, 2)
    assert a.launch_cores == (3, 4, 5, 6, 7)
    assert "8 of 16 physical cores, of which the cgroup's limit allows 5" in str(a)


def test_on_the_cpu_accelerator_all_cores_of_the_share_update_and_nothing_is_bound() -> None:
    for share in shares(node_of(machine_of([8], smt=2), [None] * 2), on_accelerator=False):
        assert (share.threads, share.cores, share.launch_cores) == (4, (), ())
        assert "forward and backward also run on them" in str(share)


def test_bind_cores_false_keeps_the_number_of_threads() -> None:
    places = node_of(machine_of([8]), [None] * 2)
    for bound, unbound in zip(shares(places), shares(places, bind=False), strict=True):
        assert (unbound.threads, unbound.cores, unbound.launch_cores) == (bound.threads, (), ())
        assert '"bind_cores" is false' in str(unbound)


@pytest.mark.parametrize(
    ("cpu_threads", "cores", "launch_cores"),
    [
        (1, (0,), (1, 2, 3, 9, 10, 11)),
        (3, (0, 1, 2), (3, 11)),
        (4, (0, 1, 2, 3), (8, 9, 10, 11)),
        (6, (0, 1, 2, 3, 8, 9), (10, 11)),
        (8, (0, 1, 2, 3, 8, 9, 10, 11), (0, 1, 2, 3, 8, 9, 10, 11)),
        (9, (), ()),
    ],
)
def test_cpu_threads_overrides_the_number_of_threads(
    cpu_threads: int, cores: tuple[int, ...], launch_cores: tuple[int, ...]
) -> None:
    share, _ = shares(node_of(machine_of([8], smt=2), [None] * 2), cpu_threads=cpu_threads)
    assert (share.threads, share.cores, share.launch_cores) == (cpu_threads, cores, launch_cores)
    assert '"cpu_threads"' in str(share)


def test_more_cpu_threads_than_cpus_are_refused() -> None:
    places = node_of(machine_of([8], smt=2), [None] * 2)
    with pytest.raises(ConfigError) as caught:
        choose_cores(places, 0, on_accelerator=True, cpu_threads=17)
    assert str(caught.value) == (
        "deep_optimizer_states.cpu_threads: must be at most the 16 CPUs that a rank may use (affinity 16, cgroup limit "
        "none), found 17.\n"
        "Leave it out for the number that fits this machine, or give the rank more CPUs (taskset, docker --cpus, Slurm "
        "--cpus-per-task)."
    )
    with pytest.raises(ConfigError, match=r"at most the 3 CPUs .* cgroup limit 3 for this rank\), found 4"):
        choose_cores(node_of(machine_of([8]), [None] * 2, quota=6), 1, on_accelerator=False, cpu_threads=4)


def test_the_ranks_of_a_container_divide_its_quota() -> None:
    assert [part_of_quota(7.9, rank, 3) for rank in range(3)] == [3, 2, 2]
    assert [part_of_quota(0.5, rank, 2) for rank in range(2)] == [1, 1]
    assert part_of_quota(None, 0, 2) is None


@st.composite
def nodes(draw: st.DrawFn) -> tuple[RankPlace, ...]:
    """Draw ranks that all may use the same cores of a machine."""
    smt = draw(st.integers(1, 2))
    cores_per_node = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    cpus = range(smt * sum(cores_per_node))
    holes = draw(st.just(frozenset[int]()) | st.frozensets(st.sampled_from(cpus), max_size=len(cpus) - 1))
    known = st.integers(0, len(cores_per_node) - 1)
    gpu_nodes = draw(st.lists(draw(st.sampled_from([known, known | st.none()])), min_size=1, max_size=8))
    quota = draw(st.none() | st.floats(0.1, 60))
    cores = machine_of(cores_per_node, smt, holes)
    if not draw(st.booleans()):
        cores = tuple(replace(core, node=None) for core in cores)
    return node_of(cores, gpu_nodes, quota)


@given(nodes(), st.booleans(), st.booleans())
def test_shares_use_no_more_than_the_allowed_cores(
    places: tuple[RankPlace, ...], on_accelerator: bool, bind: bool
) -> None:
    chosen = shares(places, on_accelerator=on_accelerator, bind=bind)
    assert chosen == shares(places, on_accelerator=on_accelerator, bind=bind)
    num_cores = len(places[0].cores)
    assert all(share.threads >= 1 for share in chosen)
    assert sum(share.threads for share in chosen) <= max(num_cores, len(places))
    for share, place in zip(chosen, places, strict=True):
        assert set(share.cores + share.launch_cores) <= place.cpus
        assert share.threads <= (place.quota or num_cores)
    assert all(share.cores for share in chosen) == (on_accelerator and bind and num_cores >= len(places))


@given(nodes())
def test_no_physical_core_has_two_ranks_or_both_launches_and_updates(places: tuple[RankPlace, ...]) -> None:
    chosen = shares(places)
    taken: set[Core] = set()
    for share in chosen:
        update, launch = physical(places, share.cores), physical(places, share.launch_cores)
        assert len(update) == len(share.cores), "two threads are pinned to hyperthread siblings"
        assert not (update | launch) & taken
        taken |= update | launch
        if len(update | launch) > 1:
            assert launch
            assert not update & launch
    if len(places[0].cores) >= len(places) and not {place.gpu_node for place in places} - {None}:
        sizes = [len(physical(places, share.cores + share.launch_cores)) for share in chosen]
        assert sum(sizes) == len(places[0].cores)
        assert max(sizes) - min(sizes) <= 1


@given(nodes())
def test_cores_are_near_the_gpu_if_every_rank_gets_half_of_an_even_share(
    places: tuple[RankPlace, ...],
) -> None:
    cores, gpu_nodes = places[0].cores, [place.gpu_node for place in places]
    on = [core.node for core in cores]
    smallest = min(on.count(node) // gpu_nodes.count(node) for node in gpu_nodes)
    near = [
        {core.node for core in physical(places, share.cores + share.launch_cores)} == {place.gpu_node}
        for share, place in zip(shares(places), places, strict=True)
    ]
    if None not in gpu_nodes and smallest >= 1 and 2 * smallest >= len(cores) // max(len(places), len(set(on))):
        assert all(near)


@given(nodes(), st.integers(1, 40))
def test_cpu_threads_is_the_number_of_threads_or_is_refused(places: tuple[RankPlace, ...], cpu_threads: int) -> None:
    for rank, place in enumerate(places):
        if cpu_threads > place.max_threads:
            with pytest.raises(ConfigError, match=r"cpu_threads: must be at most"):
                choose_cores(places, rank, on_accelerator=True, cpu_threads=cpu_threads)
            continue
        share = choose_cores(places, rank, on_accelerator=True, cpu_threads=cpu_threads)
        assert share.threads == cpu_threads
        assert len(set(share.cores)) in (0, cpu_threads)
        if share.cores:
            others = [shares(places)[other] for other in range(len(places)) if other != rank]
            assert not physical(places, share.cores) & {
                core for other in others for core in physical(places, other.cores + other.launch_cores)
            }


@pytest.mark.parametrize(
    ("num_cores", "num_launch_cores"), [(2, 1), (3, 1), (4, 2), (8, 2), (12, 2), (16, 2), (23, 2), (24, 3), (64, 8)]
)
def test_at_least_two_cores_are_launch_cores_on_large_shares(num_cores: int, num_launch_cores: int) -> None:
    (share,) = shares(node_of(machine_of([num_cores]), [0]))
    assert share.threads == num_cores - num_launch_cores
    assert len(share.launch_cores) == num_launch_cores


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 2))
def test_a_rank_that_was_bound_uses_exactly_its_own_cores(ranks: int, cores_each: int, smt: int) -> None:
    cores = machine_of([ranks * cores_each], smt)
    places = [
        RankPlace(cores=cores[rank * cores_each : (rank + 1) * cores_each], gpu_node=rank % 2) for rank in range(ranks)
    ]
    for share, place in zip(shares(places), places, strict=True):
        # From 4 cores on, 2 are launch cores: of fewer, a second one would cost the update half of its threads or more.
        assert share.threads == max(1, cores_each - (2 if cores_each >= 4 else 1))
        assert physical(places, share.cores + share.launch_cores) == set(place.cores)
