"""How much faster is our CPU kernel with bf16 states? All dtypes update in turns, with and without clipping.

A kernel that is limited by host memory is as much faster as it moves fewer bytes: 28 per parameter with fp32 states, 22
with bf16 masters and 14 with bf16 states.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from benchmarks.adam.adam_cpu import InPlaceScaling, seconds_of, step_of, torch_threads
from benchmarks.harness.rows import Row
from benchmarks.harness.targets import BF16_SPEEDUP, MEMORY_SHARE
from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.kernels.adam import DEFAULT_BETAS, STATE_DTYPES, AdamStep, StateDtypes
from deep_opt_states.device.kernels.choice import cpu_adam
from deep_opt_states.runtime.state_memory import StateMemory
from perf_model.prediction.cost import traffic_by_action
from perf_model.schedule.action import ActionKind
from perf_model.schedule.host_layout import WIDTHS_OF_STATES
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload

FACTORS = {"no clipping": 1.0, "clipped": 0.37}


class StatesUpdate:
    """Our update of ``numel`` parameters whose states have ``dtypes``, in memory like that of training."""

    def __init__(self, numel: int, threads: int, dtypes: StateDtypes) -> None:
        self._kernel = cpu_adam(1, DEFAULT_BETAS, adamw=True, num_threads=threads, dtypes=dtypes).kernel
        plan = UpdatePlan(workload=Workload.from_numels([numel]), placements=(Placement.CPU,), num_slots=1)
        params = [torch.zeros(numel, dtype=torch.bfloat16)]
        memory = self._memory = StateMemory(plan.workload, params, torch.bfloat16, HostDevice(), dtypes)
        memory.set_plan(plan)
        self._kernel.zero(memory.sub_groups[0].adam_tensors)
        generator = torch.Generator().manual_seed(0)
        for tensor in (memory.sub_groups[0].master, memory.sub_groups[0].grad):
            tensor.copy_(torch.randn(numel, generator=generator))
        # As where a GPU trains: bf16 masters are published themselves, and fp32 ones are rounded to other memory.
        (part,) = memory.parts
        self._tensors = part.cpu_update().tensors
        if dtypes.master == params[0].dtype:
            self._tensors = replace(self._tensors, param=None)

    def update(self, step: AdamStep) -> None:
        """Update all parameters once."""
        self._kernel.begin_step([step])
        self._kernel.update(0, self._tensors)


def compare(numel: int, threads: int, repetitions: int) -> Iterator[Row]:
    """Yield the rates by dtypes of the states, beside the bandwidth of host memory in the same turns."""
    widths = dict(zip(WIDTHS_OF_STATES, STATE_DTYPES, strict=True))
    with torch_threads(threads):
        updates = {name: StatesUpdate(numel, threads, dtypes) for name, dtypes in widths.items()}
        in_place = InPlaceScaling(numel)
        arms = [(name, clipping) for name in updates for clipping in FACTORS]
        seconds: dict[tuple[str, str], list[float]] = {arm: [] for arm in arms}
        in_place_s = []
        for repetition in range(1 + repetitions):
            for name, clipping in arms if repetition % 2 else reversed(arms):
                step = replace(step_of(1 + repetition), grad_scale=FACTORS[clipping])
                elapsed_s = seconds_of(updates[name].update, step)
                if repetition > 0:  # the first repetition warms up
                    seconds[name, clipping].append(elapsed_s)
            elapsed_s = seconds_of(in_place.update, step_of(1 + repetition))
            in_place_s += [elapsed_s] if repetition > 0 else []
    available = [2 * in_place.memory.nbytes / elapsed_s for elapsed_s in in_place_s]
    for name, clipping in arms:
        setting = {"parameters": numel, "threads": threads, "gradients": clipping}
        row = partial(Row, variant=f"CPU, ours, states {name}", setting=setting)
        taken_s, moved = seconds[name, clipping], traffic_by_action(WIDTHS_OF_STATES[name])[ActionKind.CPU_STEP].dram
        pairs = list(zip(seconds["fp32", clipping], taken_s, available, strict=True))
        yield row(quantity="update rate", unit="parameters/s", samples=[numel / elapsed_s for elapsed_s in taken_s])
        yield row(quantity=BF16_SPEEDUP, unit="times", samples=[fp32_s / elapsed_s for fp32_s, elapsed_s, _ in pairs])
        shares = [moved * numel / elapsed_s / bytes_per_s for _, elapsed_s, bytes_per_s in pairs]
        yield row(quantity=MEMORY_SHARE, unit="share", samples=shares)
