"""Test that the driver accepts the states if and only if it accepts a trial slightly above the memlock limit."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from deep_opt_states.device.cuda import CudaDevice
from deep_opt_states.device.slab import HostMemoryError
from deep_opt_states.zero.start.node_share import check_locking

LIMIT_BYTES = 64 * 2**10
STATES_BYTES = 64 * 2**20


@pytest.fixture
def low_limit() -> Iterator[None]:
    """Lower the soft memlock limit, which may be raised again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (LIMIT_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


def is_refused(device: CudaDevice) -> bool:
    """Return whether the driver refuses to page-lock the states."""
    states = device.host_slab(STATES_BYTES)
    try:
        states.lock()
    except HostMemoryError:
        return True
    finally:
        states.close()
    return False


@pytest.mark.usefixtures("low_limit")
def test_the_trial_predicts_whether_the_states_can_be_page_locked() -> None:
    device = CudaDevice(0)
    # Repeat it, because the trial must release its memory.
    for _ in range(3):
        try:
            check_locking(STATES_BYTES, STATES_BYTES // 16, device, LIMIT_BYTES)
        except HostMemoryError:
            assert is_refused(device)
        else:
            assert not is_refused(device)
