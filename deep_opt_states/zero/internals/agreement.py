"""What all ranks must agree on; each function is a collective over all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from deep_opt_states.names import SWITCH
from deep_opt_states.runtime.executor import Executor, UpdateFailed

Answer = TypeVar("Answer")


class RanksDisagree(RuntimeError):
    """Ranks would run different plans, or one of them cannot run any."""


def agree(find: Callable[[], Answer], describe: Callable[[Answer], str]) -> Answer:
    """What this rank finds, once it is known that every rank finds what is described alike.

    A rank that fails tells the others, so that none is left waiting. Raises what ``find`` raises and, on the other
    ranks, ``RanksDisagree`` with the ranks named.
    """
    failure: Exception | None = None
    try:
        answer = find()
        description = describe(answer)
    except Exception as error:  # noqa: BLE001 (told to the other ranks first, then raised)
        failure = error
        description = f"failed with {type(error).__name__}: {error}"
    descriptions: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(descriptions, description)
    if failure is not None:
        raise failure
    _refuse_difference(descriptions)
    return answer


def _refuse_difference(descriptions: list[str]) -> None:
    ranks = defaultdict(list)
    for rank, description in enumerate(descriptions):
        ranks[description].append(rank)
    if len(ranks) > 1:
        lines = [f"  rank {', '.join(map(str, who))}: {description}" for description, who in ranks.items()]
        raise RanksDisagree(
            "All ranks must run the same plan; found\n" + "\n".join(lines) + "\n"
            f"Give every rank the same DeepSpeed config and the same environment ({SWITCH})."
        )


class FailureAgreement:
    """After each update, whether it failed on any rank.

    One all-reduce of an int32 a rank; without it the other ranks would wait in the next collective for a rank that
    never comes.
    """

    def __init__(self) -> None:
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        device = get_accelerator().current_device_name()
        self._failed = torch.zeros(self._world_size, dtype=torch.int32, device=device)

    def share(self, executor: Executor) -> None:
        """If it failed anywhere, ``executor`` has failed here, too, with the ranks named if it was not here."""
        if self._world_size == 1:
            return
        self._failed.zero_()
        # Assigning would copy from the host, which waits for that.
        self._failed[self._rank].fill_(executor.failure is not None)
        dist.all_reduce(self._failed)
        if executor.failure is None and bool(self._failed.any()):
            ranks = ", ".join(str(rank) for rank in self._failed.nonzero().flatten().tolist())
            executor.fail(UpdateFailed(f"the update failed on rank {ranks}, whose own message has the cause"))
