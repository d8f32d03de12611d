"""Host memory for the probes of the CPU: reserved, touched and page-locked as training does it (``StateMemory``)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import AdamKernel, AdamTensors
from perf_model.schedule.host_layout import STATES, Widths, parts_of
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload

SUB_GROUPS = 8
"""Updated in turn, as in a step: when one comes again, the others have driven it out of the caches."""

WIDTHS = Widths(param=2, grad=2)
"""A bf16 model, whose gradients DeepSpeed accumulates in bf16 by default."""


class HostStates:
    """States of ``SUB_GROUPS`` sub-groups, ``numel`` parameters together, in one slab.

    ``kernel`` touches the pages first, called by ``thread``, and both of them are there to update the states: a page
    lies near the core that touches it first, which on a machine with several sockets decides how fast it is updated.
    The thread is not the caller's, since a kernel that pins its threads also pins the one that calls it.

    Raises ``HostMemoryError`` where the memory cannot be had or not be page-locked.
    """

    def __init__(self, device: Device[Any], numel: int, kernel: AdamKernel) -> None:
        plan = UpdatePlan(
            workload=Workload.of([numel // SUB_GROUPS] * SUB_GROUPS),
            placements=(Placement.CPU,) * SUB_GROUPS,
            num_slots=1,
        )
        self.kernel = kernel
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.slab = device.host_slab(WIDTHS.slab_bytes(plan))
        on_host: list[dict[str, torch.Tensor]] = [{} for _ in plan.placements]
        for part in parts_of(plan, WIDTHS):
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
        """Give the memory back, once no probe works in it."""
        self.thread.shutdown()
        self.sub_groups = []
        self.slab.close()
