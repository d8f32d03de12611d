"""Gather values from the ranks that measure together, and make all of them fail if one fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch.distributed

from deep_opt_states.device.kernels.library import KernelUnavailable
from deep_opt_states.device.slab import HostMemoryError

Value = TypeVar("Value")


class ProbeError(RuntimeError):
    """An error for a probe that cannot run, or whose result cannot be trusted."""


class Ranks(Protocol):
    """The ranks that measure together, as one of them sees them."""

    @property
    def rank(self) -> int:
        """Return the number of this rank."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""

    def gather(self, value: Value) -> list[Value]:
        """Return every rank's value, ordered by rank, on every rank; no rank returns before all have called this."""


class OneRank:
    """A single rank without a process group."""

    rank = 0
    size = 1

    def gather(self, value: Value) -> list[Value]:
        """Return the value of the only rank."""
        return [value]


class DistributedRanks:
    """The ranks of the default process group, which must have been initialized. Values are pickled."""

    @property
    def rank(self) -> int:
        """Return the number of this rank."""
        return torch.distributed.get_rank()

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return torch.distributed.get_world_size()

    def gather(self, value: Value) -> list[Value]:
        """Return every rank's value, ordered by rank, on every rank."""
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value)
        return values


def training_ranks() -> Ranks:
    """Return the ranks of the training run that this process belongs to."""
    return DistributedRanks() if torch.distributed.is_initialized() else OneRank()


@contextmanager
def launched_ranks(environ: Mapping[str, str]) -> Iterator[Ranks]:
    """Yield the ranks of the launcher (torchrun, deepspeed) that started this process and set ``environ``.

    Several ranks meet in a Gloo process group, which is destroyed at the end.
    """
    if int(environ.get("WORLD_SIZE", "1")) == 1:
        yield OneRank()
        return
    # Import these modules before the group exists: DeepSpeed's Adam imports them, and they keep the group that they
    # find as a default argument. Gloo's threads would then outlive the group, and a late one aborts the process.
    import deepspeed  # noqa: F401
    import torch.distributed.nn.functional

    torch.distributed.init_process_group("gloo")
    try:
        yield DistributedRanks()
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
    if isinstance(failure, ProbeError):
        return str(failure)
    if isinstance(failure, (HostMemoryError, KernelUnavailable)):
        # Keep the remedy, which is on a line of its own.
        return " ".join(str(failure).splitlines())
    # The first line of PyTorch's messages is followed by advice and stack traces.
    return f"{type(failure).__name__}: {failure}".splitlines()[0]
