"""Train with random delays in each rank and each worker, which must change neither the bits nor the collectives."""

from __future__ import annotations

import inspect
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.comm import comm
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn
from torch.utils._pytree import tree_leaves

from deep_opt_states.zero.internals.coordinator import Coordinator
from tests.kernels.intercepted import before_each_update
from tests.zero.parity.case import Case, by_sub_group
from tests.zero.parity.training import assert_same_bits, gathered, run_variant

KINDS = ("all_", "barrier", "broadcast", "gather", "inference_all_reduce", "reduce", "scatter")
MAX_DELAY_S = 0.004


@contextmanager
def logged_collectives(log: list[str]) -> Iterator[None]:
    """Append every collective that is called through DeepSpeed to ``log``, with its tensors' lengths and dtypes."""

    def log_calls(name: str, original: Any) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            log.append(f"{name} {[(tensor.numel(), str(tensor.dtype)) for tensor in tensors]}")
            return original(*args, **kwargs)

        return collective

    with ExitStack() as patches:
        for name, method in inspect.getmembers(comm.cdb, inspect.ismethod):
            if name.startswith(KINDS):
                patches.enter_context(mock.patch.object(comm.cdb, name, log_calls(name, method)))
        yield


@contextmanager
def delayed(seed: int) -> Iterator[None]:
    """Sleep for a random time before each update and each layer. Each thread of each rank has its own sequence."""
    generators: dict[str, random.Random] = {}

    def sleep(*_: Any) -> None:
        thread = threading.current_thread().name
        generator = generators.setdefault(thread, random.Random(f"{seed} {dist.get_rank()} {thread}"))
        time.sleep(generator.uniform(0, MAX_DELAY_S))

    forward = nn.Linear.forward

    def delay_and_forward(self: nn.Linear, x: Any) -> Any:
        sleep()
        return forward(self, x)

    with before_each_update(sleep), mock.patch.object(nn.Linear, "forward", delay_and_forward):
        yield


@contextmanager
def logged_prefetches(log: list[str]) -> Iterator[None]:
    """Log, for each fetch during an update, how many parameters could be prefetched, and if one stopped that."""
    prefetching_until = Coordinator.prefetching_until

    @contextmanager
    def logged_fetch(self: Coordinator, is_excluded: Callable[[Any], bool], fetched: list[Any]) -> Iterator[None]:
        excluded: list[bool] = []

        def recorded_is_excluded(param: Any) -> bool:
            excluded.append(is_excluded(param))
            return excluded[-1]

        with prefetching_until(self, recorded_is_excluded, fetched):
            yield
        log.append(f"ahead {excluded.count(False)}, {'stopped' if True in excluded else 'not stopped'}")

    with mock.patch.object(Coordinator, "prefetching_until", logged_fetch):
        yield


@contextmanager
def one_rank_reads_states() -> Iterator[None]:
    """Read the states after every other step on one of the ranks, which waits for its update then."""
    step = DeepSpeedEngine.step

    def step_and_read(self: Any, *args: Any) -> None:
        step(self, *args)
        if self.global_steps % (2 * dist.get_world_size()) == 2 * dist.get_rank() + 1:
            _ = self.optimizer.state

    with mock.patch.object(DeepSpeedEngine, "step", step_and_read):
        yield


def train_with_delays(seeds: Sequence[int]) -> None:
    """Train with delays of each seed; with the last one, a rank sometimes waits for its update right after the step."""
    # There are several units of each placement, and the prefetch reaches over some of them.
    block = {**by_sub_group("cpu", "streamed", "cpu", "cpu", "resident", "streamed", "cpu", "cpu"), "num_slots": 1}
    case = Case(
        name="delayed",
        blocks=(),
        world_size=dist.get_world_size(),
        steps=6,
        clip=0.3,
        widths=(19, 53, 61, 47, 41, 37, 53, 23),
        zero={"stage3_prefetch_bucket_size": 5000},
    )
    stock = run_variant(case, None)
    logs: list[Any] = []
    for seed in seeds:
        log: list[str] = []
        reads = one_rank_reads_states() if seed == seeds[-1] else nullcontext()
        with reads, delayed(seed), logged_collectives(log), logged_prefetches(log):
            ours = run_variant(case, block)
        assert_same_bits(stock, ours)
        assert ours.deferred >= (2 if seed == seeds[-1] else 4), "no update was deferred"
        logs += gathered(log)
        assert sum(not line.startswith("ahead") for line in log) > 100 or dist.get_world_size() == 1
        # Forward prefetches across units, and stops at parameters for which the host might have to wait.
        assert sum(line.startswith("ahead") and not line.startswith("ahead 0") for line in log) >= 10
        assert sum(line.endswith(", stopped") for line in log) >= 10
    assert all(log == logs[0] for log in logs), "the collectives differ between ranks, or depend on timing"
