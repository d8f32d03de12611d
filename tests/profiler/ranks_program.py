"""Make a quick profile over torch.distributed twice, then one that fails.

``test_cache.py`` starts this program as several ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed

from deep_opt_states.device.kernels.adam import AdamKernel
from deep_opt_states.profiler.cache import quick_profile
from deep_opt_states.profiler.profile import ProbeEffort, training_cpu_adam
from deep_opt_states.profiler.ranks import Ranks, launched_ranks
from tests.launch import answer
from tests.profiler.test_profile import SMALL
from tests.profiler.virtual import kernels


def broken_on_rank_1(num_sub_groups: int, num_threads: int, cores: Sequence[int]) -> AdamKernel:
    if torch.distributed.get_rank() == 1:
        raise RuntimeError("broken on purpose")
    return training_cpu_adam(num_sub_groups, num_threads, cores)


def outcome(log: Callable[[str], None], cpu_adam: Callable[..., AdamKernel], effort: ProbeEffort) -> str:
    try:
        with kernels(training_cpu_adam=cpu_adam):
            return quick_profile(None, Ranks(), log, log, threads=1, effort=effort).to_json()
    except Exception as error:  # noqa: BLE001 (the test checks the error)
        return f"{type(error).__name__}: {error}"


with launched_ranks(os.environ) as ranks:
    assert ranks.size == 2
    lines: list[str] = []
    # Another effort has another place in the cache.
    failing = broken_on_rank_1, replace(SMALL, budget_s=0.02)
    runs = ((training_cpu_adam, SMALL), (training_cpu_adam, SMALL), failing)
    outcomes = [outcome(lines.append, *run) for run in runs]
    answer({"outcomes": outcomes, "log": lines, "threads": torch.get_num_threads()})
assert not torch.distributed.is_initialized()
threads = {(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
assert not {name for name in threads if "gloo" in name}, "threads of the group are still alive"
