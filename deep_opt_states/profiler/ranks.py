"""The ranks that measure together, with their failures and their collectives."""

from __future__ import annotations

import platform
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed
from torch.distributed import ProcessGroup, new_subgroups_by_enumeration

from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.library import KernelUnavailable
from deep_opt_states.device.slab import HostMemoryError
from deep_opt_states.device.state_file import DiskError
from deep_opt_states.profiler.probes import Probe, ProbeError, Rates, synchronize, timed
from deep_opt_states.waiting import waiting_for_ranks

Value = TypeVar("Value")

TIMEOUT = timedelta(seconds=60)
"""The time after which a measured collective fails because another rank takes no part in it."""

COLLECTIVES = 4
"""Collectives that are timed per repetition, one after another."""

# The collectives that DeepSpeed calls. PyTorch 2.13 warns about the older names.
_ALL_GATHER = getattr(torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(torch.distributed, "reduce_scatter_single", torch.distributed.reduce_scatter_tensor)


class Ranks:
    """The ranks of the default process group, or the only rank if there is no group."""

    @property
    def rank(self) -> int:
        """Return the number of this rank."""
        return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

    @property
    def size(self) -> int:
        return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1

    def gather(self, value: Value) -> list[Value]:
        """Return every rank's value, ordered by rank, on every rank. This is a collective."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            with waiting_for_ranks():
                torch.distributed.all_gather_object(values, value)
        return values


def free_port() -> int:
    """Return a port of this machine that no process listens on now."""
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def launched_ranks(environ: Mapping[str, str]) -> Iterator[Ranks]:
    """Yield the ranks of the launcher (torchrun, deepspeed) that set ``environ``. Several ranks form a Gloo group."""
    if int(environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks()
        return
    # Import these modules before the group exists. DeepSpeed's Adam imports them, and their default arguments would
    # keep the group alive. Gloo's threads would then outlive it, and a late one aborts the process.
    import deepspeed  # noqa: F401
    import torch.distributed.nn.functional

    torch.distributed.init_process_group("gloo")
    try:
        yield Ranks()
    finally:
        torch.distributed.destroy_process_group()


def call_on_all_ranks(ranks: Ranks, action: Callable[[], Value]) -> Value:
    """Return the result of ``action``, or raise ``ProbeError`` on all ranks if it failed on any. A collective."""
    failure: Exception | None = None
    try:
        value = action()
    except Exception as error:  # noqa: BLE001 (the other ranks get it first: without it they would wait forever)
        failure = error
    try:
        texts = ranks.gather(None if failure is None else _describe(failure))
        if failed := [text if ranks.size == 1 else f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]:
            raise ProbeError("; ".join(failed)) from failure
    finally:
        # The failure's traceback refers to this frame. This cycle would keep the probe's memory.
        del failure
    return value


def _describe(failure: Exception) -> str:
    if isinstance(failure, DiskError | ProbeError | HostMemoryError | KernelUnavailable):
        # Keep the remedy on the second line.
        return " ".join(str(failure).splitlines())
    # PyTorch's messages continue with advice and stack traces.
    return f"{type(failure).__name__}: {failure}".splitlines()[0]


def ranks_by_node(ranks: Ranks, environ: Mapping[str, str]) -> list[list[int]]:
    """Return the ranks of each node, by host name and at most LOCAL_WORLD_SIZE each. This is a collective."""
    by_host: dict[tuple[str, str | None], list[int]] = {}
    for rank, host in enumerate(ranks.gather((platform.node(), environ.get("LOCAL_WORLD_SIZE")))):
        by_host.setdefault(host, []).append(rank)
    nodes = []
    for (_, local_size), of_host in by_host.items():
        size = int(local_size or len(of_host))
        nodes += [of_host[begin : begin + size] for begin in range(0, len(of_host), size)]
    return nodes


class CollectiveGroups(NamedTuple):
    """The groups that this rank measures, or why there is none. ``across_nodes`` contains one rank of each node."""

    in_node: ProcessGroup | str
    across_nodes: ProcessGroup | str


def collective_groups(ranks: Ranks, backend: str, environ: Mapping[str, str]) -> CollectiveGroups:
    """Return groups of ``ranks`` for ``backend``, valid until the default group is destroyed. This is a collective."""
    if ranks.size == 1:
        return CollectiveGroups("one rank", "one rank")

    def own(groups: Sequence[Sequence[int]]) -> ProcessGroup | str:
        members = [list(group) for group in groups]
        try:
            new_groups = partial(new_subgroups_by_enumeration, members, timeout=TIMEOUT, backend=backend)
            group: ProcessGroup = call_on_all_ranks(ranks, new_groups)[0]
            return group
        except ProbeError as error:
            return str(error)

    nodes = ranks_by_node(ranks, environ)
    sizes = sorted({len(node) for node in nodes})
    in_node = own(nodes) if sizes[0] > 1 else "one rank on a node"
    if len(sizes) > 1:
        return CollectiveGroups(in_node, f"the nodes have different numbers of ranks, {sizes[0]} to {sizes[-1]}")
    return CollectiveGroups(in_node, own(list(zip(*nodes, strict=True))) if len(nodes) > 1 else "one node")


def collective(
    device: Device[Any], group: ProcessGroup, whole_bytes: int, quantity: str, *, reduces: bool = False
) -> Probe:
    """Return a probe of collectives on ``whole_bytes`` in bf16: the bytes per second that a rank receives or sends."""
    size = group.size()
    numel = whole_bytes // torch.bfloat16.itemsize // size
    part, whole = (device.empty(count, torch.bfloat16).fill_(1) for count in (numel, numel * size))
    transfer, tensors = (_REDUCE_SCATTER, (part, whole)) if reduces else (_ALL_GATHER, (whole, part))
    issue = partial(transfer, *tensors, group=group)
    synchronize(device)

    def repeat() -> Rates:
        # The first collective is not timed, because its start depends on the other ranks. The others are issued while
        # it runs, so that the time includes no launches.
        elapsed_s, _ = timed(device, lambda: [issue() for _ in range(COLLECTIVES)], first=issue)
        return {quantity: COLLECTIVES * whole.nbytes * (size - 1) / size / elapsed_s}

    return repeat
