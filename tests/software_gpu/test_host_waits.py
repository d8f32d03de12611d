"""Check where a step makes the host wait for the device: the numbers match the table in docs/dev/design.md.

The device is lazy: what nothing waits for is not executed.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch.distributed as dist

from deep_opt_states.runtime.uninterrupted import THREAD_NAME
from perf_model.schedule.placement import Placement
from tests.launch import REPOSITORY
from tests.ranks import ranks
from tests.software_gpu import device
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import Settings
from tests.tiers import thorough
from tests.zero.parity.case import NO_THROUGHPUT_TIMER, RESIDENT, STRIDE_2, Case, not_deferred
from tests.zero.parity.training import Block, closing_engine, shared_folder, train

STEPS, STEADY_FROM = 5, 2
"""In the first step no update is in flight, and after the second DeepSpeed has a trace of the modules."""

STEADY_STEPS = STEPS - STEADY_FROM
LAZY = Settings(lazy=True, lazy_s=20.0)
STRIDE = {**STRIDE_2, "num_slots": 2}
"""The number of slots is given: otherwise the host waits once, in the step in which slots are added."""

HELPERS = ("library.py", "device.py", "cuda.py", "plugged.py", "compat.py", "nvtx.py", "__init__.py")
"""Files whose functions wait on behalf of their callers. ``__init__.py`` is ``torch.accelerator``'s."""

WHOLE_DEVICE, COPY_OF_OFFLOADED, WORKER = "synchronize", "copy H2D, blocking", "worker"
"""Reasons of waits: for all streams; for a copy that DeepSpeed issues before it gathers an offloaded parameter, with
several ranks only; and for a task of the worker."""

ROWS = {
    # Where the host waits, by the caller: the phase and the row of the table.
    "norms.py:per_sub_group": ("step", "norms of the gradients"),
    "norms.py:overflow": ("step", "norms of the gradients"),
    "stage3.py:complete_grad_norm_calculation_for_cpu_offload": ("step", "norms of the gradients"),
    "utils.py:mask_nan_or_inf_with_val_inplace": ("step", "norms of the gradients"),
    "stage3.py:has_overflow": ("step", "overflow"),
    "lanes.py:wait_until_drained": ("step", "end of the update"),
    "lanes.py:wait_for_caller": ("step", "end of backward, before the update begins"),
    "stage3.py:_reassign_or_swap_out_partitioned_parameters": ("step", "copies of the updated parameters"),
    "agreement.py:share": ("step", "agreement of the ranks that no update failed"),
    "partition_parameters.py:wait": ("step", "gather of the persistent parameters"),
    "partition_parameters.py:_allgather_params_coalesced": ("step", "gather of the persistent parameters"),
    "stage3.py:independent_gradient_partition_epilogue": ("backward", "reduction of the gradients"),
}
REPORTS = ("exposure.py:phases", "lanes.py:timeline")
"""The report of the last update waits for its events, which have ended long before."""

GATHERS = ("partition_parameters.py", "partitioned_param_coordinator.py")
"""DeepSpeed's gathers in forward and backward: how often the host waits depends on how far they are ahead."""

CONDITIONS: dict[str, Callable[[Case], bool]] = {
    "": lambda case: True,
    "fp16": lambda case: case.dtype == "fp16",
    "several ranks": lambda case: case.world_size > 1,
    "no `offload_param`": lambda case: not case.offload_param,
}


def table() -> dict[tuple[str, str], tuple[str, list[str]]]:
    design = (REPOSITORY / "docs/dev/design.md").read_text()
    section = design.partition("## Waits of the host\n")[2].partition("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {(phase.strip("`()"), row): (condition, numbers) for phase, row, condition, *numbers in lines[2:]}


@dataclass
class HostWaits:
    by_phase: dict[str, list[list[tuple[str, str]]]] = field(
        default_factory=lambda: {"forward": [], "backward": [], "step": []}
    )
    sub_groups: int = 0
    units_on_cpu: int = 0


def reason_and_caller(wait: device.Wait) -> tuple[str, str]:
    """Return the reason of a wait of the script, and the nearest caller that waits for a purpose of its own."""
    caller = next(caller for caller in wait.callers if caller.partition(":")[0] not in HELPERS)
    assert wait.thread != "deep_opt_states-cpu-lane", caller
    return wait.reason, caller


def recorded_waits_for_the_worker(waits: list[device.Wait]) -> AbstractContextManager[object]:
    """Return a context in which the waits of the main thread, and of its sections, for the worker are recorded."""

    def recorded(future: Future[Any], timeout: float | None = None, wait: Callable[..., Any] = Future.result) -> Any:
        if threading.current_thread().name in (threading.main_thread().name, THREAD_NAME):
            waits.append(device.Wait(WORKER, "script", ("",)))
        return wait(future, timeout)

    return mock.patch.object(Future, "result", recorded)


def waits_of(case: Case, block: Block) -> HostWaits:
    found = HostWaits()
    with (
        plugged(LAZY),
        shared_folder() as folder,
        closing_engine(case, block) as engine,
        device.recorded_host_waits() as waits,
        recorded_waits_for_the_worker(waits),
        ExitStack() as patches,
    ):

        def recorded(phase: str) -> Callable[..., Any]:
            original = getattr(engine, phase)

            def run(*args: Any) -> Any:
                waits.clear()
                result = original(*args)
                if engine.global_steps - (phase == "step") >= STEADY_FROM:
                    found.by_phase[phase].append([reason_and_caller(wait) for wait in waits])
                return result

            return run

        for phase in found.by_phase:
            patches.enter_context(mock.patch.object(engine, phase, recorded(phase)))
        if block is not None:
            found.units_on_cpu = list(engine.optimizer.plan.placements).count(Placement.CPU)
        # The record would read the optimizer's states, with copies of its own.
        with mock.patch("tests.zero.parity.training.collect"):
            train(engine, case, folder)
        found.sub_groups = len(engine.optimizer.fp16_groups)
    return found


def expected_waits(case: Case, block: Block, sub_groups: int) -> Counter[tuple[str, str]]:
    expected: Counter[tuple[str, str]] = Counter()
    for key, (condition, numbers) in table().items():
        # A cell has ``3``, or ``4n`` for n sub-groups. The columns: stock, the update ends in step(), deferred.
        column = 0 if block is None else 1 + block.get("overlap_forward", True)
        factor, of_sub_groups = re.fullmatch(r"(\d*)(n?)", numbers[column]).groups()  # type: ignore[union-attr]
        if CONDITIONS[condition](case):
            expected[key] = int(factor or 1) * (sub_groups if of_sub_groups else 1)
    return +expected


def check_table(case: Case, block: Block, found: HostWaits) -> None:
    """Check that each wait of a step has a row of the table, and that there are as many as the table says."""
    assert found.sub_groups >= 2, "a wait per sub-group would be noticed"
    for step in range(STEADY_STEPS):
        counted: Counter[tuple[str, str]] = Counter()
        for phase, waits in found.by_phase.items():
            for reason, caller in waits[step]:
                if caller.startswith(GATHERS) and (phase != "step" or reason == COPY_OF_OFFLOADED):
                    assert reason != COPY_OF_OFFLOADED or (case.offload_param and case.world_size > 1)
                elif caller not in REPORTS and reason != WORKER:
                    counted[ROWS[caller]] += 1
                    assert ROWS[caller][0] == phase, f"{caller} waits in {phase}, step {step}"
        assert counted == expected_waits(case, block, found.sub_groups), step
    # With several ranks, stock waits for the whole device when it has gathered the persistent parameters. An update
    # whose prefetches are in flight must not be waited for.
    reasons = {reason for steps in found.by_phase.values() for waits in steps for reason, _ in waits}
    assert (WHOLE_DEVICE in reasons) == (block is None and case.world_size > 1)


def check_worker(block: dict[str, Any], found: HostWaits) -> None:
    is_deferred = block.get("overlap_forward", True)
    forward, backward, step = (
        [[reason for reason, _ in waits].count(WORKER) for waits in steps] for steps in found.by_phase.values()
    )
    # PUBLISH and CPU_STEP of each unit; the persistent unit is published in the step.
    in_step = 2 if is_deferred else 2 * found.units_on_cpu
    assert step == [in_step] * STEADY_STEPS
    both = [sum(counts) for counts in zip(forward, backward, strict=True)]
    assert both == [2 * found.units_on_cpu - in_step] * STEADY_STEPS
    assert max(forward) > 0 or found.units_on_cpu == 1 or not is_deferred, "nothing was deferred"


@ranks(1, thorough(2), group=software_process_group, timeout_s=600)
def test_the_host_waits_as_often_as_the_documentation_says() -> None:
    assert table().keys() == set(ROWS.values())
    assert {condition for condition, _ in table().values()} <= CONDITIONS.keys()
    bf16 = (STRIDE, not_deferred(STRIDE), RESIDENT)
    for dtype, blocks in (("bf16", bf16), ("fp16", (STRIDE,)), ("fp32", (STRIDE,))):
        case = Case(
            name="host waits",
            blocks=blocks,
            world_size=dist.get_world_size(),
            dtype=dtype,
            steps=STEPS,
            clip=0.3,
            offload_param=dtype == "fp16",
            extra={**NO_THROUGHPUT_TIMER, "steps_per_print": 1},
        )
        for block in (None, *blocks):
            found = waits_of(case, block)
            check_table(case, block, found)
            if block is not None and not case.offload_param:
                check_worker(block, found)
