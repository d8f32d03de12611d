"""Run the kernel on odd lengths, and the executor on a plan with every placement, for compute-sanitizer."""

from __future__ import annotations

import torch

from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from tests.gpu.kernels import train_both
from tests.gpu.updates import executed, serial
from tests.kernels.adam_steps import steps_of
from tests.runtime.random_states import same


def main() -> None:
    """Run both, and check the bits."""
    for numel in (1, 17, 4099):
        assert train_both(steps_of(1), numel, torch.bfloat16, torch.bfloat16) == []
    plan = UpdatePlan(
        workload=Workload.from_numels([33, 5000, 4096, 17]), placements=(*Placement, Placement.STREAMED), num_slots=1
    )
    found = executed(plan, torch.bfloat16, torch.bfloat16, seed=0, count=2)
    assert same(found, serial(plan, torch.bfloat16, torch.bfloat16, seed=0, count=2))
    print("same bits")


if __name__ == "__main__":
    main()
