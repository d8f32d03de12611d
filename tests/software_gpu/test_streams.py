"""Check streams, events, waits of the host, and the adversaries."""

from __future__ import annotations

import pytest

from tests.software_gpu import stream_checks
from tests.software_gpu.checks import assert_passed, checks_of, ranks_of
from tests.zero.training_once import TrainingOnce, on_one_worker

RANKS = ranks_of(stream_checks)
pytestmark = on_one_worker("software_gpu_streams", 1)


@pytest.mark.parametrize("check", checks_of(stream_checks))
def test_streams_and_events_of_the_software_gpu_behave_as_those_of_cuda(check: str, trained: TrainingOnce) -> None:
    assert_passed(trained, check)
