"""Change, for as long as a variant trains, things that no config key of DeepSpeed or of the plugin changes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from benchmarks.harness.setting import trains_on_gpu
from deep_opt_states.device.kernels import choice
from deep_opt_states.device.kernels.library import KernelUnavailable
from deep_opt_states.zero.step.eager import EagerUpdates
from deep_opt_states.zero.step.update import Update

STOCKS_UPDATE = ("unscale_and_clip_grads", "_optimizer_step", "_reassign_or_swap_out_partitioned_parameters")
"""The methods of stock's optimizer that update a sub-group. The plugin overrides them without calling them."""


@contextmanager
def stocks_cpu_kernel() -> Iterator[None]:
    """Make our schedule update with stock's op in its three passes, as if there were no compiler."""

    def no_kernel(*args: object, **kwargs: object) -> object:
        raise KernelUnavailable("switched off by a benchmark")

    with mock.patch.object(choice, "FusedAdam", no_kernel):
        yield


@contextmanager
def without_updates() -> Iterator[None]:
    """Train engines of stock and of ours without updates, as the base for the cost of the update.

    Hooks, gathers and copies of gradients stay, and so does ``step()`` with its norm, its check for overflow, its
    counters, the gather of persistent parameters and the LR schedule. These parts are left out:

    - of ours, the prefetches and the updates in backward, and the update itself: no action is issued, and forward waits
      for nothing;
    - of stock, ``STOCKS_UPDATE``: Adam, the pass that scales the gradients for it, and the copy of the parameters to
      the accelerator. ``_prepare_sub_group`` and ``_release_sub_group`` stay. They do nothing if states are offloaded.

    An update in flight ends as usual. Enter the context after the first steps, in which our engine measures and plans.
    Compare bits before: Adam's own step count goes on for ours, and not for stock.
    """

    def only_prepare(update: Update, steps: object, prepare: Callable[[], object]) -> None:
        prepare()

    def do_nothing(*args: object) -> None:
        pass

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(EagerUpdates, "reduced", do_nothing))
        patches.enter_context(mock.patch.object(Update, "prefetch", do_nothing))
        patches.enter_context(mock.patch.object(Update, "run", only_prepare))
        for name in STOCKS_UPDATE:
            patches.enter_context(mock.patch.object(DeepSpeedZeroOptimizer_Stage3, name, do_nothing))
        yield


@contextmanager
def restored_process() -> Iterator[None]:
    """Restore the CPU affinity and the thread counts of this process at the end.

    SuperOffload and ZenFlow move this process to a part of its cores and do not move it back.
    """
    allowed, num_threads, variable = os.sched_getaffinity(0), torch.get_num_threads(), "OMP_NUM_THREADS"
    value_before = os.environ.get(variable)
    try:
        yield
    finally:
        _pin_all_threads(allowed)
        torch.set_num_threads(num_threads)
        os.environ.pop(variable, None)
        if value_before is not None:
            os.environ[variable] = value_before


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Use only deterministic algorithms on a GPU, so that bits can be compared with stock's.

    With the default algorithms, two runs of stock on a GPU differ. They also differ with ``warn_only=True``: attention
    then still uses cuDNN's kernel, or a nondeterministic backward. On the CPU, runs repeat their bits in any case.
    PyTorch raises ``RuntimeError`` for an operation that has no deterministic algorithm.
    """
    if not trains_on_gpu():
        yield
        return
    # PyTorch's module computes this attribute, which type checkers do not see.
    deterministic: Any = torch.utils.deterministic
    fills = deterministic.fill_uninitialized_memory
    # Filling every new tensor would take time that training does not take.
    deterministic.fill_uninitialized_memory = False
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
        deterministic.fill_uninitialized_memory = fills


def _pin_all_threads(cpus: set[int]) -> None:
    """Pin also the threads that exist already: they keep their own affinity when the process gets another one."""
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cpus)
