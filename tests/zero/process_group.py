"""The process group of a script that ``run_ranks`` starts."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import cpuinfo
import deepspeed
import torch.distributed as dist


@contextmanager
def process_group() -> Iterator[None]:
    """Ends the process when the block has succeeded."""
    # DeepSpeedCPUAdam asks at each construction, and the answer takes a second.
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    deepspeed.init_distributed()
    yield
    dist.destroy_process_group()
    end_process()


def end_process() -> None:
    """Without the interpreter's shutdown, in which PyTorch and Gloo abort now and then, also with stock DeepSpeed.

    Seen with torch 2.13 on the CPU, in about one of 20 processes: "terminate called without an active exception".
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
