"""Fork processes while states are in memory and updated; engines that are destroyed or collected free them."""

from __future__ import annotations

import atexit
import gc
import os
import tempfile
from contextlib import AbstractContextManager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import parameter_offload
from torch.utils.data import DataLoader, Dataset

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.device.slab import HostSlab
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.zero.start import planning
from perf_model.presets.machines import MACHINES
from tests.forked_child import exit_code_of_child, is_mapped
from tests.ranks import ranks
from tests.zero.parity.case import STRIDE_2, Case
from tests.zero.parity.parity_model import batch
from tests.zero.parity.training import Block, Record, assert_same_bits, closing_engine, collect, make_engine

CASE = Case(name="forking", blocks=(STRIDE_2,))
STEPS_PER_EPOCH, EPOCHS = 3, 2
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


def train(block: Block) -> Record:
    record = Record()
    losses = record.numbers["loss"] = []
    with spacious_slabs(), closing_engine(CASE, block) as engine:
        running = None if block is None else engine.optimizer._running
        if running is not None:
            state_addresses[:] = [
                tensor.data_ptr()
                for states in running.memory.sub_groups
                for tensor in (states.master, states.exp_avg, states.exp_avg_sq)
            ]
            assert len(state_addresses) == 3 * 5
        for epoch in range(EPOCHS):
            assert num_mapped() == len(state_addresses)
            # The loader forks its processes below. After the first epoch an update is in flight at this moment.
            assert running is None or running.executor.pending == (epoch > 0)
            loader = DataLoader(EpochBatches(epoch), batch_size=None, num_workers=2, multiprocessing_context="fork")
            for x, target, mapped in loader:
                assert mapped == 0
                loss = engine(x, target, None, 1.0)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            assert exit_code_of_child(exit_after_callbacks) == 0
        collect(engine.optimizer, record)
        # ``destroy`` may be called twice, here and at the end of the context.
        engine.destroy()
    state_addresses.clear()
    return record


def exit_after_callbacks() -> int:
    """End a child as a script, but without C++'s finalization, which hangs with stock, and return its mapped states."""
    mapped = num_mapped()
    # The child must not wait for an update of the parent: it does not have the threads that run the update.
    mock.patch.object(Executor, "failed_within", side_effect=lambda *_: os._exit(50)).start()
    atexit._run_exitfuncs()
    gc.collect()
    return mapped


def spacious_slabs() -> AbstractContextManager[object]:
    """Make slabs larger than the states by 64 MiB: the states are at the low end, other allocations at the high end."""

    def host_slab(device: HostDevice, size_bytes: int) -> HostSlab:
        return HostSlab(size_bytes + 64 * 2**20, None)

    return mock.patch.object(HostDevice, "host_slab", host_slab)


@pytest.mark.P1
@ranks(1)
def test_training_that_forks_is_bit_identical_to_stock_and_no_child_has_the_states() -> None:
    assert_same_bits(train(None), train(STRIDE_2))


@ranks(1)
def test_an_engine_without_references_frees_its_memory_though_it_was_not_destroyed() -> None:
    """Remove first what keeps an engine alive: DeepSpeed's hooks, and a module-level list."""
    profile = MACHINES["h100-pcie5"].profile(ranks=1)
    with (
        spacious_slabs(),
        mock.patch.object(planning, "quick_profile", return_value=profile),
        tempfile.TemporaryDirectory() as folder,
    ):
        # A reporter, which lives until the process ends, must not keep the engine.
        engine = make_engine(CASE, {**STRIDE_2, "report": folder})
    for hook in engine.optimizer._grad_acc_hooks:
        hook.remove()
    engine.optimizer.parameter_offload._remove_module_hooks()
    parameter_offload.FWD_MODULE_STACK.clear()
    address = engine.optimizer.fp32_partitioned_groups_flat[0].data_ptr()
    assert is_mapped(address)
    del engine, hook
    # A view keeps the tensor that it is a view of until the view itself is collected.
    while gc.collect():
        pass
    assert not is_mapped(address)
