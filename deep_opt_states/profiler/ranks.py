"""The ranks that measure together, the groups whose collectives are measured, and what happens if one rank fails."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed

from deep_opt_states.device.kernels.library import KernelUnavailable
from deep_opt_states.device.slab import HostMemoryError

Value = TypeVar("Value")

TIMEOUT = timedelta(seconds=60)
"""The time after which a measured collective fails because another rank takes no part in it."""

# PyTorch 2.13 warns about the older names, which DeepSpeed uses.
_ALL_GATHER = getattr(torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(torch.distributed, "reduce_scatter_single", torch.distributed.reduce_scatter_tensor)


class ProbeError(RuntimeError):
    """An error for a probe that cannot run, or whose result cannot be trusted."""


class Ranks:
    """The ranks of the default process group, or the only rank if there is no group."""

    @property
    def rank(self) -> int:
        """Return the number of this rank."""
        return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1

    def gather(self, value: Value) -> list[Value]:
        """Return every rank's value, ordered by rank, on every rank; no rank returns before all have called this."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            torch.distributed.all_gather_object(values, value)
        return values


@contextmanager
def launched_ranks(environ: Mapping[str, str]) -> Iterator[Ranks]:
    """Yield the ranks of the launcher (torchrun, deepspeed) that started this process and set ``environ``.

    Several ranks meet in a Gloo process group, which is destroyed at the end.
    """
    if int(environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks()
        return
    # Import these modules before the group exists: DeepSpeed's Adam imports them, and they keep the group that they
    # find as a default argument. Gloo's threads would then outlive the group, and a late one aborts the process.
    import deepspeed  # noqa: F401
    import torch.distributed.nn.functional

    torch.distributed.init_process_group("gloo")
    try:
        yield Ranks()
    finally:
        torch.distributed.destroy_process_group()


def call_on_all_ranks(ranks: Ranks, action: Callable[[], Value]) -> Value:
    """Return this rank's result of ``action`` once every rank has called it without an error; a collective.

    Raise ``ProbeError`` on every rank, with the same text, if it failed on any rank.
    """
    failure: Exception | None = None
    try:
        value = action()
    except Exception as error:  # noqa: BLE001 (the other ranks get it first: without it they would wait forever)
        failure = error
    try:
        failures = ranks.gather(None if failure is None else _describe(failure))
        if any(failures):
            texts = [text if ranks.size == 1 else f"rank {rank}: {text}" for rank, text in enumerate(failures) if text]
            raise ProbeError("; ".join(texts)) from failure
    finally:
        # The failure's traceback refers to this frame: the cycle would keep the probe's memory until it is collected.
        del failure
    return value


def _describe(failure: Exception) -> str:
    if isinstance(failure, ProbeError | HostMemoryError | KernelUnavailable):
        # Keep the remedy, which is on a line of its own.
        return " ".join(str(failure).splitlines())
    # The first line of PyTorch's messages is followed by advice and stack traces.
    return f"{type(failure).__name__}: {failure}".splitlines()[0]


def ranks_by_node(ranks: Ranks, environ: Mapping[str, str]) -> list[list[int]]:
    """Return the ranks of each node; the result is the same on all ranks. This is a collective.

    Ranks with the same host name are on the same node, but at most LOCAL_WORLD_SIZE of them, which torchrun sets.
    """
    by_host: dict[tuple[str, str | None], list[int]] = {}
    for rank, host in enumerate(ranks.gather((platform.node(), environ.get("LOCAL_WORLD_SIZE")))):
        by_host.setdefault(host, []).append(rank)
    nodes = []
    for (_, local_size), of_host in by_host.items():
        size = int(local_size or len(of_host))
        nodes += [of_host[begin : begin + size] for begin in range(0, len(of_host), size)]
    return nodes


class ProcessGroup:
    """The ranks of a process group of ``torch.distributed``, with the collectives that DeepSpeed calls."""

    def __init__(self, group: torch.distributed.ProcessGroup) -> None:
        self._group = group
        self.rank = torch.distributed.get_rank(group)
        self.size = torch.distributed.get_world_size(group)

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Gather every rank's ``part``, [n], in ``whole``, [n * size]; the current stream waits for the result."""
        _ALL_GATHER(whole, part, group=self._group)

    def reduce_scatter(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Write this rank's ``part``, [n], of the sum of every rank's ``whole``, [n * size]; the stream waits."""
        _REDUCE_SCATTER(part, whole, group=self._group)


class CollectiveGroups(NamedTuple):
    """The groups whose collectives this rank measures, all groups at once.

    ``in_node`` are the ranks of this rank's node, and ``across_nodes`` are those with this rank's place on every node.
    A string, the same on all ranks, is why there is no group.
    """

    in_node: ProcessGroup | str
    across_nodes: ProcessGroup | str


def collective_groups(ranks: Ranks, backend: str, environ: Mapping[str, str]) -> CollectiveGroups:
    """Return groups of ``ranks`` that communicate by ``backend``. A collective over all ranks, which raises no error.

    The groups exist until the default process group is destroyed.
    """
    if ranks.size == 1:
        return CollectiveGroups("one rank", "one rank")
    nodes = ranks_by_node(ranks, environ)
    in_node: ProcessGroup | str = "one rank on a node"
    across: ProcessGroup | str = "one node"
    sizes = sorted({len(node) for node in nodes})
    if sizes[0] > 1:
        in_node = _own_group(ranks, nodes, backend)
    if len(sizes) > 1:
        across = f"the nodes have different numbers of ranks, {sizes[0]} to {sizes[-1]}"
    elif len(nodes) > 1:
        across = _own_group(ranks, list(zip(*nodes, strict=True)), backend)
    return CollectiveGroups(in_node, across)


def _own_group(ranks: Ranks, groups: Sequence[Sequence[int]], backend: str) -> ProcessGroup | str:
    """Create a process group for each of ``groups``, in which all ranks take part, and return this rank's own.

    Return the reason on all ranks if it failed on any of them.
    """

    def create() -> ProcessGroup:
        created = [torch.distributed.new_group(list(group), timeout=TIMEOUT, backend=backend) for group in groups]
        (own,) = (group for group, members in zip(created, groups, strict=True) if ranks.rank in members)
        return ProcessGroup(own)

    try:
        return call_on_all_ranks(ranks, create)
    except ProbeError as error:
        return str(error)
