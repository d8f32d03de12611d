"""Why is forward slower beside an update? 36 tiny layers run while the worker updates a large parameter.

Each mode changes the work of the worker, or leaves out one thing. One engine trains in one process, with another mode
in each iteration: engines in processes of their own differed by more than the modes do. Only the layers are timed, on
the host. Forward uses the large parameter after them, so they do not wait for it. The states' values mean nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any
from unittest import mock

import deepspeed
import torch
from torch import Tensor, nn

from benchmarks.harness.charts import Bars
from benchmarks.harness.rows import Row
from benchmarks.harness.variants import ours
from benchmarks.hooks import HUGGING_FACE_AUTO, SETTING, now
from deep_opt_states.device.kernels.library import CUpdate, InstructionSet, Library
from deep_opt_states.host import machine
from deep_opt_states.runtime.executor import Executor
from examples.common.byte_gpt import Block

LARGE_NUMEL = 60_000_000

CACHED_NUMEL, REPEATS = 8_192, 5_000
"""A range that fits into the cache of a core, and how often one call updates it: calls take Python's lock."""

LAYERS = f"{SETTING.layers} layers"
TO_ALONE = f"{LAYERS} / alone"
CPU_TIME = ", CPU time"
CALLS = "calls of publish"

CHART = Bars(TO_ALONE, TO_ALONE + CPU_TIME)


class Mode(Enum):
    """The work beside the layers. It lasts until they have ended, and is repeated if it is shorter."""

    ALONE = "alone"
    """None: the update has ended before forward."""
    SLEEPING = "beside a sleeping worker"
    """None, but an update is in flight, so the hooks look for units to wait for."""
    ADAM = "beside Adam, 1 thread"
    ALL_CORES = "beside Adam, all cores"
    CACHED = "beside Adam in the cache"
    """The kernel without traffic to memory."""
    COPYING = "beside copies"
    """Traffic to memory without arithmetic."""
    NO_WAITS = "beside Adam, 1 thread, no waits"
    """``Executor.publish`` returns immediately while the layers run, which may read parameters of the last step."""
    OUTSIDE = "beside Adam of no update"
    """The update has ended, and another thread runs the kernel on memory of its own."""


class TimedLayers(nn.Module):
    """36 tiny layers that run inside ``timed``, and an embedding of ``large_numel`` parameters after them."""

    def __init__(self, large_numel: int, timed: Callable[[], Any]) -> None:
        super().__init__()
        # First, so that DeepSpeed puts no layer into its sub-group.
        self.large = nn.Embedding(large_numel // SETTING.width, SETTING.width)
        self.blocks = nn.ModuleList(Block(SETTING.shape) for _ in range(SETTING.layers))
        self._timed = timed

    def forward(self, stream: Tensor) -> Tensor:
        """Return the mean of the last layer's output and of the last rows of the embedding."""
        with self._timed():
            for block in self.blocks:
                stream = block(stream)
        rows = torch.arange(self.large.num_embeddings - stream.shape[1], self.large.num_embeddings)
        output: Tensor = stream + self.large(rows.to(stream.device))
        return output.float().mean()


class Beside:
    """The switches of all modes, and the clock of the layers. ``times`` holds quantities of the last forward."""

    def __init__(self, large_numel: int) -> None:
        self.times: dict[str, float] = {}
        self._mode = Mode.ALONE
        self._large_numel = large_numel
        self._layers_run = False
        self._layers_ended = threading.Event()
        self._publish_s: list[float] = []
        self._states = torch.zeros(3, large_numel)
        self._narrow = torch.zeros(2, large_numel, dtype=torch.bfloat16)
        self._run_outside: Callable[[], object] = list

    def train(self, engine: Any, mode: Mode) -> dict[str, float]:
        """Start an update in ``mode``, run forward beside it and then backward, and return the times of the layers."""
        self._mode = mode
        self._layers_ended.clear()
        engine.step()
        outside = threading.Thread(target=lambda: self._until_layers_end(self._run_outside))
        if mode in (Mode.ALONE, Mode.OUTSIDE):
            engine.optimizer._update.wait()
        if mode is Mode.OUTSIDE:
            outside.start()
        run(engine)
        if mode is Mode.OUTSIDE:
            outside.join()
        return self.times

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time the layers that run inside this context."""
        self._publish_s, self._layers_run = [], True
        start_s, start_cpu_s = now()
        yield
        end_s, end_cpu_s = now()
        self._layers_run = False
        self._layers_ended.set()
        self.times = {LAYERS: end_s - start_s, LAYERS + CPU_TIME: end_cpu_s - start_cpu_s}
        self.times |= {CALLS: len(self._publish_s), "in publish": sum(self._publish_s)}

    def _until_layers_end(self, work: Callable[[], object]) -> None:
        work()
        while not self._layers_ended.is_set():
            work()

    def updating(self, update: Callable[..., None]) -> Callable[..., None]:
        """Return ``update`` of the kernel with the work of the mode in place of the large parameter's update."""

        def wrapped(library: Library, updates: Sequence[CUpdate], instruction_set: InstructionSet) -> None:
            work: Callable[[], object] = partial(update, library, updates, instruction_set)
            large = updates[0]
            if large.numel != self._large_numel:
                work()
                return
            match self._mode:
                case Mode.ALONE | Mode.OUTSIDE:
                    work()
                    large.master, large.exp_avg, large.exp_avg_sq = (state.data_ptr() for state in self._states)
                    large.grad, large.param = (tensor.data_ptr() for tensor in self._narrow)
                    self._run_outside = partial(update, library, [large], instruction_set)
                    return
                case Mode.SLEEPING:
                    work = self._layers_ended.wait
                case Mode.ALL_CORES:
                    large.num_threads = machine.cores().usable
                case Mode.CACHED:
                    large.numel = CACHED_NUMEL
                    work = partial(update, library, [large] * REPEATS, instruction_set)
                case Mode.COPYING:
                    work = partial(self._states[0].copy_, self._states[1])
            self._until_layers_end(work)

        return wrapped

    def publishing(self, publish: Callable[..., None]) -> Callable[..., None]:
        """Return ``publish`` of the executor, timed."""

        def wrapped(executor: Executor, unit: int) -> None:
            start_s = time.perf_counter()
            if not self._layers_run or self._mode is not Mode.NO_WAITS:
                publish(executor, unit)
            self._publish_s.append(time.perf_counter() - start_s)

        return wrapped


def run(engine: Any) -> None:
    """Run forward and backward."""
    engine.backward(engine(torch.ones(1, SETTING.context, SETTING.width, dtype=torch.bfloat16, device=engine.device)))


def measure(*, quick: bool, turns: float = 24) -> Iterator[Row]:
    """Yield the seconds of the layers by both clocks, their ratio to ``alone`` in the same turn, and the waits.

    The order of the modes alternates from turn to turn.
    """
    # As in ``hooks``: PyTorch's other threads would only wait for each other.
    torch.set_num_threads(1)
    large_numel = LARGE_NUMEL // 30 if quick else LARGE_NUMEL
    variant = ours("ours", placement="cpu", cpu_threads=1, unit_size=large_numel)
    config = variant.config_for(SETTING)
    config["zero_optimization"] |= {**HUGGING_FACE_AUTO, "sub_group_size": SETTING.parameters // 10}
    beside = Beside(large_numel)
    times: dict[Mode, list[dict[str, float]]] = {mode: [] for mode in Mode}
    with (
        mock.patch.object(Library, "update", beside.updating(Library.update)),
        mock.patch.object(Executor, "publish", beside.publishing(Executor.publish)),
    ):
        model = TimedLayers(large_numel, beside.timed).to(deepspeed.get_accelerator().current_device_name())
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        variant.verify(engine)
        run(engine)
        for _ in range(4):
            beside.train(engine, Mode.ALONE)
        for turn in range(2 if quick else int(turns)):
            for mode in list(Mode)[:: 1 if turn % 2 == 0 else -1]:
                times[mode].append(beside.train(engine, mode))
        engine.destroy()
    setting = {"layers": SETTING.layers, "width": SETTING.width, "large_parameter": large_numel}
    for mode, of_mode in times.items():
        for quantity in beside.times:
            samples, alone = ([turn[quantity] for turn in found] for found in (of_mode, times[Mode.ALONE]))
            unit = "" if quantity == CALLS else "s"
            yield Row(variant=mode.value, quantity=quantity, unit=unit, samples=samples, setting=setting)
            if quantity.startswith(LAYERS):
                ratios = [one / other for one, other in zip(samples, alone, strict=True)]
                name = quantity.replace(LAYERS, TO_ALONE)
                yield Row(variant=mode.value, quantity=name, unit="times", samples=ratios, setting=setting)
