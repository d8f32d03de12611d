"""Let Transformers and Accelerate train on the device: both know GPUs of other kinds only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from accelerate import PartialState
from deepspeed.accelerator import get_accelerator
from transformers import training_args


@contextmanager
def trainer_on_device() -> Iterator[None]:
    """Let ``Trainer`` train on the device inside this context, which must be inside one of ``plugged``."""
    default = property(lambda _: torch.device(get_accelerator().current_device_name()))
    with (
        mock.patch.object(PartialState, "default_device", default),
        mock.patch.object(training_args, "is_torch_bf16_gpu_available", return_value=True),
    ):
        yield


def keep_process_group() -> None:
    """Let a process train with several Trainers. Accelerate destroys the process group after each of them."""
    PartialState.destroy_process_group = lambda *_: None
