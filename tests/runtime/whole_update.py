"""Run one whole update."""

from __future__ import annotations

from collections.abc import Sequence

from deep_opt_states.device.kernels.adam import AdamStep
from deep_opt_states.runtime.executor import Executor
from deep_opt_states.runtime.failure import UpdateFailed


def run_update(executor: Executor, steps: Sequence[AdamStep]) -> None:
    """Run an update, with one entry of ``steps`` per sub-group, and return when every action has finished.

    Raise ``UpdateFailed``, with its cause, if this or an earlier update has failed.
    """
    if executor.failure is None:
        executor.begin(steps)
        executor.end()
    if executor.failure is not None:
        raise UpdateFailed.because_of(executor.failure)
