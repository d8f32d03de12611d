"""Reserve host memory for the CPU's probes, and touch and page-lock it as training does (``StateMemory``)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import AdamKernel, AdamTensors
from perf_model.schedule.host_layout import Widths, slab_tensors
from perf_model.schedule.workload import STATES, Workload

SUB_GROUPS = 8
"""The number of sub-groups, updated one after another as in a step: when an update returns to the first, the others
have driven it out of the caches."""

WIDTHS = Widths(param=2, grad=2)
"""The widths of a bf16 model, whose gradients DeepSpeed accumulates in bf16 by default."""


class HostStates:
    """The states of ``SUB_GROUPS`` sub-groups, ``numel`` parameters in total, in one slab.

    ``kernel`` touches the pages first, called on ``thread``, and both are used to update the states later: a page is
    placed near the core that touches it first, which decides how fast it is updated on a machine with several sockets.
    The thread is not the caller's, because a kernel that pins its threads also pins the thread that calls it.

    Raise ``HostMemoryError`` if the memory cannot be reserved or page-locked.
    """

    def __init__(self, device: Device[Any], numel: int, kernel: AdamKernel) -> None:
        workload = Workload.from_numels([numel // SUB_GROUPS] * SUB_GROUPS)
        self.kernel = kernel
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.slab = device.host_slab(WIDTHS.slab_bytes(workload))
        on_host: list[dict[str, torch.Tensor]] = [{} for _ in range(SUB_GROUPS)]
        for part in slab_tensors(workload, WIDTHS):
            dtype = torch.float32 if part.name in STATES else torch.bfloat16
            on_host[part.sub_group][part.name] = self.slab.tensor(part.offset_bytes, part.numel, dtype)
        self.sub_groups = [AdamTensors(param=tensors.pop("rounded"), **tensors) for tensors in on_host]
        try:
            for tensors in self.sub_groups:
                self.thread.submit(kernel.zero, tensors).result()
            self.slab.lock()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free the memory. No probe may use it afterwards."""
        self.thread.shutdown()
        self.sub_groups = []
        self.slab.close()
