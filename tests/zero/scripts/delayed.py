"""Trains with seeded delays in each rank and in each worker; the bits and the order of collectives must not notice.

Arguments: the seeds. Every rank prints an answer for each.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.comm import comm
from torch import nn
from torch.utils._pytree import tree_leaves

from deep_opt_states.device.kernels.fused import FusedAdam
from tests.launch import answer
from tests.zero.parity.arm import differences, run_arm
from tests.zero.parity.case import Case
from tests.zero.process_group import process_group

COLLECTIVES = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "inference_all_reduce",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
)
"""All methods of DeepSpeed's backend in which the ranks meet."""

MAX_DELAY_S = 0.004


@contextmanager
def logged(log: list[str]) -> Iterator[None]:
    """Every collective that goes through DeepSpeed, with the lengths and dtypes of its tensors."""

    def watch(name: str, original: Any) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            log.append(f"{name} {[(tensor.numel(), str(tensor.dtype)) for tensor in tensors]}")
            return original(*args, **kwargs)

        return collective

    with ExitStack() as patches:
        for name in COLLECTIVES:
            patches.enter_context(mock.patch.object(comm.cdb, name, watch(name, getattr(comm.cdb, name))))
        yield


@contextmanager
def delayed(seed: int) -> Iterator[None]:
    """Sleeps before updates and before layers, each thread of each rank in a rhythm of its own."""
    rhythms: dict[str, random.Random] = {}

    def rhythm() -> random.Random:
        thread = threading.current_thread().name
        return rhythms.setdefault(thread, random.Random(f"{seed} {dist.get_rank()} {thread}"))

    update, forward = FusedAdam.update, nn.Linear.forward

    def late_update(self: FusedAdam, *args: Any) -> None:
        time.sleep(rhythm().uniform(0, MAX_DELAY_S))
        update(self, *args)

    def late_forward(self: nn.Linear, x: Any) -> Any:
        time.sleep(rhythm().uniform(0, MAX_DELAY_S))
        return forward(self, x)

    with mock.patch.object(FusedAdam, "update", late_update), mock.patch.object(nn.Linear, "forward", late_forward):
        yield


def main(seeds: list[int]) -> None:
    block = {"placement": "fraction", "gpu_fraction": 0.5, "num_slots": 1}
    case = Case(name="delayed", blocks=(block,), world_size=dist.get_world_size(), clip=0.3, accumulation=2)
    stock = run_arm(case, None)
    for seed in seeds:
        log: list[str] = []
        with delayed(seed), logged(log):
            found = differences(stock, run_arm(case, block))
        logs: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(logs, log)
        result = {
            "seed": seed,
            "differences": found,
            "collectives": len(log),
            "same": all(log == other for other in logs),
        }
        answer(result)


if __name__ == "__main__":
    with process_group():
        main([int(seed) for seed in sys.argv[1:]])
