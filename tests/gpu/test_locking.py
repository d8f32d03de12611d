"""What the driver says of a little more than the memlock limit is what it then says of the states."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from deep_opt_states.device.cuda import CudaDevice
from deep_opt_states.device.slab import HostMemoryError
from deep_opt_states.zero.start.host_memory import check_locking

LIMIT_BYTES = 64 * 2**10
STATES_BYTES = 64 * 2**20


@pytest.fixture
def low_limit() -> Iterator[None]:
    """The soft one, which may be raised again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (LIMIT_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


def is_refused(device: CudaDevice) -> bool:
    states = device.host_slab(STATES_BYTES)
    try:
        states.lock()
    except HostMemoryError:
        return True
    finally:
        states.close()
    return False


@pytest.mark.usefixtures("low_limit")
def test_what_is_tried_is_what_the_states_meet() -> None:
    device = CudaDevice(0)
    # Again and again: what is tried is given back.
    for _ in range(3):
        try:
            check_locking(STATES_BYTES, STATES_BYTES // 16, device, LIMIT_BYTES)
        except HostMemoryError:
            assert is_refused(device)
        else:
            assert not is_refused(device)
