"""How much host time do the plugin's hooks take while no update is in flight?

In a model of 36 tiny layers, Python takes nearly all of the time. The arms are interleaved, each in a process of its
own. A turn trains for two iterations and counts the second one. Updates end in ``step()`` or, deferred, before the next
forward starts: on the CPU accelerator and, with all states resident, on the software GPU of the tests. ``beside`` adds
why forward is slower while an update is in flight.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import deepspeed
import torch

import deep_opt_states  # noqa: F401 (activates where the package is not installed)
from benchmarks import beside
from benchmarks.harness.rows import Row
from benchmarks.harness.run_rows import labels_of
from benchmarks.harness.setting import TrainingSetting
from benchmarks.harness.variants import STOCK, Variant, ours
from examples.common.byte_gpt import ByteGPT
from examples.common.one_rank import be_the_only_rank_unless_launched

SETTING = TrainingSetting(layers=36, width=64, context=16, micro_batch=1, sub_group_size=1_000_000)

HUGGING_FACE_AUTO = {
    "reduce_bucket_size": SETTING.width**2,
    "stage3_prefetch_bucket_size": 9 * SETTING.width**2 // 10,
    "stage3_param_persistence_threshold": 10 * SETTING.width,
}

LARGE_NUMEL = 60_000_000
"""The parameters that the worker updates alongside the layers of ``beside``."""

HOOKS = ("forward", "backward")
TO_STOCK = "forward + backward / stock's"

Moment = tuple[float, float]
"""The time of the clock, and the CPU time of the threads that train, in seconds."""


def now(threads: Iterable[int]) -> Moment:
    """Return the current moment, with the CPU time of ``threads``."""
    clocks = map(time.pthread_getcpuclockid, threads)
    return time.perf_counter(), sum(map(time.clock_gettime, clocks))


@dataclass(frozen=True, kw_only=True)
class ArmProcess:
    """One engine in a process of its own."""

    variant: Variant
    on_software_gpu: bool = False

    def serve(self, requests: Connection) -> None:
        """Create the engine, and train a turn for each request that is true."""
        os.environ.pop("RANK")  # the parent is a rank of its own
        be_the_only_rank_unless_launched()
        with ExitStack() as resources:
            if self.on_software_gpu:
                from benchmarks.emulated.run import software_gpu

                resources.enter_context(software_gpu())
            # As with a GPU: PyTorch's other threads would only wait for each other.
            torch.set_num_threads(1)
            model = ByteGPT(SETTING.shape).to(deepspeed.get_accelerator().current_device_name())
            config = self.variant.config_for(SETTING)
            config["zero_optimization"] |= HUGGING_FACE_AUTO
            engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
            self.variant.verify(engine)
            threads = {threading.get_ident()}
            for _ in range(3):
                self._train(engine, threads)
            requests.send(None)
            while requests.recv():
                self._train(engine, threads)
                requests.send(self._train(engine, threads))
            engine.destroy()

    def _train(self, engine: Any, threads: set[int]) -> dict[str, Moment]:
        times = _train(engine, threads)
        if self.variant.block is not None:
            engine.optimizer._update.wait()
        return times


def _train(engine: Any, threads: set[int]) -> dict[str, Moment]:
    """Train for one iteration, and return the seconds of each phase by both clocks. Add backward's to ``threads``."""
    inputs = torch.arange(SETTING.context, device=engine.device).unsqueeze(0)
    start = now(threads)
    loss = engine(inputs, inputs)
    # On an accelerator, backward runs on a thread of autograd, which stays.
    loss.register_hook(lambda _: threads.add(threading.get_ident()))
    forward = now(threads)
    engine.backward(loss)
    backward = now(threads)
    engine.step()
    spans = {"forward": (start, forward), "backward": (forward, backward)}
    return {phase: (end[0] - begin[0], end[1] - begin[1]) for phase, (begin, end) in spans.items()}


RESIDENT = [{"match": "*", "states": "resident"}]
OVERLAPS = {"": False, ", deferred": True}

ON_CPU = STOCK, *(ours(f"ours{name}", placement="cpu", overlap_forward=each) for name, each in OVERLAPS.items())
ON_SOFTWARE_GPU = (
    STOCK,
    *(ours(f"ours, all resident{name}", placement=RESIDENT, overlap_forward=each) for name, each in OVERLAPS.items()),
)


def in_turns(arms: Sequence[ArmProcess], turns: int) -> list[list[dict[str, Moment]]]:
    """Return the times of each arm, one entry per turn. The order alternates from turn to turn."""
    context = multiprocessing.get_context("fork")
    connections: list[Connection] = []
    for arm in arms:
        connection, of_arm = context.Pipe()
        context.Process(target=arm.serve, args=(of_arm,), daemon=True).start()
        # Otherwise ``recv`` would wait for ever for a process that has failed.
        of_arm.close()
        connection.recv()
        connections.append(connection)
    times: list[list[dict[str, Moment]]] = [[] for _ in arms]
    for turn in range(turns):
        for connection, of_this in list(zip(connections, times, strict=True))[:: 1 if turn % 2 == 0 else -1]:
            connection.send(True)
            of_this.append(connection.recv())
    for connection in connections:
        connection.send(False)
    return times


def measure(*, quick: bool, turns: float = 16) -> Iterator[Row]:
    """Yield the seconds of each arm by both clocks, and their ratio to the first arm's in the same turn."""
    turns = 2 if quick else int(turns)
    for variants in (ON_CPU, ON_SOFTWARE_GPU):
        arms = [ArmProcess(variant=variant, on_software_gpu=variants is ON_SOFTWARE_GPU) for variant in variants]
        times = in_turns(arms, turns)
        for arm, of_arm in zip(arms, times, strict=True):
            labels = labels_of(arm.variant.name + (", software GPU" if arm.on_software_gpu else ""), SETTING)
            # On the software GPU, only the CPU time is the hooks' own: its kernels run on the same cores.
            for clock, name in enumerate(("", ", CPU time")):
                seconds, stock = (
                    [sum(turn[phase][clock] for phase in HOOKS) for turn in turns_of] for turns_of in (of_arm, times[0])
                )
                yield Row(quantity=" + ".join(HOOKS) + name, unit="s", samples=seconds, **labels)
                ratios = [one / other for one, other in zip(seconds, stock, strict=True)]
                yield Row(quantity=TO_STOCK + name, unit="times", samples=ratios, **labels)
    torch.set_num_threads(1)
    large_numel = LARGE_NUMEL // 30 if quick else LARGE_NUMEL
    # Otherwise threads on all cores would be bound to the core of one.
    variant = ours("ours", placement="cpu", cpu_threads=1, bind_cores=False, unit_size=large_numel)

    def clocks() -> Moment:
        return now([threading.get_ident()])

    yield from beside.measure(variant, SETTING, HUGGING_FACE_AUTO, clocks, large_numel=large_numel, turns=turns)
