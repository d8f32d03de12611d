"""Trains with processes that load data, and forks others, while a real engine's states are in memory and updated.

Answers what the plugin's arm differs in from stock's, and what the children found.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import parameter_offload
from torch.utils.data import DataLoader, Dataset

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.slab import HostSlab, Register
from deep_opt_states.runtime.executor import Executor
from tests.forks import exit_code_of_child, is_mapped
from tests.launch import answer
from tests.zero.parity.arm import Block, Record, closing_engine, collect, differences, make_engine
from tests.zero.parity.case import STRIDE_2, Case
from tests.zero.parity.model import batch
from tests.zero.process_group import process_group

CASE = Case(name="forking", blocks=(STRIDE_2,))
STEPS_PER_EPOCH = 3
EPOCHS = 3

in_slab: list[int] = []
"""The addresses of all states of the engine that trains; none with stock."""


class Batches(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """The batches of one epoch, and how many of the states' addresses are mapped in the process that loads them."""

    def __init__(self, epoch: int) -> None:
        self._first = epoch * STEPS_PER_EPOCH

    def __len__(self) -> int:
        return STEPS_PER_EPOCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return (*batch(CASE, dist.get_rank(), self._first + index, torch.bfloat16), num_mapped())


def num_mapped() -> int:
    return sum(map(is_mapped, in_slab))


def train(block: Block) -> tuple[Record, dict[str, Any]]:
    record = Record()
    losses = record.numbers["loss"] = []
    found: dict[str, Any] = {"mapped in the parent": [], "mapped where data is loaded": [], "pending": []}
    with spacious_slabs(), closing_engine(CASE, block) as engine:
        executor: Executor | None = None
        if block is not None:
            executor = engine.optimizer._executor
            in_slab[:] = addresses_of_states(engine)
        for epoch in range(EPOCHS):
            found["mapped in the parent"].append(num_mapped())
            # The processes are forked here, after the first epoch while an update goes on.
            found["pending"].append(executor is not None and executor.pending)
            for x, target, mapped in DataLoader(
                Batches(epoch), batch_size=None, num_workers=2, multiprocessing_context="fork"
            ):
                found["mapped where data is loaded"].append(mapped)
                loss = engine(x, target, None, 1.0)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            found[f"children after epoch {epoch}"] = {name: end() for name, end in ENDINGS.items()}
        collect(engine.optimizer, record)
    in_slab.clear()
    return record, found


def addresses_of_states(engine: Any) -> list[int]:
    states = engine.optimizer._states
    return [tensor.data_ptr() for state in states for tensor in (state.master, state.exp_avg, state.exp_avg_sq)]


def looking(end: Callable[[int], Any]) -> Callable[[], int]:
    def look() -> int:
        # Nobody in the child is to wait for an update of the parent's, whose threads the child does not have.
        mock.patch.object(Executor, "failed_within", side_effect=lambda *_: os._exit(50)).start()
        end(num_mapped())
        return 51

    return look


def ends_after_exit_callbacks() -> int:
    """As a script, but for the finalization of C++ objects: there such a child hangs with stock DeepSpeed, too."""

    def end(code: int) -> None:
        atexit._run_exitfuncs()
        gc.collect()
        os._exit(code)

    return exit_code_of_child(looking(end))


def ends_as_a_process_of_multiprocessing() -> int:
    process = multiprocessing.get_context("fork").Process(target=looking(sys.exit))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def ends_at_once() -> int:
    return exit_code_of_child(looking(os._exit))


ENDINGS = {
    "after exit callbacks": ends_after_exit_callbacks,
    "multiprocessing": ends_as_a_process_of_multiprocessing,
    "at once": ends_at_once,
}


def spacious_slabs(register: Register | None = None) -> AbstractContextManager[object]:
    """The states lie at the low end. What the slab leaves free, others are given from the high end."""

    def host_slab(device: HostDevice, size_bytes: int) -> HostSlab:
        return HostSlab(size_bytes + 64 * 2**20, register)

    return mock.patch.object(HostDevice, "host_slab", host_slab)


def collected_without_destroy() -> dict[str, Any]:
    """DeepSpeed keeps an engine alive by hooks and by a list; without them it is collected, and nobody destroys it."""
    calls: list[str] = []
    addresses: list[int] = []

    def register(address: int, size_bytes: int) -> Callable[[], object]:
        addresses.append(address)
        return lambda: calls.append("unregistered " + ("before" if is_mapped(address) else "after") + " it is unmapped")

    with spacious_slabs(register):
        engine = make_engine(CASE, STRIDE_2)
    for hook in engine.optimizer._grad_acc_hooks:
        hook.remove()
    engine.optimizer.parameter_offload._remove_module_hooks()
    parameter_offload.FWD_MODULE_STACK.clear()
    registered = len(addresses), list(calls)
    del engine, hook
    gc.collect()
    return {"registered": registered, "calls": calls, "mapped": is_mapped(addresses[0])}


if __name__ == "__main__":
    with process_group():
        expected, _ = train(None)
        found, seen = train(STRIDE_2)
        answer({"differences": differences(expected, found), **seen})
        answer(collected_without_destroy())
