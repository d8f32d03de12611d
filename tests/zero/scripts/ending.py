"""Scripts that end while an update goes on, each in processes of its own; answers how they ended.

The argument is a folder for what they print.

The processes are forked before anything is started, since importing DeepSpeed is the slow part; they end as a user's
do, by the interpreter's shutdown.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

from deep_opt_states.device.kernels.adam import PartUpdate
from tests.kernels.intercepted import before_each_update
from tests.launch import answer, free_port, remove_shared_memory
from tests.zero.forked import Rank, fork, import_late
from tests.zero.parity.arm import make_engine
from tests.zero.parity.case import CPU, Case
from tests.zero.parity.model import batch

WAYS = {"ends": (2,), "raises": (1, 2), "fails": (1,), "leaves": (2,), "stuck": (1,), "killed": (2,), "asked": (2,)}
"""The ways to end, and with how many ranks each is tried: rank 0 leaves, and rank 1 goes on; an update is stuck, and
never ends; SIGTERM kills, or asks by a handler that exits."""

TIMEOUT_S = 40
UPDATE_S = 0.05


@dataclass
class Child(Rank):
    way: str = ""
    signalled: bool = False


def run(child: Child) -> None:
    """What the user's script does. Every sub-group takes its time, so that the update goes on when it ends."""
    deepspeed.init_distributed()
    case = Case(name="ending", blocks=(), world_size=child.world_size)
    engine = make_engine(case, CPU)
    rest = engine.optimizer._executor._splits[1].rest[0]

    def late(update: PartUpdate) -> None:
        time.sleep(UPDATE_S)
        if child.way == "fails" and update.sub_group == 1 and update.part == rest:
            raise ValueError("out of luck")
        if child.way == "stuck" and update.sub_group == 1 and update.part == rest:
            time.sleep(1000)

    before_each_update(late).__enter__()
    if child.way == "asked":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    x, target = batch(case, dist.get_rank(), 1, torch.bfloat16)

    def step() -> None:
        engine.backward(engine(x, target, None, 1.0))
        engine.step()
        assert engine.optimizer._update._executor.pending

    step()
    print(f"stepped at {time.time()}", flush=True)
    if child.way in ("raises", "stuck") or (child.way == "leaves" and child.rank == 0):
        raise RuntimeError("the user's own")
    while child.way in ("leaves", "killed", "asked"):
        step()


def wait(children: list[Child]) -> None:
    """Answers for each as it ends; those that outlive the timeout say where they are."""
    end_s = time.monotonic() + TIMEOUT_S
    running = {child.pid: child for child in children}
    try:
        while running:
            for pid, child in list(running.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del running[pid]
                    tell(child, os.waitstatus_to_exitcode(status))
                elif time.monotonic() > end_s:
                    os.kill(pid, signal.SIGABRT)
                elif child.way in ("killed", "asked") and not child.signalled and stepped_at(child):
                    child.signalled = True
                    os.kill(pid, signal.SIGTERM)
            time.sleep(0.02)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)


def stepped_at(child: Child) -> float | None:
    said = re.search(r"stepped at ([\d.]+)\n", child.output.read_text()) if child.output.exists() else None
    return float(said[1]) if said else None


def tell(child: Child, code: int) -> None:
    stepped_s = stepped_at(child)
    seconds = None if stepped_s is None else time.time() - stepped_s
    told = {"way": child.way, "rank": child.rank, "code": code, "seconds": seconds}
    answer({**told, "output": child.output.read_text()})


def main(folder: Path) -> Child | None:
    """All at the same time."""
    import_late()
    children: list[Child] = []
    ports = []
    for way, world_sizes in WAYS.items():
        for size in world_sizes:
            ports.append(free_port())
            ranks = [Child(rank, size, folder / f"{way} {size} {rank}", way=way) for rank in range(size)]
            child = fork(ranks, ports[-1])
            if child is not None:
                return child
            children += ranks
    wait(children)
    for port in ports:
        remove_shared_memory(port)
    return None


if __name__ == "__main__":
    child = main(Path(sys.argv[1]))
    if child is not None:
        run(child)
