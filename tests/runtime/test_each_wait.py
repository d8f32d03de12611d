"""Remove each wait of the runtime, one at a time: training on the software GPU then has a race, or a wrong number.

A wait is a call in ``deep_opt_states/runtime`` that makes a stream or the host wait for an event, for all lanes or for
the worker; in a loop, each pass is one, and so is the first, second or third prefetch's wait for flushes in flight.
"""

from __future__ import annotations

import ast
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import TypeAlias
from unittest import mock

import pytest
import torch

import deep_opt_states.runtime
import deep_opt_states.zero.step
from deep_opt_states.device.cuda import CudaEvent, CudaStream
from deep_opt_states.runtime.lanes import LaneStreams
from deep_opt_states.zero.step.staging import Staging
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from tests.runtime.moving import Model, MovingIteration, random_iterations
from tests.runtime.on_software_gpu import SoftwareDevice, faults_of, is_right
from tests.runtime.random_states import same
from tests.software_gpu.plugged import plugged
from tests.software_gpu.racecheck import OrderedFuture
from tests.software_gpu.ranks import on_device

STEP = Path(deep_opt_states.zero.step.__file__).parent
SOURCES = [*Path(deep_opt_states.runtime.__file__).parent.glob("*.py"), STEP / "exposure.py", STEP / "staging.py"]
"""The runtime's files, and the files of a step that use streams themselves."""

# The file and the line of a wait; and training on the software GPU, which returns whether all numbers are right.
Place: TypeAlias = tuple[str, int]
Scenario: TypeAlias = Callable[[], bool]

WAITS = {
    "wait": CudaStream,
    "synchronize": CudaEvent,
    "drain": LaneStreams,
    "wait_until_drained": LaneStreams,
    "result": OrderedFuture,
}

WITHOUT_A_NUMBER = {
    "disk_states._transfer-0": "a disk; test_disk.py has two folders",
    "kept_failure.keep-0": "no update follows a failure",
    "executor.load_plan-1": "a disk; test_disk.py changes plans with reads in flight",
    "executor.touch-0": "all memory is zero already",
    "exposure.phases-0": "the host waits before it reads times",
    "issuer.first_error-0": "no update follows a failure",
    "issuer.finish_writes-0": "a disk; test_disk.py removes it",
    "issuer.on_thread-0": "the actions of one thread run in order; test_disk.py removes the waits of others",
    "issuer.on_thread-1": "the worker waits for no action of any plan; test_races.py draws such schedules",
    "lanes.timeline-0": "the host waits before it reads times",
    "worker.__init__-0": "the thread only enters the device",
}
"""The waits that change no number of a plan, or that other tests remove, with the reason."""


@cache
def waits_in_source() -> dict[str, Place]:
    found = {}
    for path in sorted(SOURCES):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
            waits = [call for call in calls if isinstance(call, ast.Attribute) and call.attr in WAITS]
            # Methods of these names of the runtime's own classes contain waits, but are none.
            of_runtime = ("self", "self._staging")
            lines = sorted(wait.lineno for wait in waits if ast.unparse(wait.value) not in of_runtime)
            found |= {f"{path.stem}.{function.name}-{number}": (path.name, line) for number, line in enumerate(lines)}
    assert found.keys() >= WITHOUT_A_NUMBER.keys()
    return {name: place for name, place in found.items() if name not in WITHOUT_A_NUMBER}


class RuntimeWaits:
    def __init__(self, removed: tuple[Place, int] | None = None) -> None:
        self.reached: set[tuple[Place, int]] = set()
        self._removed = removed
        self._last = threading.local()

    @contextmanager
    def observed(self) -> Iterator[None]:
        with ExitStack() as patches:
            for name, owner in WAITS.items():
                patches.enter_context(mock.patch.object(owner, name, self._replacement(getattr(owner, name))))
            yield

    def _replacement(self, original: Callable[..., object]) -> Callable[..., object]:
        def wait(*args: object) -> object:
            return None if self._is_removed(sys._getframe(1)) else original(*args)

        return wait

    def _is_removed(self, frame: FrameType) -> bool:
        path = Path(frame.f_code.co_filename)
        if path not in SOURCES:
            return False
        place = path.name, frame.f_lineno
        last = vars(self._last)
        number = last["number"] + 1 if last.get("frame") is frame else 0
        last.update(frame=frame, number=number)
        if frame.f_code.co_name == "_on_stream":
            issuer, prefetch = frame.f_locals["self"], frame.f_locals["action"].name
            number = [*issuer.flushes_before, prefetch].index(prefetch)
        self.reached.add((place, number))
        return (place, number) == self._removed


def moves() -> Iterator[Scenario]:
    """Yield training in which units move between updates, and steps before which no eager unit was updated."""
    for seed in range(16):
        persistent = [[(3, 9)], []] if seed % 2 else [[], [(0, 5)]]
        model = Model(numels=(40, 25), persistent=persistent, params_on_host=seed % 3 == 0)
        yield partial(is_right, model, random_iterations(random.Random(seed), model, 6, moves=True))
    numels = (40, 25, 30)
    plan = UpdatePlan(
        workload=Workload.from_numels(numels), placements=(Placement.STREAMED,) * 3, num_slots=1, eager=frozenset({2})
    )
    iterations = [
        MovingIteration(plan=plan, speculation=speculation, overlaps_flushes=True)
        for speculation in (SPECULATED, NOT_SPECULATED) * 2
    ]
    model = Model(numels=numels, persistent=[[], [], []])
    yield partial(is_right, model, iterations)
    in_flight = MovingIteration(plan=replace(plan, eager=frozenset()), prefetches=True, is_skipped=True)
    yield partial(is_right, model, [in_flight])


SPECULATED, NOT_SPECULATED = 4, 2
"""Seeds with which ``MovingTraining.speculate`` speculates the step that follows, and no step."""

BUFFER_NUMEL, NUMEL = 7, 100
RUNS = ((0, (3, 2)), (5, (20,)), (30, (1, 1, 9)), (41, (7,)), (48, (4,)), (60, (2, 30, 1)))
"""Gradients that are sent together: their offset in host memory, and the lengths of adjacent gradients."""


def gradients() -> bool:
    """Copy gradients in both directions. Their memory is overwritten when they are sent, as DeepSpeed does."""
    device = SoftwareDevice()
    staging = Staging(device, BUFFER_NUMEL, torch.float32)
    host, other = (device.empty_host(NUMEL, torch.float32).fill_(value) for value in (-1, -2))
    values, expected = torch.arange(NUMEL, dtype=torch.float32) / 3, torch.full((NUMEL,), -1.0)
    bucket, reduction = device.empty(NUMEL, torch.float32), device.stream()
    allocated = device.event()
    device.current_stream().record(allocated)
    reduction.wait(allocated)
    for offset, numels in RUNS:
        for numel in numels:
            end = offset + numel
            reduced = device.empty_host(numel, torch.float32).copy_(values[offset:end])
            expected[offset:end] = values[offset:end]
            with reduction.issue():
                device.copy(bucket[:numel], reduced)
                staging.send(host, offset, bucket[:numel])
                device.copy(bucket, other)
            offset = end
        with reduction.issue():
            staging.flush()
    staging.synchronize()
    found = host.clone()
    sent = device.empty_host(40, torch.float32).copy_(torch.arange(40))
    gradient, read_again = (device.empty(40, torch.float32) for _ in range(2))
    device.copy(gradient, sent)
    arrived = device.empty_host(40, torch.float32)
    staging.send(arrived, 0, gradient)
    staging.flush()
    staging.wait_for_copies()
    device.copy(read_again, arrived)
    staging.close()
    done = device.event()
    device.current_stream().record(done)
    done.synchronize()
    return same([found, arrived, read_again], [expected, sent, sent])


@cache
def scenarios() -> list[tuple[Scenario, set[tuple[Place, int]]]]:
    """Return the scenarios, which have no fault, each with the waits that it reaches."""
    found = []
    for scenario in (gradients, *moves()):
        waits = RuntimeWaits()
        with waits.observed():
            assert faults_of(scenario) == []
        found.append((scenario, waits.reached))
    return found


@pytest.mark.P6
@on_device
@plugged()
def test_the_runtime_without_one_of_its_waits_has_a_race_or_gives_a_wrong_number() -> None:
    all_reached = {wait for _, reached in scenarios() for wait in reached}
    for name, place in waits_in_source().items():
        removable = sorted(wait for wait in all_reached if wait[0] == place)
        assert removable, f"no scenario reaches {name}"
        for wait in removable:
            assert shows(wait), f"wait {wait[1]} of {name} can be left out"


def shows(wait: tuple[Place, int]) -> bool:
    with RuntimeWaits(wait).observed():
        return any(faults_of(scenario) for scenario, reached in scenarios() if wait in reached)
