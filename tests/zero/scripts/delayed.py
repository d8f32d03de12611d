"""Trains with seeded delays in each rank and in each worker; the bits and the order of collectives must not notice.

Arguments: the seeds. Every rank prints an answer for each. One rank alone, which cannot be left waiting, answers for a
naive rule, too, by which forward gathers ahead what happens to be updated.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.comm import comm
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn
from torch.utils._pytree import tree_leaves

from deep_opt_states.device.kernels.adam import PartUpdate
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.zero.internals.coordinator import Coordinator
from tests.kernels.intercepted import before_each_update
from tests.launch import answer
from tests.zero.parity.arm import Record, differences, run_arm
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
def delayed(seed: int, update_s: float = MAX_DELAY_S, layer_s: float = MAX_DELAY_S) -> Iterator[None]:
    """Sleeps up to that long before updates and before layers, each thread of each rank in a rhythm of its own."""
    rhythms: dict[str, random.Random] = {}

    def rhythm() -> random.Random:
        thread = threading.current_thread().name
        return rhythms.setdefault(thread, random.Random(f"{seed} {dist.get_rank()} {thread}"))

    forward = nn.Linear.forward

    def late_update(_: PartUpdate) -> None:
        time.sleep(rhythm().uniform(0, update_s))

    def late_forward(self: nn.Linear, x: Any) -> Any:
        time.sleep(rhythm().uniform(0, layer_s))
        return forward(self, x)

    with before_each_update(late_update), mock.patch.object(nn.Linear, "forward", late_forward):
        yield


@contextmanager
def looking_ahead(log: list[str]) -> Iterator[None]:
    """Logs, of each fetch in a forward with an update under way, for how many parameters it was asked whether their
    update may be waited for, and whether it came upon one."""
    prefetching_until = Coordinator.prefetching_until

    @contextmanager
    def watched(self: Coordinator, is_first_not_to: Callable[[Any], bool], fetched: list[Any]) -> Iterator[None]:
        answers: list[bool] = []

        def noted(param: Any) -> bool:
            answers.append(is_first_not_to(param))
            return answers[-1]

        with prefetching_until(self, noted, fetched):
            yield
        log.append(f"ahead {answers.count(False)}, {'stopped' if True in answers else 'not stopped'}")

    with mock.patch.object(Coordinator, "prefetching_until", watched):
        yield


def worker_is_busy(self: Executor, sub_group: int) -> bool:
    """A naive rule: it looks right on one rank, and the ranks' workers are not equally fast."""
    return not all(future.done() for future in self._updated.values())


def run(seed: int, case: Case) -> tuple[Record, list[str]]:
    log: list[str] = []
    with delayed(seed), logged(log), looking_ahead(log):
        return run_arm(case, case.blocks[0]), log


@contextmanager
def looking_at_states() -> Iterator[None]:
    """After every other step one of the ranks, by itself, waits for the end of its update."""
    step = DeepSpeedEngine.step

    def looked_at(self: Any, *args: Any) -> None:
        step(self, *args)
        if self.global_steps % (2 * dist.get_world_size()) == 2 * dist.get_rank() + 1:
            _ = self.optimizer.state

    with mock.patch.object(DeepSpeedEngine, "step", looked_at):
        yield


def main(seeds: list[int]) -> None:
    # Several sub-groups of each placement, and a look ahead that reaches over some of them.
    block = {"placement": ["cpu", "streamed", "cpu", "cpu", "resident", "streamed", "cpu", "cpu"], "num_slots": 1}
    case = Case(
        name="delayed",
        blocks=(block,),
        world_size=dist.get_world_size(),
        steps=6,
        clip=0.3,
        widths=(19, 53, 61, 47, 41, 37, 53, 23),
        sub_group_size=1000,
        zero={"stage3_prefetch_bucket_size": 5000},
    )
    stock = run_arm(case, None)
    first = None
    for seed in seeds:
        with looking_at_states() if seed == seeds[-1] else nullcontext():
            ours, log = run(seed, case)
        first = first or log
        logs: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(logs, log)
        result = {
            "seed": seed,
            "differences": differences(stock, ours),
            "deferred": ours.deferred,
            "collectives": sum(not line.startswith("ahead") for line in log),
            "ahead": sum(line.startswith("ahead") and not line.startswith("ahead 0") for line in log),
            "stopped": sum(line.endswith(", stopped") for line in log),
            "same": all(log == other for other in logs),
            "same for every seed": log == first,
        }
        answer(result)
    # On more ranks it would leave them waiting.
    if dist.get_world_size() == 1:
        with mock.patch.object(Executor, "may_block", worker_is_busy):
            answer({"naive is the same": all(run(seed, case)[1] == first for seed in seeds)})


if __name__ == "__main__":
    with process_group():
        main([int(seed) for seed in sys.argv[1:]])
