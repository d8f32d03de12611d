"""Host memory that an engine of two ranks finds, or does not find, for its states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch.distributed as dist

from deep_opt_states import machine
from deep_opt_states.device.slab import HostMemoryError
from deep_opt_states.zero.host_memory import HostRoom
from perf_model.memory import Where
from tests.zero.parity.arm import closing_engine, make_engine
from tests.zero.parity.case import CPU, Case
from tests.zero.process_group import process_group

CASE = Case(name="room", blocks=(CPU,), world_size=2, steps=1)


@contextmanager
def room_for(available_bytes: int) -> Iterator[None]:
    room = HostRoom(available_bytes=available_bytes, container_bytes=None, memlock_bytes=None)
    with mock.patch.object(HostRoom, "here", return_value=room):
        yield


def a_nodes_ranks_share_its_room() -> None:
    with closing_engine(CASE, CPU) as engine:
        (slab_bytes,) = (its.each_bytes for its in engine.optimizer.ledger.reserved if its.where is Where.PINNED)
    with room_for(2 * slab_bytes), closing_engine(CASE, CPU):
        pass
    with room_for(2 * slab_bytes - 1), pytest.raises(HostMemoryError, match="2 ranks"):
        make_engine(CASE, CPU)
    elsewhere = mock.patch.object(machine, "kernel_id", return_value=f"kernel {dist.get_rank()}")
    with elsewhere, room_for(slab_bytes), closing_engine(CASE, CPU):
        pass
    print("a node's ranks share its room", flush=True)


if __name__ == "__main__":
    with process_group():
        a_nodes_ranks_share_its_room()
