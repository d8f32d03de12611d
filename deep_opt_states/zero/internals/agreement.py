"""Let all ranks agree on a value, on whether an action failed, and on whether the last update failed.

Each function is a collective over all ranks, below ``comms_logger``, which would raise for ``all_gather_object``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import comm

from deep_opt_states.names import CHECK_SWITCH, SWITCH
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.failure import UpdateFailed
from deep_opt_states.waiting import waiting_for_ranks

Value = TypeVar("Value")


class RanksDisagree(RuntimeError):
    """The error if ranks would run different plans, or if another rank has failed."""


def raise_together(action: Callable[[], Value]) -> Value:
    """Run ``action`` on every rank and return this rank's result, or raise on every rank if it fails on any.

    A rank raises its own exception, or else ``RanksDisagree`` with the exceptions of the other ranks.
    """
    return _agreed(lambda: (action(), ""))


def same_on_all_ranks(find: Callable[[], Value], describe: Callable[[Value], str]) -> Value:
    """Return this rank's result of ``find``, for which ``describe`` returns the same text on every rank.

    If ``find`` fails on a rank, or the texts differ, every rank raises: ``RanksDisagree``, or the rank's own exception.
    """

    def find_and_describe() -> tuple[Value, str]:
        value = find()
        return value, describe(value)

    return _agreed(find_and_describe)


def gather_values(value: Value) -> list[Value]:
    """Return every rank's value, ordered by rank, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    with waiting_for_ranks():
        comm.cdb.all_gather_object(values, value)
    return values


def _agreed(run: Callable[[], tuple[Value, str]]) -> Value:
    """Run ``run`` on every rank, and return its value if it fails on none and its descriptions are the same."""
    failure: Exception | None = None
    description = failed = ""
    try:
        value, description = run()
    except Exception as error:  # noqa: BLE001 (raised below, after the other ranks know)
        failure, failed = error, f"{type(error).__name__}: {error}"
    try:
        outcomes = gather_values((description, failed))
        if failure is not None:
            raise failure
    finally:
        # Break the cycle of traceback and frame, which would keep the memory of a failed start.
        del failure
    if failures := _by_rank([found for _, found in outcomes]):
        raise RanksDisagree(
            f"Each rank must be able to train, found that another one has failed\n{failures}\n"
            f"Remove the cause that the message of that rank names."
        )
    descriptions = [found for found, _ in outcomes]
    if len(set(descriptions)) > 1:
        raise RanksDisagree(
            f"All ranks must run the same plan; found\n{_by_rank(descriptions)}\n"
            f"Give every rank the same DeepSpeed config and the same environment ({SWITCH}, {CHECK_SWITCH})."
        )
    return value


def _by_rank(texts: Sequence[str]) -> str:
    """Return one line for each text that is not empty, with the ranks that have it."""
    ranks_by_text = defaultdict(list)
    for rank, text in enumerate(texts):
        if text:
            ranks_by_text[text].append(str(rank))
    return "\n".join(f"  rank {', '.join(ranks)}: {text}" for text, ranks in ranks_by_text.items())


class StepAgreement:
    """The all-reduce before each use of the states: without it, ranks would hang after another one has raised."""

    def __init__(self) -> None:
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        device = get_accelerator().current_device_name()
        self._shared = torch.zeros(self._world_size, 3, dtype=torch.int32, device=device)
        self.refusing_ranks: list[int] = []
        """The ranks that refused the next update; the same on every rank."""

    def share(self, executor: Executor, *, memory_is_short: bool, refuses: bool) -> bool:
        """Return whether accelerator memory is short on any rank. Fail ``executor`` if another rank has failed."""
        if self._world_size == 1:
            self.refusing_ranks = [self._rank] if refuses else []
            return memory_is_short
        self._shared.zero_()
        # ``fill_``, because an assignment would copy from the host and make the host wait.
        for column, value in enumerate((executor.failure is not None, memory_is_short, refuses)):
            self._shared[self._rank, column].fill_(value)
        comm.cdb.all_reduce(self._shared)
        failed, short, refusing = self._shared.T.tolist()
        if 0 < sum(failed) < self._world_size:
            failure = executor.failure
            failures = gather_values("" if failure is None else f"{type(failure).__name__}: {failure}".splitlines()[0])
            if failure is None:
                executor.fail(UpdateFailed.on_ranks(failures))
        self.refusing_ranks = _ranks(refusing)
        return any(short)


def _ranks(flags: Sequence[int]) -> list[int]:
    return [rank for rank, flag in enumerate(flags) if flag]
