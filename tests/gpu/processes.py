"""Train the real engine next to other processes: a forked child, workers that load data, and a second rank.

``test_processes.py`` starts this program, which also runs on the CPU accelerator.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import psutil
import torch
from torch.utils.data import DataLoader, Dataset

import deep_opt_states  # noqa: F401 (activates the plugin if the package is not installed)
from tests.forked_child import is_mapped
from tests.gpu.one_by_one import answer_each
from tests.zero.parity import training
from tests.zero.parity.case import CPU, STREAMED, STRIDE_2, Case
from tests.zero.parity.case_runs import same_as_stock
from tests.zero.parity.parity_model import batch
from tests.zero.parity.training import Record, closing_engine, differences, run_variant, shared_folder, train
from tests.zero.process_group import process_group

OVERLAP = {"overlap_comm": True}

UNITS = {"unit_size": 200_000}
CASE = Case(
    name="next to other processes",
    blocks=(CPU, {**STREAMED, **UNITS}, {**STRIDE_2, **UNITS}),
    steps=12,
    widths=(512, 1024, 1024, 512),
    sub_group_size=500_000,
    zero={**OVERLAP, "reduce_bucket_size": 10**6, "stage3_prefetch_bucket_size": 10**6},
)
"""A case with slabs of about 30 MB: pages that a child inherited would be copied when the next update writes them."""

TWO_RANKS = Case(name="2 ranks", blocks=(CPU, STREAMED, STRIDE_2), world_size=2, clip=0.5, zero=OVERLAP)

FORKS_AT = 3
"""The step before which a child is forked."""


def train_with_fork(case: Case) -> dict[str, Any]:
    """Return per block the differences from stock, the child's memory, and how much of the states' memory it maps."""
    stock = run_variant(case, None)
    found = {}
    for block in case.blocks:
        with shared_folder() as folder, closing_engine(case, block) as engine, forking(engine) as child:
            record = train(engine, case, folder)
            found[str(block)] = {**child, "differences": differences(stock, record)}
    return {"variants": found}


@contextmanager
def forking(engine: Any) -> Iterator[dict[str, Any]]:
    """Fork a child in the middle of training, and yield the facts about it.

    The child writes to memory of its own and sleeps until training is over.
    """
    child: dict[str, Any] = {}
    before = psutil.Process().memory_info().rss

    def forking_batch(case: Case, rank: int, micro_batch: int, dtype: torch.dtype) -> Any:
        if micro_batch == FORKS_AT:
            on_host = [
                state.parts[0].master
                for state in engine.optimizer._running.memory.units
                if state.parts[0].master.is_cpu
            ]
            child["pid"] = pid = os.fork()
            if pid == 0:
                own = bytearray(2**20)
                while True:
                    own[:] = bytes(len(own))
                    time.sleep(0.01)
            time.sleep(0.5)
            child["rss_bytes"] = psutil.Process(pid).memory_info().rss
            child["parent_rss_bytes"] = before
            child["states_bytes"] = sum(master.nbytes for master in on_host)
            child["inherited_bytes"] = sum(
                master.nbytes for master in on_host if is_mapped(master.data_ptr() + master.nbytes // 2, pid)
            )
        return batch(case, rank, micro_batch, dtype)

    try:
        with mock.patch.object(training, "batch", forking_batch):
            yield child
    finally:
        if "pid" in child:
            os.kill(child["pid"], signal.SIGKILL)
            os.waitpid(child["pid"], 0)


class CaseBatches(Dataset):  # type: ignore[type-arg]
    """The batches of the case, by their number."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def __len__(self) -> int:
        return self._case.steps * self._case.accumulation

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return batch(self._case, 0, index, torch.bfloat16)


def train_with_workers(case: Case) -> dict[str, Any]:
    """Return per block the differences from stock where two forked workers load the data.

    New workers are forked before the second half of the data.
    """
    stock = run_variant(case, None)
    found = {}
    for block in case.blocks:
        with shared_folder() as folder, closing_engine(case, block) as engine, loading(case):
            found[str(block)] = {"differences": differences(stock, train(engine, case, folder))}
    return {"variants": found}


@contextmanager
def loading(case: Case) -> Iterator[None]:
    """Load the batches in workers that are forked before the first batch, and again before the second half."""
    pinned = torch.cuda.is_available()
    loader = DataLoader(
        CaseBatches(case), batch_size=None, num_workers=2, pin_memory=pinned, multiprocessing_context="fork"
    )
    loaded = iter(())

    def loaded_batch(case: Case, rank: int, micro_batch: int, dtype: torch.dtype) -> Any:
        nonlocal loaded
        if micro_batch == 0:
            loaded = iter(loader)
        elif micro_batch == len(loader) // 2:
            loaded = iter(loader)
            for _ in range(micro_batch):
                next(loaded)
        return next(loaded)

    with mock.patch.object(training, "batch", loaded_batch):
        yield


def memory_of_gpu_0() -> dict[str, Any]:
    """Return the memory of the first GPU that a rank on the second GPU uses."""
    before_bytes = gpu_0_used_bytes()
    with shared_folder() as folder, closing_engine(CASE, STRIDE_2) as engine:
        record: Record = train(engine, CASE, folder)
        return {
            "device": str(engine.device),
            "added_bytes": gpu_0_used_bytes() - before_bytes,
            "optimizer": record.optimizer_class,
        }


def gpu_0_used_bytes() -> int:
    """Return the bytes of the first GPU's memory that all processes use."""
    command = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    return int(done.stdout.split()[0]) * 2**20


FORK, WORKERS, GPU_0 = "fork", "workers", "memory of GPU 0"

WORK: dict[str, Callable[[], dict[str, Any]]] = {
    FORK: lambda: train_with_fork(CASE),
    WORKERS: lambda: train_with_workers(CASE),
    TWO_RANKS.name: lambda: same_as_stock(TWO_RANKS),
    GPU_0: memory_of_gpu_0,
}


def has_nvidia_smi() -> bool:
    """Return whether nvidia-smi is installed."""
    return shutil.which("nvidia-smi") is not None


if __name__ == "__main__":
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with process_group():
        answer_each(WORK, sys.argv[1:])
