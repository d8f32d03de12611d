"""Test how the cores of a machine are read from the kernel's files, and which rank gets which cores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deep_opt_states.config import ConfigError
from deep_opt_states.host import machine
from deep_opt_states.host.cores import CoreShare, RankPlace, choose_cores, format_cpu_list, part_of_quota
from deep_opt_states.host.machine import Core, cores_of, gpu_node


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_hyperthread_siblings_are_one_core_with_the_cpus_that_are_allowed(tmp_path: Path) -> None:
    """Check it on two sockets with two cores of two threads each, numbered by first threads first as usual."""
    cpus, nodes = tmp_path / "cpu", tmp_path / "node"
    for cpu in range(8):
        write(cpus / f"cpu{cpu}/topology/thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}")
    write(nodes / "node0/cpulist", "0-1,4-5")
    write(nodes / "node1/cpulist", "2-3,6-7")
    # A node with memory only, such as for a GPU whose memory the CPU can address.
    write(nodes / "node2/cpulist", "")
    write(nodes / "online", "0-2")
    both = {"node": 0}, {"node": 1}
    assert cores_of(range(8), cpus, nodes) == tuple(Core(cpus=(cpu, cpu + 4), **both[cpu // 2]) for cpu in range(4))
    assert cores_of({7, 1, 6, 2}, cpus, nodes) == (
        Core(cpus=(1,), node=0),
        Core(cpus=(2, 6), node=1),
        Core(cpus=(7,), node=1),
    )
    write(cpus / "cpu3/topology/thread_siblings_list", "no list")
    unknown = (Core(cpus=(3,), node=None), Core(cpus=(9,), node=None))
    assert cores_of({3, 9}, cpus, tmp_path / "no node") == unknown, "the kernel reports no siblings"


@pytest.mark.parametrize(("text", "node"), [("1", 1), ("-1", None), ("", None), (None, None)])
def test_the_numa_node_of_a_gpu_is_read(
    text: str | None, node: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        write(tmp_path / "0001:3b:00.0/numa_node", text)
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {3: properties}.__getitem__)
    for has_cuda in (True, False):
        monkeypatch.setattr(machine, "has_cuda", lambda has_cuda=has_cuda: has_cuda)
        assert gpu_node(tmp_path) == (node if has_cuda else None)


def test_cpu_lists_are_parsed_and_formatted_as_by_the_kernel(tmp_path: Path) -> None:
    for text, cpus in {"0-2,8,10-11": (0, 1, 2, 8, 10, 11), "7": (7,), "": ()}.items():
        write(tmp_path / "list", text)
        assert machine._list_in(tmp_path / "list") == cpus
        assert format_cpu_list(reversed(cpus)) == text


def machine_of(cores_per_node: Sequence[int], smt: int = 1) -> tuple[Core, ...]:
    total = sum(cores_per_node)
    nodes = [node for node, count in enumerate(cores_per_node) for _ in range(count)]
    return tuple(Core(cpus=tuple(range(core, smt * total, total)), node=nodes[core]) for core in range(total))


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


def cpus_of(places: Sequence[RankPlace]) -> list[tuple[int, ...]]:
    return [share.cores + share.launch_cores for share in shares(places)]


def test_eight_ranks_share_the_cores_of_the_two_sockets_of_their_gpus() -> None:
    first, *_, last = shares(node_of(machine_of([32, 32], smt=2), [0] * 4 + [1] * 4))
    # Two launch cores per rank: the main thread or autograd's keeps one busy, and NCCL's and others need another.
    assert (first.cores, first.launch_cores) == (tuple(range(6)), (6, 7, 70, 71))
    assert (last.cores, last.launch_cores) == (tuple(range(56, 62)), (62, 63, 126, 127))
    assert str(first) == (
        "6 threads on CPU 0-5, all others of the process on CPU 6-7,70-71 (8 of 64 physical cores, on NUMA node 0 like "
        "its GPU)"
    )


def test_shares_are_near_the_gpus_unless_that_would_make_them_uneven() -> None:
    assert cpus_of(node_of(machine_of([4, 4]), [1, 0, 1, 0])) == [(4, 5), (0, 1), (6, 7), (2, 3)]
    assert cpus_of(node_of(machine_of([8]), [None] * 3)) == [(0, 1, 2), (3, 4, 5), (6, 7)]
    assert cpus_of(node_of(machine_of([16, 16, 16, 16]), [2])) == [tuple(range(32, 48))]
    # All ranks would wait for those on node 0, of which the affinity has 2 cores only.
    cores = machine_of([2, 30])
    assert [share.threads for share in shares(node_of(cores, [0, 0, 1, 1]))] == [6] * 4
    assert set(cpus_of(node_of(cores, [1, 0]))[1]) == set(range(16)), "the cores are near as far as possible"


def test_ranks_that_the_launcher_bound_use_or_divide_their_cores() -> None:
    """Check ``deepspeed --bind_cores_to_rank``, ``torchrun --numa-binding=node``, and sets that overlap in part."""
    cores = machine_of([4, 4])
    a, b = shares([RankPlace(cores=cores[5:8], gpu_node=0), RankPlace(cores=cores[:5], gpu_node=1)])
    assert (a.cores, a.launch_cores) == ((5, 6), (7,))
    assert (b.cores, b.launch_cores) == ((0, 1, 2), (3, 4)), "2 of more than 3 cores are launch cores"
    places = [RankPlace(cores=part, gpu_node=node) for part, node in ((cores[4:], 1), (cores[:4], 0)) for _ in range(2)]
    assert cpus_of(places) == [(4, 5), (6, 7), (0, 1), (2, 3)]
    cores = machine_of([12])
    overlapping = shares([RankPlace(cores=part) for part in (cores[:8], cores[4:], cores[:4])])
    assert [share.cores for share in overlapping] == [()] * 3
    assert "overlap in part" in str(overlapping[0])
    assert [share.threads for share in overlapping] == [1, 2, 1], "2 of 4 cores are launch cores, and 1 of 2"


def test_nothing_is_bound_on_the_cpu_accelerator_with_too_few_cores_or_without_bind_cores() -> None:
    for share in shares(node_of(machine_of([2], smt=2), [None] * 3)):
        assert (share.threads, share.cores, share.launch_cores) == (1, (), ())
        assert str(share) == "1 thread, not bound (1 of 2 physical cores, 3 ranks share them)"
    for share in shares(node_of(machine_of([8], smt=2), [None] * 2), on_accelerator=False):
        assert (share.threads, share.cores, share.launch_cores) == (4, (), ())
        assert "forward and backward also run on them" in str(share)
    for share in shares(node_of(machine_of([8]), [None] * 2), bind=False):
        assert (share.threads, share.cores, share.launch_cores) == (2, (), ())
        assert '"bind_cores" is false' in str(share)
    for share in shares(node_of(machine_of([8]), [None] * 2), cpu_threads=6):
        assert (share.threads, share.cores) == (6, ())
        assert "more threads than they have CPUs" in str(share)


def test_the_ranks_of_a_container_divide_its_quota_and_cores_beyond_it_are_launch_cores() -> None:
    assert [part_of_quota(7.9, rank, 3) for rank in range(3)] == [3, 2, 2]
    assert [part_of_quota(0.5, rank, 2) for rank in range(2)] == [1, 1]
    a, b = shares(node_of(machine_of([16]), [None] * 2, quota=9.5))
    assert (a.threads, b.threads, a.launch_cores) == (3, 2, (3, 4, 5, 6, 7))
    assert "8 of 16 physical cores, of which the cgroup's limit allows 5" in str(a)


@pytest.mark.parametrize(
    ("num_cores", "smt", "cpu_threads", "cores", "launch_cores"),
    [
        (1, 2, None, (0,), (1,)),
        (1, 1, None, (0,), (0,)),
        (4, 1, None, (0, 1), (2, 3)),
        (23, 1, None, tuple(range(21)), (21, 22)),
        (24, 1, None, tuple(range(21)), (21, 22, 23)),
        (4, 2, 1, (0,), (1, 2, 3, 5, 6, 7)),
        (4, 2, 4, (0, 1, 2, 3), (4, 5, 6, 7)),
        (4, 2, 6, (0, 1, 2, 3, 4, 5), (6, 7)),
        (4, 2, 8, tuple(range(8)), tuple(range(8))),
    ],
)
def test_launch_cores_are_what_the_threads_leave(
    num_cores: int, smt: int, cpu_threads: int | None, cores: tuple[int, ...], launch_cores: tuple[int, ...]
) -> None:
    options = {} if cpu_threads is None else {"cpu_threads": cpu_threads}
    (share,) = shares(node_of(machine_of([num_cores], smt), [0]), **options)
    assert (share.threads, share.cores, share.launch_cores) == (len(cores), cores, launch_cores)
    assert ('"cpu_threads"' in str(share)) == bool(options)


@pytest.mark.P6
def test_more_cpu_threads_than_cpus_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        choose_cores(node_of(machine_of([8], smt=2), [None] * 2), 0, on_accelerator=True, cpu_threads=17)
    assert str(caught.value).startswith(
        "deep_optimizer_states.cpu_threads: must be at most the 16 CPUs that a rank may use (affinity 16, cgroup limit "
        "none), found 17.\nLeave it out for the number that fits this machine, or give the rank more CPUs (taskset, "
    )
    with pytest.raises(ConfigError, match=r"at most the 3 CPUs .* cgroup limit 3 for this rank\), found 4"):
        choose_cores(node_of(machine_of([8]), [None] * 2, quota=6), 1, on_accelerator=False, cpu_threads=4)
