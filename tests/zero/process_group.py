"""Run a program that ``run_ranks`` has started in a process group."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from tests.fork_server import freeze_imported


@contextmanager
def process_group() -> Iterator[None]:
    """Run the block in a process group, with NaN in our device's unwritten memory, and end the process."""
    # Imported here, since some scripts must not have imported the plugin.
    from deep_opt_states.device.cpu import HostDevice

    for name in ("empty", "empty_host"):
        setattr(HostDevice, name, _poisoned(getattr(HostDevice, name)))
    # DeepSpeed collects garbage for each engine: 0.25 s of CPU time, if that goes through all imported modules.
    freeze_imported()
    deepspeed.init_distributed()
    # DeepSpeed's CPU accelerator returns False on some CPUs, but PyTorch trains fp16 on all of them.
    get_accelerator().is_fp16_supported = lambda: True
    yield
    dist.destroy_process_group()
    end_process()


def _poisoned(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return ``empty`` with its memory filled with NaN. It often holds zeros, which would hide that it is read."""

    def filled(*args: Any) -> torch.Tensor:
        tensor = empty(*args)
        tensor.view(torch.uint8).fill_(0xFF)
        return tensor

    return filled


def end_process() -> None:
    """End the process without the interpreter's shutdown, in which PyTorch and Gloo sometimes abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
