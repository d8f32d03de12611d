"""Run ranks on an accelerator: the CPU accelerator, or a GPU in software."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
from deepspeed.accelerator import get_accelerator

from tests.zero.process_group import process_group


@contextmanager
def software_gpu(adversary: str) -> Iterator[None]:
    """Run the block on the GPU in software, in a process group of all ranks, and end the process when it succeeded."""
    # Imported here, because most programs do not load the device.
    from deep_opt_states.zero.start import planning
    from tests.model.profiles import profile
    from tests.software_gpu.plugged import plugged
    from tests.software_gpu.ranks import software_process_group
    from tests.software_gpu.settings import ADVERSARIES

    # A quick profile of the device, on a machine under load, can lack a rate that rules by name need.
    given_rates = mock.patch.object(planning, "quick_profile", return_value=profile())
    with software_process_group(), plugged(ADVERSARIES[adversary]), given_rates:
        yield


GROUPS = {"cpu": process_group, "software_gpu": partial(software_gpu, "lazy")}


def on_accelerator(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the current device of DeepSpeed's accelerator. The copy does not block the host."""
    return tensor.to(get_accelerator().current_device_name(), non_blocking=True)
