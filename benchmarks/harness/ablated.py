"""What is switched off, or done by hand, for as long as an arm trains: there is no such switch for users."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import torch

from deep_opt_states.device.kernels import choice
from deep_opt_states.device.kernels.library import KernelUnavailable
from deep_opt_states.host.topology import cores_of


@contextmanager
def stocks_cpu_kernel() -> Iterator[None]:
    """Our schedule updates by stock's op in its three passes, as where there is no compiler."""

    def no_kernel(*args: object, **kwargs: object) -> object:
        raise KernelUnavailable("switched off by a benchmark")

    with mock.patch.object(choice, "FusedAdam", no_kernel):
        yield


@contextmanager
def process_as_it_was() -> Iterator[None]:
    """SuperOffload and ZenFlow move this process to a part of its cores, and do not move it back."""
    allowed, num_threads, variable = os.sched_getaffinity(0), torch.get_num_threads(), "OMP_NUM_THREADS"
    said = os.environ.get(variable)
    try:
        yield
    finally:
        _pin_all_threads(allowed)
        torch.set_num_threads(num_threads)
        os.environ.pop(variable, None)
        if said is not None:
            os.environ[variable] = said


@contextmanager
def bound_to_physical_cores() -> Iterator[None]:
    """What ``deepspeed --bind_cores_to_rank`` does for one rank: a thread for each physical core, each core's first
    logical CPU."""
    cores = cores_of(os.sched_getaffinity(0))
    with process_as_it_was():
        _pin_all_threads({min(core.cpus) for core in cores})
        torch.set_num_threads(len(cores))
        yield


def _pin_all_threads(cpus: set[int]) -> None:
    """Those that are there keep their own otherwise."""
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cpus)
