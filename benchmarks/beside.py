"""Part of ``hooks``: why is forward slower alongside an update? 36 tiny layers run while the worker updates others.

Each mode changes the work of the worker, or leaves out one thing. One engine trains in one process, with another mode
in each iteration: engines in processes of their own differed by more than the modes do. Only the layers are timed, on
the host. Forward uses the large parameter after them, so they do not wait for it. The states' values mean nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any
from unittest import mock

import deepspeed
import torch
from torch import Tensor, nn

from benchmarks.harness.rows import Row
from benchmarks.harness.setting import TrainingSetting
from benchmarks.harness.variants import Variant
from deep_opt_states.device.kernels.library import CUpdate, InstructionSet, Library
from deep_opt_states.runtime.executor import Executor
from examples.common.byte_gpt import Block, Shape

CACHED_NUMEL, REPEATS = 8_192, 5_000
"""A range that fits into the cache of a core, and how often one call updates it: calls take Python's lock."""


class Mode(Enum):
    """The work alongside the layers. It lasts until they have ended, and is repeated if it is shorter."""

    ALONE = "alone"
    """None: the update has ended before forward."""
    SLEEPING = "alongside a sleeping worker"
    """None, but an update is in flight, so the hooks look for units to wait for."""
    ADAM = "alongside Adam, 1 thread"
    ALL_CORES = "alongside Adam, all cores"
    CACHED = "alongside Adam in the cache"
    """The kernel without traffic to memory."""
    COPYING = "alongside copies"
    """Traffic to memory without arithmetic."""
    NO_WAITS = "alongside Adam, 1 thread, no waits"
    """``Executor.publish`` returns immediately while the layers run, which may read parameters of the last step."""


class TimedLayers(nn.Module):
    """Tiny layers that run inside ``timed``, and an embedding of ``large_numel`` parameters after them."""

    def __init__(self, shape: Shape, large_numel: int, timed: Callable[[], Any]) -> None:
        super().__init__()
        # First, so that DeepSpeed puts no layer into its sub-group.
        self.large = nn.Embedding(large_numel // shape.width, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
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
    """The switches of all modes, and the clock of the layers. ``moments`` are the last forward's start and end."""

    def __init__(self, large_numel: int, now: Callable[[], tuple[float, float]]) -> None:
        self.moments: list[tuple[float, float]] = []
        self._mode = Mode.ALONE
        self._large_numel = large_numel
        self._now = now
        self._layers_run = False
        self._layers_ended = threading.Event()
        self._copied = torch.zeros(2, large_numel)

    def train(self, engine: Any, setting: TrainingSetting, mode: Mode) -> tuple[float, float]:
        """Start an update in ``mode``, run forward alongside and then backward; return the layers' seconds by clock."""
        self._mode = mode
        self._layers_ended.clear()
        engine.step()
        if mode is Mode.ALONE:
            engine.optimizer._update.wait()
        run(engine, setting)
        start, end = self.moments
        return end[0] - start[0], end[1] - start[1]

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time the layers that run inside this context."""
        self._layers_run, start = True, self._now()
        yield
        self.moments = [start, self._now()]
        self._layers_run = False
        self._layers_ended.set()

    def updating(self, update: Callable[..., None]) -> Callable[..., None]:
        """Return ``update`` of the kernel with the work of the mode in place of the large parameter's update."""

        def wrapped(library: Library, updates: Sequence[CUpdate], instruction_set: InstructionSet) -> None:
            work: Callable[[], object] = partial(update, library, updates, instruction_set)
            if not updates or updates[0].numel != self._large_numel or self._mode is Mode.ALONE:
                work()
                return
            match self._mode:
                case Mode.SLEEPING:
                    work = self._layers_ended.wait
                case Mode.ALL_CORES:
                    updates[0].num_threads = len(os.sched_getaffinity(0))
                case Mode.CACHED:
                    updates[0].numel = CACHED_NUMEL
                    work = partial(update, library, [updates[0]] * REPEATS, instruction_set)
                case Mode.COPYING:
                    work = partial(self._copied[0].copy_, self._copied[1])
            work()
            while not self._layers_ended.is_set():
                work()

        return wrapped

    def publishing(self, publish: Callable[..., None]) -> Callable[..., None]:
        """Return ``publish`` of the executor, which one mode leaves out."""

        def wrapped(executor: Executor, unit: int) -> None:
            if not self._layers_run or self._mode is not Mode.NO_WAITS:
                publish(executor, unit)

        return wrapped


def run(engine: Any, setting: TrainingSetting) -> None:
    """Run forward and backward."""
    inputs = torch.ones(1, setting.context, setting.width, dtype=torch.bfloat16, device=engine.device)
    engine.backward(engine(inputs))


def measure(
    variant: Variant,
    setting: TrainingSetting,
    zero: dict[str, Any],
    now: Callable[[], tuple[float, float]],
    *,
    large_numel: int,
    turns: int,
) -> Iterator[Row]:
    """Yield the seconds of the layers by both clocks of ``now``, and their ratio to ``ALONE`` in the same turn.

    The order of the modes alternates from turn to turn.
    """
    config = variant.config_for(setting)
    config["zero_optimization"] |= {**zero, "sub_group_size": setting.parameters // 10}
    beside = Beside(large_numel, now)
    times: dict[Mode, list[tuple[float, float]]] = {mode: [] for mode in Mode}
    with (
        mock.patch.object(Library, "update", beside.updating(Library.update)),
        mock.patch.object(Executor, "publish", beside.publishing(Executor.publish)),
    ):
        model = TimedLayers(setting.shape, large_numel, beside.timed)
        model.to(deepspeed.get_accelerator().current_device_name())
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        variant.verify(engine)
        run(engine, setting)
        for _ in range(4):
            beside.train(engine, setting, Mode.ALONE)
        for turn in range(turns):
            for mode in list(Mode)[:: 1 if turn % 2 == 0 else -1]:
                times[mode].append(beside.train(engine, setting, mode))
        engine.destroy()
    shown = {"layers": setting.layers, "width": setting.width, "large_parameter": large_numel}
    for mode, of_mode in times.items():
        for clock, name in enumerate(("", ", CPU time")):
            samples, alone = ([turn[clock] for turn in found] for found in (of_mode, times[Mode.ALONE]))
            yield Row(variant=mode.value, quantity=f"layers{name}", unit="s", samples=samples, setting=shown)
            ratios = [one / other for one, other in zip(samples, alone, strict=True)]
            yield Row(variant=mode.value, quantity=f"layers / alone{name}", unit="times", samples=ratios, setting=shown)
