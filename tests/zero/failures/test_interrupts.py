"""Check that an interrupt of a wait is no failure: what is saved and trained afterwards is bit-identical to stock.

An engine trains one step after the other. After each interrupt it saves a checkpoint, which another engine loads and
continues from, and goes on with the step that was interrupted, or with the next one if its update has begun. Stock's
states after each number of steps, and its losses, are compared to the bit.
"""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, product, repeat
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param

import deep_opt_states
from deep_opt_states.device.cpu import HostEvent
from deep_opt_states.device.cuda import CudaEvent
from deep_opt_states.device.kernels.adam import RangeUpdate
from deep_opt_states.runtime.failure import UpdateFailed
from deep_opt_states.runtime.uninterrupted import Section
from deep_opt_states.zero.internals.agreement import StepAgreement
from deep_opt_states.zero.step.norms import Norms
from deep_opt_states.zero.step.staging import Staging
from tests.forked_child import alarm_after
from tests.kernels.intercepted import before_each_update
from tests.ranks import on_ranks
from tests.tiers import thorough
from tests.zero.on_accelerator import GROUPS, on_accelerator
from tests.zero.parity.case import CPU, NO_THROUGHPUT_TIMER, RESIDENT, STREAMED, STRIDE_2, Case, eager
from tests.zero.parity.parity_model import batch
from tests.zero.parity.training import Block, Record, collect, differences, make_engine, shared_folder

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
"""Without bias correction, a resumed run of stock has the bits of one run. With it, beta^t is computed in two ways."""

UPDATE_S = 0.002
"""The time that each range of an update takes in addition, so that the host waits."""

PACKAGE = str(Path(deep_opt_states.__file__).parent)


class Alarm(Exception):
    """The exception that the handler of a signal raises."""


INTERRUPTS: tuple[type[BaseException], ...] = (KeyboardInterrupt, Alarm)


class StockTraining:
    """The states of stock after each number of steps, and the loss of each step; trained as far as they are needed."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._engine = make_engine(case, None)
        # Before the first step, stock has no moments.
        self._losses = [step(self._engine, case, 0)]
        self._states = [Record()]

    def states(self, steps: int) -> Record:
        while len(self._states) <= steps:
            record = Record()
            collect(self._engine.optimizer, record)
            self._states.append(record)
            self._losses.append(step(self._engine, self._case, len(self._losses)))
        return self._states[steps]

    def loss(self, number: int) -> torch.Tensor:
        self.states(number)
        return self._losses[number]


def forward(engine: Any, case: Case, number: int) -> torch.Tensor:
    x, target = batch(case, dist.get_rank(), number, torch.bfloat16)
    loss: torch.Tensor = engine(on_accelerator(x), on_accelerator(target), 1.0, 1.0)
    return loss


def step(engine: Any, case: Case, number: int) -> torch.Tensor:
    loss = forward(engine, case, number)
    engine.backward(loss)
    engine.step()
    return loss.detach()


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
        self._resuming = make_engine(case, None)
        # Without an interrupt, because stock has no states to compare with before it.
        step(self.engine, case, 0)
        self.number = 1
        """The number of steps whose update has begun."""
        self._saves = 0
        self.save()
        self._good = self._saves, self.number
        """The last checkpoint that was compared with stock, and its number of steps."""

    def train_two_steps(self, between: str) -> None:
        """Train two steps. The first update is in flight when a reader of states comes, or the next forward."""
        step(self.engine, self.case, self.number)
        self.number += 1
        BETWEEN[between](self)
        step(self.engine, self.case, self.number)
        self.number += 1

    def save(self) -> None:
        self._saves += 1
        self.engine.save_checkpoint(str(self.folder / str(self._saves)))

    def interrupted(self, between: str, *interrupts: AbstractContextManager[Any]) -> dict[str, Any] | None:
        """Train two steps inside the first context. Return where it was interrupted, and the problem that was found.

        The other contexts interrupt the saving afterwards. Return None if nothing was interrupted.
        """
        places: list[Interruption] = []
        runs = chain([partial(self.train_two_steps, between)], repeat(self.save))
        found: dict[str, Any] = {"between": between, "problem": ""}
        try:
            for context, run in zip(interrupts, runs, strict=False):
                try:
                    with context:
                        run()
                except INTERRUPTS as error:
                    places.append(Interruption.from_error(error))
                if not places:
                    return None
            self.save()
            found["problem"] = self._problem()
        except UpdateFailed as error:
            found["problem"] = f"UpdateFailed because of {error.__cause__!r}"
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            if not any(place.in_stock for place in places) or "/deepspeed/" not in frame.filename:
                raise
            found["of stock"] = f"{type(error).__name__} in {Path(frame.filename).name}:{frame.name}"
        if not all(place.in_wait for place in places):
            self._go_on_in_new_engine()
        return {**found, "places": [str(place) for place in places], "waits": all(place.in_wait for place in places)}

    def _problem(self) -> str:
        """Resume from the checkpoint after an interrupt, and return the differences from stock, or ""."""
        saved = self._saves
        self._resuming.load_checkpoint(str(self.folder / str(saved)))
        found = Record()
        collect(self._resuming.optimizer, found)
        # The update of the interrupted step has begun, or not.
        choices = {number: differences(self.stock.states(number), found) for number in (self.number, self.number + 1)}
        fitting = [number for number, lines in choices.items() if not lines]
        if not fitting:
            return f"the states of neither number of steps: {choices}"
        (self.number,) = fitting
        self._good = saved, self.number
        loss = step(self._resuming, self.case, self.number)
        expected = self.stock.loss(self.number)
        return "" if torch.equal(loss, expected) else f"loss {loss} after resuming, stock has {expected}"

    def _go_on_in_new_engine(self) -> None:
        """Train on in a new engine, from the last good checkpoint."""
        self.engine = make_engine(self.case, self._block)
        saved, self.number = self._good
        self.engine.load_checkpoint(str(self.folder / str(saved)))

    def close(self) -> None:
        self.engine.destroy()
        self._resuming.destroy()


@dataclass(frozen=True)
class Interruption:
    """The place of an interrupt: the callers in the plugin, and the interrupted code, as ``file.function``."""

    callers: tuple[str, ...]
    interrupted: str
    in_stock: bool
    """Whether DeepSpeed was interrupted, or PyTorch."""
    in_wait: bool
    """Whether the host waited for the plugin."""

    @classmethod
    def from_error(cls, error: BaseException) -> Interruption:
        stack = traceback.extract_tb(error.__traceback__)
        frames = [frame for frame in stack if frame.filename != __file__]
        ours = [frame for frame in frames if frame.filename.startswith(PACKAGE)]
        # Without a frame in between, the signal came between two lines of this file.
        last = (frames or stack)[-1]
        *callers, interrupted = (f"{Path(frame.filename).stem}.{frame.name}" for frame in [*ours[-5:], last])
        in_wait = last.name == Section.wait_for_end.__name__ or stack[-1].name == WaitInterrupt.wait.__name__
        return cls(tuple(callers), interrupted, bool(frames) and last not in ours, in_wait)

    def __str__(self) -> str:
        return " > ".join(dict.fromkeys([*self.callers, self.interrupted]))


def raising(exception: type[BaseException]) -> Callable[..., None]:
    """Return a signal handler that raises ``exception``."""

    def handle(*_: object) -> None:
        raise exception

    return handle


BETWEEN: dict[str, Callable[[InterruptedTraining], object]] = {
    "nothing": lambda training: None,
    "save": InterruptedTraining.save,
    "evaluation": lambda training: evaluate(training),
    "safe_get": lambda training: safe_get_full_fp32_param(next(training.engine.module.parameters())),
    "gather": lambda training: gather(training),
    "states": lambda training: training.engine.optimizer.state,
}
"""The readers that come between the two steps."""


@torch.no_grad()
def evaluate(training: InterruptedTraining) -> None:
    forward(training.engine, training.case, training.number)


def gather(training: InterruptedTraining) -> None:
    with deepspeed.zero.GatheredParameters(list(training.engine.module.parameters())):
        pass


WAITS = (
    (Section, "wait_for_end"),
    (HostEvent, "synchronize"),
    (CudaEvent, "synchronize"),
    (Staging, "synchronize"),
    (Norms, "per_sub_group"),
    (Norms, "overflow"),
    (StepAgreement, "share"),
)
"""The calls in which the main thread waits: for a section, an event, the reduction, the norms and other ranks."""

COLLECTIVE_WAITS = WAITS[-3:]
"""The waits that all ranks reach in the same order. How often the others wait depends on the speed of each rank."""


class WaitInterrupt(AbstractContextManager[None]):
    """A context that raises an exception before or after wait number ``position`` of the main thread."""

    def __init__(self, position: int, exception: type[BaseException], *, before: bool) -> None:
        self.reached = 0
        self._position, self._exception, self._before = position, exception, before
        self._patches = ExitStack()

    def __enter__(self) -> None:
        for owner, name in WAITS if dist.get_world_size() == 1 else COLLECTIVE_WAITS:
            self._patches.enter_context(mock.patch.object(owner, name, self._counted(getattr(owner, name))))

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def _counted(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.wait(partial(wait, *args, **kwargs))

    def wait(self, wait: Callable[[], Any]) -> Any:
        """Call ``wait``, and raise the exception before or after that in the chosen wait of the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return wait()
        is_chosen = self.reached == self._position
        self.reached += 1
        if is_chosen and self._before:
            raise self._exception
        result = wait()
        if is_chosen:
            raise self._exception
        return result


def moments(training: InterruptedTraining, seed: int, number: int) -> Iterator[dict[str, Any]]:
    """Interrupt ``number`` trainings of two steps at random moments, and some of the saves after that."""
    chance = random.Random(f"{seed} {training.case.name}")
    begin_s = time.perf_counter()
    training.train_two_steps("save")
    lasts_s = time.perf_counter() - begin_s
    found = 0
    while found < number:
        alarms = [
            alarm_after(chance.uniform(0.0005, lasts_s), raising(chance.choice(INTERRUPTS)))
            for _ in range(chance.choice((1, 1, 3)))
        ]
        result = training.interrupted(chance.choice(list(BETWEEN)), *alarms)
        if result is not None:
            found += 1
            yield result


def waits(training: InterruptedTraining) -> Iterator[dict[str, Any]]:
    """Interrupt each wait, before and after the host has waited, with each reader between the steps."""
    for between, before in product(BETWEEN, (True, False)):
        for position in count():
            interrupt = WaitInterrupt(position, INTERRUPTS[position % 2], before=before)
            result = training.interrupted(between, interrupt)
            if result is None:
                break
            yield {**result, "position": position, "before": before}


def slow(_: RangeUpdate) -> None:
    if threading.current_thread() is not threading.main_thread():
        time.sleep(UPDATE_S)


def interrupt_at(places: Callable[..., Iterator[dict[str, Any]]], name: str, *arguments: int) -> list[dict[str, Any]]:
    """Train a block with the interrupts that ``places`` makes, and return the findings at each."""
    case = Case(
        name=name,
        blocks=(),
        world_size=dist.get_world_size(),
        clip=CLIP.get(name, 0.5),
        schedule=False,
        extra={**NO_THROUGHPUT_TIMER, "optimizer": OPTIMIZER},
    )
    with shared_folder() as folder, before_each_update(slow):
        training = InterruptedTraining(case, BLOCKS[name], StockTraining(case), folder)
        found = list(places(training, *arguments))
        training.close()
    return found


@pytest.mark.P6
@pytest.mark.parametrize("number", [3, thorough(50)])
@pytest.mark.parametrize("on", GROUPS)
def test_after_an_interrupt_at_a_random_moment_training_is_saved_and_resumed_as_with_stock(
    number: int, on: str
) -> None:
    on_ranks(1, interrupt_at_random_moments, number, group=GROUPS[on], timeout_s=1800)


def interrupt_at_random_moments(number: int) -> None:
    for name in BLOCKS:
        found = interrupt_at(moments, name, 1, number)
        assert len(found) == number
        assert [place for place in found if place["problem"]] == [], name


@pytest.mark.P6
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("block", "world_size", "on"),
    [*((block, 1, on) for block in BLOCKS for on in GROUPS), ("stride", 2, "cpu"), ("eager", 2, "cpu")],
)
def test_each_wait_of_the_host_can_be_interrupted_and_repeated(block: str, world_size: int, on: str) -> None:
    """Check an interrupt of all ranks in the same wait, which is a collective if there are several ranks."""
    on_ranks(world_size, interrupt_at_each_wait, block, group=GROUPS[on], timeout_s=1800)


def interrupt_at_each_wait(block: str) -> None:
    found = interrupt_at(waits, block)
    assert len(found) * dist.get_world_size() > 100
    assert all(place["waits"] for place in found)
    assert [place for place in found if place["problem"]] == []
