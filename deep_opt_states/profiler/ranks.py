"""The ranks that measure together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch.distributed

from deep_opt_states.device.slab import HostMemoryError

Value = TypeVar("Value")


class ProbeError(RuntimeError):
    """A probe that cannot run, or whose result is not to be trusted."""


class Ranks(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, value: Value) -> list[Value]:
        """Every rank's value, by rank, on every rank; so no rank goes on before all are here."""


class OneRank:
    rank = 0
    size = 1

    def gather(self, value: Value) -> list[Value]:
        return [value]


class DistributedRanks:
    """The ranks of the default process group, which must be there already; values are pickled."""

    @property
    def rank(self) -> int:
        return torch.distributed.get_rank()

    @property
    def size(self) -> int:
        return torch.distributed.get_world_size()

    def gather(self, value: Value) -> list[Value]:
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value)
        return values


def training_ranks() -> Ranks:
    """Of the training run that this process is in."""
    return DistributedRanks() if torch.distributed.is_initialized() else OneRank()


@contextmanager
def launched_ranks(environ: Mapping[str, str]) -> Iterator[Ranks]:
    """Of the launcher (torchrun, deepspeed) that started this process, by the variables that it sets."""
    if int(environ.get("WORLD_SIZE", "1")) == 1:
        yield OneRank()
        return
    # Before there is a group: these modules, which DeepSpeed's Adam loads, keep the one that they find as default
    # arguments. Gloo's threads would outlive its destruction; one that is late aborts the process at its end.
    import deepspeed  # noqa: F401
    import torch.distributed.nn.functional

    torch.distributed.init_process_group("gloo")
    try:
        yield DistributedRanks()
    finally:
        torch.distributed.destroy_process_group()


def agree(ranks: Ranks, action: Callable[[], Value]) -> Value:
    """What ``action`` gives on this rank, once it is known to have failed on none; a collective over all ranks.

    Raises ``ProbeError``, with the same text on every rank, if it failed on any.
    """
    failure: Exception | None = None
    try:
        value = action()
    except Exception as error:  # noqa: BLE001 (told to the other ranks first, which would wait for ever)
        failure = error
    try:
        failures = ranks.gather(None if failure is None else _describe(failure))
        if any(failures):
            told = [text if ranks.size == 1 else f"rank {rank}: {text}" for rank, text in enumerate(failures) if text]
            raise ProbeError("; ".join(told)) from failure
    finally:
        # Its traceback has this frame: the cycle would keep what failed, with its memory, until it is collected.
        del failure
    return value


def _describe(failure: Exception) -> str:
    if isinstance(failure, ProbeError):
        return str(failure)
    if isinstance(failure, HostMemoryError):
        # With its remedy, which has a line of its own.
        return " ".join(str(failure).splitlines())
    # PyTorch's messages go on with advice and stack traces.
    return f"{type(failure).__name__}: {failure}".splitlines()[0]
