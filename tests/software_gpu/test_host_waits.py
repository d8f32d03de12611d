"""Check where a step makes the host wait for the device: the numbers are those of the table in docs/dev/design.md.

The device is lazy: what nothing waits for is not executed.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from deep_opt_states.runtime.uninterrupted import THREAD_NAME
from deep_opt_states.runtime.worker import Task, Worker
from perf_model.schedule.placement import Placement
from tests.launch import REPOSITORY
from tests.ranks import on_ranks, once
from tests.software_gpu import device
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import Settings
from tests.zero.parity.case import CPU, NO_THROUGHPUT_TIMER, RESIDENT, STREAMED, STRIDE_2, Case, not_deferred
from tests.zero.parity.training import Block, closing_engine, shared_folder, train

STEPS, STEADY_FROM = 5, 2
"""In the first step no update is in flight, and after the second DeepSpeed has a trace of the modules."""

LAZY = Settings(lazy=True, lazy_s=20.0, trace=True)

PLACEMENTS: dict[str, dict[str, Any]] = {
    "cpu": CPU,
    "stride": {**STRIDE_2, "num_slots": 2},
    "streamed": {**STREAMED, "num_slots": 2},
    "resident": RESIDENT,
}
"""The number of slots is given: otherwise the host waits once, in the step in which slots are added."""

UPDATES: dict[str, Callable[[dict[str, Any]], Block]] = {"ends in step": not_deferred, "deferred": dict}

HELPERS = ("library.py", "device.py", "cuda.py", "plugged.py", "compat.py", "nvtx.py", "__init__.py")
"""Files whose functions wait on behalf of their callers. ``__init__.py`` is that of ``torch.accelerator``."""

WORKER = "worker"
"""The reason of a wait for a task of the worker."""


def variants() -> Iterator[dict[str, Any]]:
    """Yield the trainings: with stock, or with a placement and an end of the update."""
    for dtype, offloads in (("bf16", False), ("fp16", True), ("fp32", False)):
        variant = {"dtype": dtype, "offloads": offloads}
        yield {**variant, "placement": "", "update": "stock"}
        for placement, update in product(PLACEMENTS, UPDATES):
            if dtype == "bf16" or (placement, update) == ("stride", "deferred"):
                yield {**variant, "placement": placement, "update": update}


def name_of(wait: device.Wait) -> list[str]:
    """Return the reason of the wait, the thread, and the nearest caller that waits for a purpose of its own."""
    caller = next(caller for caller in wait.callers if caller.partition(":")[0] not in HELPERS)
    thread = "worker" if wait.thread == "deep_opt_states-cpu-lane" else "script"
    return [wait.reason, thread, caller]


def recorded_waits_for_the_worker(waits: list[device.Wait]) -> AbstractContextManager[object]:
    """Return a context in which the waits of the main thread, and of its sections, for the worker are recorded."""
    submit = Worker.submit

    def recorded(wait: Callable[..., Any]) -> Callable[..., Any]:
        def recorded_wait(timeout: float | None = None) -> Any:
            if threading.current_thread().name in (threading.main_thread().name, THREAD_NAME):
                waits.append(device.Wait(WORKER, "script", ("",)))
            return wait(timeout)

        return recorded_wait

    def submit_recorded(self: Worker, task: Task) -> Future[None]:
        future = submit(self, task)
        for name in ("result", "exception"):
            setattr(future, name, recorded(getattr(future, name)))
        return future

    return mock.patch.object(Worker, "submit", submit_recorded)


def waits_of(case: Case, block: Block) -> dict[str, Any]:
    """Train the case, and return the waits of each steady forward, backward and step, and the copies of all."""
    steady: dict[str, list[list[list[str]]]] = {"forward": [], "backward": [], "step": []}
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
                    steady[phase].append([name_of(wait) for wait in waits])
                if phase == "step" and engine.global_steps == STEADY_FROM:
                    device.call("drain")
                    device.take_spans()
                return result

            return run

        for phase in steady:
            patches.enter_context(mock.patch.object(engine, phase, recorded(phase)))
        left_to_issue: list[int] = []
        if block is not None:
            executor, report = engine.optimizer._running.executor, engine.optimizer.report

            def updated(*args: Any, reported: Callable[..., Any] = report.updated) -> None:
                if executor.pending:
                    left_to_issue.append(len(executor._issuer.schedule.actions) - executor._issuer.issued)
                reported(*args)

            patches.enter_context(mock.patch.object(report, "updated", updated))
        # The record would read the optimizer's states, with copies of its own.
        with mock.patch("tests.zero.parity.training.collect"):
            train(engine, case, folder)
        if block is not None:
            engine.optimizer._update.wait()
        device.call("drain")
        copies = Counter(span.name for span in device.take_spans() if span.name.startswith("copy "))
        sub_groups = len(engine.optimizer.fp16_groups)
        on_cpu = [] if block is None else [unit for unit in engine.optimizer.plan.placements if unit is Placement.CPU]
    return {
        "waits": steady,
        "left to issue": left_to_issue,
        "copies": copies,
        "sub-groups": sub_groups,
        "units on the CPU": len(on_cpu),
    }


@once
def trained(world_size: int) -> list[dict[str, Any]]:
    """Return what rank 0 has found, by variant."""
    first, *_ = on_ranks(world_size, train_all, group=software_process_group, timeout_s=600)
    return list(first)


def train_all() -> list[dict[str, Any]]:
    results = []
    for variant in variants():
        update = variant["update"]
        block = None if update == "stock" else UPDATES[update](PLACEMENTS[variant["placement"]])
        case = Case(
            name="host waits",
            blocks=(block or {},),
            world_size=dist.get_world_size(),
            dtype=variant["dtype"],
            steps=STEPS,
            clip=0.3,
            offload_param=variant["offloads"],
            extra={**NO_THROUGHPUT_TIMER, "steps_per_print": 1},
        )
        results.append({**variant, "label": " ".join(map(str, variant.values())), **waits_of(case, block)})
    return results


STEADY_STEPS = STEPS - STEADY_FROM

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
REPORTS = ("exposure.py:phases", "action_events.py:timeline")
"""The report of the last update waits for its events, which have ended long before."""

WHOLE_DEVICE = "synchronize"
"""The reason of a wait for all streams."""

GATHERS = ("partition_parameters.py", "partitioned_param_coordinator.py")
"""DeepSpeed's gathers in forward and backward: how often the host waits depends on how far they are ahead."""

COPY_OF_OFFLOADED = "copy H2D, blocking"
"""The wait for a copy that DeepSpeed issues before it gathers an offloaded parameter, with several ranks only."""

CONDITIONS = {
    "": lambda variant, world_size: True,
    "fp16": lambda variant, world_size: variant["dtype"] == "fp16",
    "several ranks": lambda variant, world_size: world_size > 1,
    "no `offload_param`": lambda variant, world_size: not variant["offloads"],
}

COLUMNS = {"stock": 0, "ends in step": 1, "deferred": 2}


@cache
def table() -> dict[tuple[str, str], tuple[str, tuple[str, ...]]]:
    """Return the condition and the numbers of each row, by phase and row."""
    design = (REPOSITORY / "docs/dev/design.md").read_text()
    section = design.partition("## Waits of the host\n")[2].partition("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {(phase.strip("`()"), row): (condition, tuple(numbers)) for phase, row, condition, *numbers in lines[2:]}


def expected(variant: dict[str, Any], world_size: int) -> dict[tuple[str, str], int]:
    """Return how often the host waits per step, by phase and row; rows without waits are left out."""
    found = {}
    for key, (condition, numbers) in table().items():
        # A cell has ``3``, or ``4n`` for n sub-groups.
        factor, of_sub_groups = re.fullmatch(r"(\d*)(n?)", numbers[COLUMNS[variant["update"]]]).groups()  # type: ignore[union-attr]
        count = int(factor or 1) * (variant["sub-groups"] if of_sub_groups else 1)
        if count and CONDITIONS[condition](variant, world_size):
            found[key] = count
    return found


def by_row(variant: dict[str, Any], world_size: int) -> Iterator[Counter[tuple[str, str]]]:
    """Return the waits of each step by phase and row, and fail the test for a wait that has no row."""
    for step in range(STEADY_STEPS):
        counted: Counter[tuple[str, str]] = Counter()
        for phase, waits in variant["waits"].items():
            for reason, thread, caller in waits[step]:
                if caller in REPORTS or reason == WORKER:
                    continue
                assert thread != "worker", caller
                if caller.startswith(GATHERS) and (phase != "step" or reason == COPY_OF_OFFLOADED):
                    assert reason != COPY_OF_OFFLOADED or (variant["offloads"] and world_size > 1)
                else:
                    counted[ROWS[caller]] += 1
                    assert ROWS[caller][0] == phase, f"{caller} waits in {phase}, step {step}"
        yield counted


GROUP = pytest.mark.xdist_group("host waits")
RUNS = pytest.mark.parametrize(
    "world_size", [pytest.param(1, marks=GROUP), pytest.param(2, marks=[GROUP, pytest.mark.thorough])]
)


def test_the_table_of_waits_in_the_documentation_has_every_row() -> None:
    assert table().keys() == set(ROWS.values())
    assert {condition for condition, _ in table().values()} <= CONDITIONS.keys()


@RUNS
def test_the_host_waits_for_the_device_as_often_as_the_documentation_says(world_size: int) -> None:
    for found in trained(world_size):
        assert found["sub-groups"] >= 2, "a wait per sub-group would be noticed"
        for step, waits in enumerate(by_row(found, world_size)):
            assert waits == expected(found, world_size), f"{found['label']}, step {step}"
        # With several ranks, stock waits for the whole device when it has gathered the persistent parameters. An update
        # whose prefetches are in flight must not be waited for.
        reasons = {reason for steps in found["waits"].values() for waits in steps for reason, _, _ in waits}
        assert (WHOLE_DEVICE in reasons) == (found["update"] == "stock" and world_size > 1), found["label"]


@RUNS
def test_a_deferred_update_makes_forward_wait_for_cpu_units_alone_and_backward_for_the_rest(world_size: int) -> None:
    """Check also that the report of an update, for which the host waits, comes when the next one is issued."""
    in_forward = []
    for found in trained(world_size):
        by_phase = {
            phase: [sum(reason == WORKER for reason, *_ in waits) for waits in steps]
            for phase, steps in found["waits"].items()
        }
        on_cpu, label = found["units on the CPU"], found["label"]
        if found["offloads"]:
            continue
        # PUBLISH and CPU_STEP of each unit; the persistent unit is published in the step.
        persistent = 2 * (found["update"] == "deferred")
        in_step = persistent or 2 * on_cpu
        assert by_phase["step"] == [in_step] * STEADY_STEPS, label
        both = [sum(counts) for counts in zip(by_phase["forward"], by_phase["backward"], strict=True)]
        assert both == [2 * on_cpu - in_step] * STEADY_STEPS, label
        in_forward += by_phase["forward"]
        if found["update"] == "deferred":
            assert found["left to issue"] == [0] * (STEPS - 1), label
    assert max(in_forward) >= 3, "nothing was deferred"


@RUNS
def test_no_copy_of_the_hot_path_blocks_the_host_or_uses_pageable_memory(world_size: int) -> None:
    variants = trained(world_size)
    of_stock = {(found["dtype"], found["offloads"]): found for found in variants if found["update"] == "stock"}
    for found in variants:
        if found["update"] == "stock":
            continue
        label = found["label"]
        blocking = Counter(
            (reason, caller)
            for steps in found["waits"].values()
            for waits in steps
            for reason, _, caller in waits
            if reason.startswith("copy") and not caller.startswith(GATHERS)
        )
        # Only the norms and the agreements of the ranks are read, which the step cannot be decided without. The ranks
        # agree as often as the table has it: twice if the step waits for its update.
        norms = "norms.py:overflow" if found["dtype"] == "fp16" else "norms.py:per_sub_group"
        agreements = STEADY_STEPS * expected(found, world_size).get(ROWS["agreement.py:share"], 0)
        assert (agreements > 0) == (world_size > 1), label
        read = {norms: STEADY_STEPS, "agreement.py:share": agreements}
        assert blocking == Counter({("copy D2H, blocking", caller): count for caller, count in read.items()}), label
        pageable = {name: count for name, count in found["copies"].items() if name.endswith(", pageable")}
        # The script's loss and batches, inputs and targets, are not page-locked, and neither are the agreement's flags.
        down = STEADY_STEPS + agreements
        assert pageable == {"copy D2H, pageable": down, "copy H2D, pageable": 2 * STEADY_STEPS}, label
        if found["placement"] != "resident":
            assert {"copy H2D", "copy D2H"} < found["copies"].keys(), label
        # The check can fail: stock copies norms and parameters from pageable memory.
        stock = of_stock[found["dtype"], found["offloads"]]
        assert stock["copies"]["copy H2D, pageable"] > 10 * STEADY_STEPS
