"""Fork processes while states are in memory and updated; engines that are destroyed or collected free them."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import sys
import tempfile
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import parameter_offload
from torch.utils.data import DataLoader, Dataset

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.slab import HostSlab, Register
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.zero.start import planning
from perf_model.presets.machines import MACHINES
from tests.forked_child import exit_code_of_child, is_mapped
from tests.ranks import ranks
from tests.zero.parity.case import STREAMED, STRIDE_2, Case
from tests.zero.parity.parity_model import batch
from tests.zero.parity.training import (
    Block,
    Record,
    assert_same_bits,
    closing_engine,
    collect,
    make_engine,
    shared_folder,
)
from tests.zero.parity.training import train as train_steps

CASE = Case(name="forking", blocks=(STRIDE_2,))
STEPS_PER_EPOCH = 3
EPOCHS = 3
state_addresses: list[int] = []
"""The addresses of all states of the engine that trains. With stock the list is empty."""


class EpochBatches(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    def __init__(self, epoch: int) -> None:
        self._first = epoch * STEPS_PER_EPOCH

    def __len__(self) -> int:
        return STEPS_PER_EPOCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return (*batch(CASE, dist.get_rank(), self._first + index, torch.bfloat16), num_mapped())


def num_mapped() -> int:
    return sum(map(is_mapped, state_addresses))


def train(block: Block) -> tuple[Record, dict[str, Any]]:
    """Train with forked processes that load data. Return the record and the observations of parent and children."""
    record = Record()
    losses = record.numbers["loss"] = []
    found: dict[str, Any] = {"mapped in the parent": [], "mapped where data is loaded": [], "pending": []}
    with spacious_slabs(), closing_engine(CASE, block) as engine:
        executor: Executor | None = None
        if block is not None:
            executor = engine.optimizer._running.executor
            state_addresses[:] = [
                tensor.data_ptr()
                for states in engine.optimizer._running.memory.sub_groups
                for tensor in (states.master, states.exp_avg, states.exp_avg_sq)
            ]
        for epoch in range(EPOCHS):
            found["mapped in the parent"].append(num_mapped())
            # The loader forks its processes below. After the first epoch an update is in flight at this moment.
            found["pending"].append(executor is not None and executor.pending)
            for x, target, mapped in DataLoader(
                EpochBatches(epoch), batch_size=None, num_workers=2, multiprocessing_context="fork"
            ):
                found["mapped where data is loaded"].append(mapped)
                loss = engine(x, target, None, 1.0)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            found[f"children after epoch {epoch}"] = {name: end() for name, end in ENDINGS.items()}
        collect(engine.optimizer, record)
    state_addresses.clear()
    return record, found


def end_with_num_mapped(end: Callable[[int], Any]) -> Callable[[], int]:
    """Return a function for a forked child that calls ``end`` with the number of mapped states as the exit code."""

    def run() -> int:
        # The child must not wait for an update of the parent: it does not have the threads that run the update.
        mock.patch.object(Executor, "failed_within", side_effect=lambda *_: os._exit(50)).start()
        end(num_mapped())
        return 51

    return run


def ends_after_exit_callbacks() -> int:
    """End as a script does, but without the finalization of C++ objects, in which the child hangs with stock, too."""

    def end(code: int) -> None:
        atexit._run_exitfuncs()
        gc.collect()
        os._exit(code)

    return exit_code_of_child(end_with_num_mapped(end))


def ends_as_a_process_of_multiprocessing() -> int:
    process = multiprocessing.get_context("fork").Process(target=end_with_num_mapped(sys.exit))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def ends_at_once() -> int:
    return exit_code_of_child(end_with_num_mapped(os._exit))


ENDINGS = {
    "after exit callbacks": ends_after_exit_callbacks,
    "multiprocessing": ends_as_a_process_of_multiprocessing,
    "at once": ends_at_once,
}


def spacious_slabs(register: Register | None = None) -> AbstractContextManager[object]:
    """Make slabs larger than the states by 64 MiB: the states are at the low end, other allocations at the high end."""

    def host_slab(device: HostDevice, size_bytes: int) -> HostSlab:
        return HostSlab(size_bytes + 64 * 2**20, register)

    return mock.patch.object(HostDevice, "host_slab", host_slab)


@pytest.mark.P1
@ranks(1)
def test_training_that_forks_has_the_bits_of_stock_and_no_child_has_the_states() -> None:
    """Check data loaders, and children that end in each way: their exit code is the number of states they can read."""
    stock, _ = train(None)
    ours, found = train(STRIDE_2)
    assert_same_bits(stock, ours)
    assert found["pending"] == [False, True, True], "the later epochs must fork while an update is in flight"
    states = 3 * 5
    assert found["mapped in the parent"] == [states] * 3
    assert found["mapped where data is loaded"] == [0] * 9
    for epoch in range(EPOCHS):
        assert found[f"children after epoch {epoch}"] == dict.fromkeys(ENDINGS, 0)


@ranks(1)
def test_a_garbage_collected_engine_unregisters_its_memory_before_it_is_unmapped() -> None:
    """Let the garbage collector free an engine that was not destroyed.

    DeepSpeed's hooks and a module-level list keep an engine alive. They are removed first.
    """
    calls: list[str] = []
    addresses: list[int] = []

    def register(address: int, size_bytes: int) -> Callable[[], object]:
        addresses.append(address)
        return lambda: calls.append("unregistered " + ("before" if is_mapped(address) else "after") + " it is unmapped")

    profile = MACHINES["h100-pcie5"].profile(ranks=1)
    with (
        spacious_slabs(register),
        mock.patch.object(planning, "quick_profile", return_value=profile),
        tempfile.TemporaryDirectory() as folder,
    ):
        # A reporter, which lives until the process ends, must not keep the engine.
        engine = make_engine(CASE, {**STRIDE_2, "report": folder})
    for hook in engine.optimizer._grad_acc_hooks:
        hook.remove()
    engine.optimizer.parameter_offload._remove_module_hooks()
    parameter_offload.FWD_MODULE_STACK.clear()
    assert len(addresses) == 1
    assert calls == []
    del engine, hook
    # A view keeps the tensor that it is a view of until the view itself is collected.
    while gc.collect():
        pass
    assert calls == ["unregistered before it is unmapped"]
    assert not is_mapped(addresses[0])


@ranks(2)
def test_destroy_frees_the_staging_slots_and_may_be_called_twice() -> None:
    case = Case(name="destroy", blocks=(STREAMED,), world_size=2, steps=1)
    with shared_folder() as folder:
        engine = make_engine(case, STREAMED)
        train_steps(engine, case, folder)
    slots = [weakref.ref(slot.master) for slot in engine.optimizer._running.executor._actions._slots]
    assert slots
    engine.destroy()
    engine.destroy()
    gc.collect()
    assert [slot() for slot in slots] == [None] * len(slots)
