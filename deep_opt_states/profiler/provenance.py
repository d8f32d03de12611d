"""Where and when, on what hardware, with what software; and the fingerprint under which a profile is found again."""

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
from deep_opt_states.profiler.method import METHOD, Effort
from deep_opt_states.profiler.ranks import Ranks, agree
from perf_model.prediction.hardware import VERSION, Provenance


@dataclass(frozen=True, kw_only=True)
class Node:
    """What the ranks on one machine have between them: ``ranks`` of them, and ``cores``, as many as all may use."""

    ranks: int
    cores: int

    @property
    def cores_per_rank(self) -> int:
        return max(1, self.cores // self.ranks)


def smallest_node(ranks: Ranks, environ: Mapping[str, str]) -> Node:
    """Of the nodes that the ranks are on, the one with the fewest cores a rank; the same on all ranks. A collective.

    The ranks of a node are those with one host name, unless LOCAL_WORLD_SIZE (torchrun's) says how many they are.
    Ranks that are bound to cores of their own have the union of these; a cgroup's limit is for all of them together.
    """

    def here() -> tuple[str, set[int], float | None, str | None]:
        return platform.node(), set(allowed_cpus()), machine.cores().quota, environ.get("LOCAL_WORLD_SIZE")

    everybody = ranks.gather(agree(ranks, here))
    nodes = []
    for host in {host for host, *_ in everybody}:
        allowed, quotas, told = zip(*(facts for other, *facts in everybody if other == host), strict=True)
        limits = [len(set().union(*allowed)), *(int(quota) for quota in quotas if quota is not None)]
        nodes.append(Node(ranks=int(told[0] or len(told)), cores=max(1, min(limits))))
    return min(nodes, key=lambda node: (node.cores_per_rank, node.ranks))


def describe(*, on_accelerator: bool, node: Node, threads: int) -> Provenance:
    """Now, here; ``threads`` of each rank update on the CPU, each on a core."""
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


def fingerprint(provenance: Provenance, node: Node, effort: Effort, world_size: int, works_with: str) -> str:
    """Changes with whatever may change what is measured: hardware, limits, software, the ranks, and how it is measured.

    ``works_with`` names the device's class and the kernels, and says whether threads are pinned. Not with the host's
    name: nodes of one kind that share a home directory share their profiles.
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
