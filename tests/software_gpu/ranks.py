"""Prepare a process for training on the device, and on the CPU accelerator beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import deepspeed
import torch.distributed as dist

from tests.fork_server import freeze_imported
from tests.software_gpu import device
from tests.software_gpu.process_group import BACKEND, register_backend
from tests.zero.process_group import end_process


@contextmanager
def software_process_group() -> Iterator[None]:
    """Run the block in a process group of all ranks for both devices, and end the process when it has succeeded."""
    device.register()
    register_backend()
    freeze_imported()
    deepspeed.init_distributed(dist_backend=BACKEND)
    yield
    dist.destroy_process_group()
    end_process()
