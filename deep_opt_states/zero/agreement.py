"""What all ranks must agree on; each function is a collective over all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from deep_opt_states.names import SWITCH
from deep_opt_states.runtime.executor import Executor, UpdateFailed
from perf_model.plan import UpdatePlan

OFF = "off"
"""Stands for the plan of a rank on which the plugin is switched off."""


class RanksDisagree(RuntimeError):
    """Ranks would run different plans, or one of them cannot run any."""


def agree_on_plan(make_plan: Callable[[], UpdatePlan]) -> UpdatePlan:
    """This rank's plan, once it is known to be every rank's.

    A rank that cannot make one tells the others, so that none is left waiting. Raises what ``make_plan`` raises
    and, on the other ranks, ``RanksDisagree`` with the ranks named.
    """
    plan = None
    failure: Exception | None = None
    try:
        plan = make_plan()
    except Exception as error:  # noqa: BLE001 (told to the other ranks first, then raised)
        failure = error
    answers = _gather(plan.fingerprint if plan is not None else f"failed with {type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    assert plan is not None
    _refuse_difference(answers)
    return plan


def agree_to_be_off() -> None:
    """For a rank on which the plugin is switched off. Raises ``RanksDisagree`` if it is on elsewhere."""
    _refuse_difference(_gather(OFF))


def _gather(answer: str) -> list[str]:
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, answer)
    return answers


def _refuse_difference(answers: list[str]) -> None:
    ranks = defaultdict(list)
    for rank, answer in enumerate(answers):
        ranks[answer].append(rank)
    if len(ranks) > 1:
        lines = [f"  rank {', '.join(map(str, who))}: {answer}" for answer, who in ranks.items()]
        raise RanksDisagree(
            "All ranks must run the same plan; found\n" + "\n".join(lines) + "\n"
            f"Give every rank the same DeepSpeed config and the same environment ({SWITCH})."
        )


class FailureAgreement:
    """At the end of each update, whether it failed on any rank.

    One all-reduce of an int32 a rank; without it the other ranks would wait in the next collective for a rank
    that never comes.
    """

    def __init__(self) -> None:
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        device = get_accelerator().current_device_name()
        self._failed = torch.zeros(self._world_size, dtype=torch.int32, device=device)

    def check(self, failure: UpdateFailed | None, executor: Executor) -> None:
        """Raises ``failure``, or ``UpdateFailed`` naming the ranks that failed; ``executor`` is torn then, too."""
        if self._world_size > 1:
            self._failed.zero_()
            self._failed[self._rank] = failure is not None
            dist.all_reduce(self._failed)
        if failure is not None:
            raise failure
        if self._world_size > 1 and bool(self._failed.any()):
            ranks = ", ".join(str(rank) for rank in self._failed.nonzero().flatten().tolist())
            executor.failure = UpdateFailed(f"the update failed on rank {ranks}, whose own message has the cause")
            raise executor.torn()
