"""Check that an interrupt of a wait is no failure: what is saved and trained afterwards is bit-identical to stock.

After each interrupt an engine saves a checkpoint, from which another one continues, and goes on with the step that was
interrupted, or with the next one if its update has begun.
"""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import count, product, takewhile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import deep_opt_states
from deep_opt_states.device.kernels.adam import RangeUpdate
from deep_opt_states.runtime.uninterrupted import Section
from deep_opt_states.zero.internals.agreement import StepAgreement
from deep_opt_states.zero.step.norms import Norms
from tests.forked_child import alarm_after
from tests.kernels.intercepted import before_each_update
from tests.ranks import on_ranks
from tests.tiers import thorough
from tests.zero.failures.test_failures import gather
from tests.zero.on_accelerator import GROUPS
from tests.zero.parity.case import CPU, NO_THROUGHPUT_TIMER, RESIDENT, STREAMED, STRIDE_2, Case, eager
from tests.zero.parity.training import (
    Block,
    Record,
    differences,
    forward,
    make_engine,
    parity_inputs,
    recorded,
    shared_folder,
    train_on_batch,
)

BLOCKS: dict[str, dict[str, Any]] = {
    "cpu": CPU,
    "stride": STRIDE_2,
    "streamed": {**STREAMED, "num_slots": 2},
    "resident": RESIDENT,
    "eager": eager(CPU),
}
CLIP = {"eager": 1.12}
"""The norm above which gradients are clipped. With the default of 0.5, every step is, and no speculated one is kept."""

OPTIMIZER = {"type": "AdamW", "params": {"lr": 3e-3, "bias_correction": False}}
"""Without bias correction, a resumed stock run is bit-identical to one run. With it, beta^t is computed in two ways."""

UPDATE_S = 0.002
"""The time that each range of an update takes in addition, so that the host waits."""

PACKAGE = str(Path(deep_opt_states.__file__).parent)


class Alarm(Exception):
    """The exception that the handler of a signal raises."""


INTERRUPTS: tuple[type[BaseException], ...] = (KeyboardInterrupt, Alarm)
WAITS = (Section.wait_for_end.__name__, "wait_for_all_ranks")


class StockTraining:
    """The states of stock after each number of steps, and the loss of each step; trained as far as they are needed."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._engine = make_engine(case, None)
        # Before the first step, stock has no moments.
        self._losses = [train_on_batch(self._engine, case, 0)]
        self._states = [Record()]

    def states(self, steps: int) -> Record:
        while len(self._states) <= steps:
            self._states.append(recorded(self._engine))
            self._losses.append(train_on_batch(self._engine, self._case, len(self._losses)))
        return self._states[steps]

    def loss(self, number: int) -> torch.Tensor:
        self.states(number)
        return self._losses[number]


class InterruptedTraining:
    """The training of one block with interrupts, and the engine that resumes from each of its checkpoints.

    The same engine goes on after an interrupt of a wait. Elsewhere, an interrupt may leave the gradients of half a
    backward, also with stock, or a stock that refuses to save. A new engine goes on then.
    """

    def __init__(self, case: Case, block: Block, stock: StockTraining, folder: Path) -> None:
        self.case, self.stock, self.folder = case, stock, folder
        self._block = block
        self.engine = make_engine(case, block)
        # Stock reads the checkpoints of the plugin.
        self.resuming = make_engine(case, None)
        # Without an interrupt, because stock has no states to compare with before it.
        train_on_batch(self.engine, case, 0)
        self.number = 1
        """The number of steps whose update has begun."""
        self._saves = 0
        self.save()
        self._good = self._saves, self.number
        """The last checkpoint that was compared with stock, and its number of steps."""

    def train_two_steps(self, between: str) -> None:
        """Train two steps. The first update is in flight when a reader of states comes, or the next forward."""
        train_on_batch(self.engine, self.case, self.number)
        self.number += 1
        BETWEEN[between](self)
        train_on_batch(self.engine, self.case, self.number)
        self.number += 1

    def save(self) -> None:
        self._saves += 1
        self.engine.save_checkpoint(str(self.folder / str(self._saves)))

    def is_interrupted(self, between: str, alarm: AbstractContextManager[Any]) -> bool:
        try:
            with alarm:
                self.train_two_steps(between)
            return False
        except INTERRUPTS as error:
            frame = interrupted_frame(error)
        try:
            self.save()
            self._resume()
        except Exception as error:
            raised_by = traceback.extract_tb(error.__traceback__)[-1]
            # Stock may refuse to save after an interrupt of its own code.
            if frame.filename.startswith((PACKAGE, __file__)) or "/deepspeed/" not in raised_by.filename:
                raise
        if frame.name not in WAITS:
            self.engine = make_engine(self.case, self._block)
            saved, self.number = self._good
            self.engine.load_checkpoint(str(self.folder / str(saved)))
        return True

    def _resume(self) -> None:
        self.resuming.load_checkpoint(str(self.folder / str(self._saves)))
        found = recorded(self.resuming)
        # The update of the interrupted step has begun, or not.
        choices = {number: differences(self.stock.states(number), found) for number in (self.number, self.number + 1)}
        fitting = [number for number, lines in choices.items() if not lines]
        assert len(fitting) == 1, choices
        (self.number,) = fitting
        self._good = self._saves, self.number
        assert torch.equal(train_on_batch(self.resuming, self.case, self.number), self.stock.loss(self.number))


def interrupted_frame(error: BaseException) -> traceback.FrameSummary:
    """Return the frame in which the signal came. Without a frame in between, it came between two lines of this file."""
    stack = traceback.extract_tb(error.__traceback__)
    return ([frame for frame in stack if frame.filename != __file__ or frame.name in WAITS] or stack)[-1]


BETWEEN: dict[str, Callable[[InterruptedTraining], object]] = {
    "nothing": lambda training: None,
    "save": InterruptedTraining.save,
    "evaluation": torch.no_grad()(
        lambda training: forward(training.engine, parity_inputs(training.case, -1, training.number))
    ),
    "gather": lambda training: gather(training.engine),
}


def interrupt_at_random_moments(number: int, training: InterruptedTraining) -> None:
    chance = random.Random(f"1 {training.case.name}")
    begin_s = time.perf_counter()
    training.train_two_steps("save")
    lasts_s = time.perf_counter() - begin_s

    def interrupt(*_: object) -> None:
        raise chance.choice(INTERRUPTS)

    while number:
        alarm = alarm_after(chance.uniform(0.0005, lasts_s), interrupt)
        number -= training.is_interrupted(chance.choice(list(BETWEEN)), alarm)


def interrupted_wait(owner: Any, name: str, before: bool, position: int) -> AbstractContextManager[object]:
    """Return a context in which this rank is interrupted before or after a call that waits for all ranks."""
    calls, wait = count(), getattr(owner, name)

    def wait_for_all_ranks(*args: Any, **kwargs: Any) -> Any:
        is_chosen = next(calls) == position
        result = None if is_chosen and before else wait(*args, **kwargs)
        if is_chosen:
            raise INTERRUPTS[position % 2]
        return result

    return mock.patch.object(owner, name, wait_for_all_ranks)


def interrupt_each_wait_for_all_ranks(training: InterruptedTraining) -> None:
    waits = ((Norms, "per_sub_group"), (StepAgreement, "share"))
    for (owner, name), before, between in product(waits, (True, False), BETWEEN):
        interrupts = map(partial(interrupted_wait, owner, name, before), count())
        assert sum(1 for _ in takewhile(partial(training.is_interrupted, between), interrupts)) >= 2


def slow(_: RangeUpdate) -> None:
    if threading.current_thread() is not threading.main_thread():
        time.sleep(UPDATE_S)


@pytest.mark.P6
@pytest.mark.parametrize("number", [3, thorough(50)])
@pytest.mark.parametrize("on", ["cpu", thorough("software_gpu")])
def test_after_an_interrupt_at_a_random_moment_training_is_saved_and_resumed_as_with_stock(
    number: int, on: str
) -> None:
    on_ranks(1, interrupt_each_block, partial(interrupt_at_random_moments, number), group=GROUPS[on], timeout_s=1800)


@pytest.mark.P6
@pytest.mark.thorough
def test_all_ranks_can_be_interrupted_in_each_wait_for_each_other() -> None:
    on_ranks(2, interrupt_each_block, interrupt_each_wait_for_all_ranks, timeout_s=1800)


def interrupt_each_block(interrupt: Callable[[InterruptedTraining], None]) -> None:
    for name, block in BLOCKS.items():
        clip, extra = CLIP.get(name, 0.5), {**NO_THROUGHPUT_TIMER, "optimizer": OPTIMIZER}
        case = Case(name=name, blocks=(), world_size=dist.get_world_size(), clip=clip, schedule=False, extra=extra)
        with shared_folder() as folder, before_each_update(slow):
            training = InterruptedTraining(case, block, StockTraining(case), folder)
            interrupt(training)
            training.engine.destroy()
            training.resuming.destroy()
