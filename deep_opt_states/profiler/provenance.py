"""Describe the hardware and software of a measurement, and compute the fingerprint of a cached profile."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

import torch

from deep_opt_states.host import machine
from deep_opt_states.host.affinity import allowed_cpus
from deep_opt_states.profiler.method import METHOD, ProbeEffort
from deep_opt_states.profiler.ranks import Ranks, call_on_all_ranks
from perf_model.prediction.hardware import VERSION, Provenance


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine that ``ranks`` ranks share, which together may use ``cores`` of its cores."""

    ranks: int
    cores: int

    @property
    def cores_per_rank(self) -> int:
        """Return each rank's share of the cores, at least 1."""
        return max(1, self.cores // self.ranks)


def smallest_node(ranks: Ranks, environ: Mapping[str, str]) -> Node:
    """Return the node with the fewest cores per rank; the result is the same on all ranks. This is a collective.

    Ranks with the same host name are on the same node; LOCAL_WORLD_SIZE, which torchrun sets, overrides their number.
    If ranks are bound to cores of their own, the node has the union of these cores; a cgroup's limit applies to all
    ranks of the node together.
    """

    def here() -> tuple[str, set[int], float | None, str | None]:
        return platform.node(), set(allowed_cpus()), machine.cores().quota, environ.get("LOCAL_WORLD_SIZE")

    facts_of_ranks = ranks.gather(call_on_all_ranks(ranks, here))
    nodes = []
    for host in {host for host, *_ in facts_of_ranks}:
        allowed, quotas, local_sizes = zip(*(facts for other, *facts in facts_of_ranks if other == host), strict=True)
        limits = [len(set().union(*allowed)), *(int(quota) for quota in quotas if quota is not None)]
        nodes.append(Node(ranks=int(local_sizes[0] or len(local_sizes)), cores=max(1, min(limits))))
    return min(nodes, key=lambda node: (node.cores_per_rank, node.ranks))


def ranks_by_node(ranks: Ranks, environ: Mapping[str, str]) -> list[list[int]]:
    """Return the ranks of each node; the result is the same on all ranks. This is a collective.

    Ranks with the same host name are on the same node, but at most LOCAL_WORLD_SIZE of them, which torchrun sets.
    """

    def here() -> tuple[str, str | None]:
        return platform.node(), environ.get("LOCAL_WORLD_SIZE")

    by_host: dict[tuple[str, str | None], list[int]] = {}
    for rank, host in enumerate(ranks.gather(call_on_all_ranks(ranks, here))):
        by_host.setdefault(host, []).append(rank)
    nodes = []
    for (_, local_size), of_host in by_host.items():
        size = int(local_size or len(of_host))
        nodes += [of_host[begin : begin + size] for begin in range(0, len(of_host), size)]
    return nodes


def describe(*, on_accelerator: bool, node: Node, threads: int) -> Provenance:
    """Return the provenance of a measurement that is made now on this machine.

    ``threads`` threads per rank update on the CPU, each on a core of its own.
    """
    gpu = machine.gpu() if on_accelerator else None
    return Provenance(
        source="measured",
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        host=platform.node(),
        cpu=machine.cpu_name(),
        cores=threads * node.ranks,
        ranks=node.ranks,
        gpu=gpu.name if gpu else "",
        driver=machine.driver_version() if gpu else "",
        torch=str(torch.__version__),
        deepspeed=metadata.version("deepspeed"),
    )


def fingerprint(provenance: Provenance, node: Node, effort: ProbeEffort, world_size: int, works_with: str) -> str:
    """Return a hash of everything that may change the measured values.

    These are the hardware, its limits, the software, the ranks, and the method. ``works_with`` names the device's class
    and the kernels, and whether threads are pinned. The date and the host's name are left out: equal nodes that share a
    home directory share their profiles.
    """
    gpu = machine.gpu() if provenance.gpu else None
    facts: dict[str, Any] = {
        "provenance": asdict(replace(provenance, date="", host="")),
        "node": asdict(node),
        "world_size": world_size,
        "host_memory_bytes": machine.memory().usable_bytes,
        "last_level_cache_bytes": machine.last_level_cache_bytes(),
        "gpu_memory_bytes": gpu.memory_bytes if gpu else None,
        "works_with": works_with,
        "effort": asdict(effort),
        "versions": [VERSION, METHOD],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
