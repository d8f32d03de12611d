"""Make a quick profile over torch.distributed twice, then one that fails.

``test_distributed.py`` starts this program as several ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed

from deep_opt_states.device.kernels.adam import AdamKernel
from deep_opt_states.profiler.adam_kernels import CpuAdamFactory, training_cpu_adam
from deep_opt_states.profiler.cache import quick_profile
from deep_opt_states.profiler.ranks import DistributedRanks, launched_ranks, training_ranks
from tests.launch import answer
from tests.profiler.test_profile import SMALL


def broken_on_rank_1(num_sub_groups: int, num_threads: int, cores: Sequence[int]) -> AdamKernel:
    if torch.distributed.get_rank() == 1:
        raise RuntimeError("broken on purpose")
    return training_cpu_adam(num_sub_groups, num_threads, cores)


def outcome(log: Callable[[str], None], cpu_adam: CpuAdamFactory) -> str:
    try:
        return quick_profile(None, training_ranks(), log, log, threads=1, cpu_adam=cpu_adam, effort=SMALL).to_json()
    except Exception as error:  # noqa: BLE001 (the test checks the error)
        return f"{type(error).__name__}: {error}"


with launched_ranks(os.environ) as ranks:
    assert isinstance(ranks, DistributedRanks)
    lines: list[str] = []
    kernels = (training_cpu_adam, training_cpu_adam, broken_on_rank_1)
    outcomes = [outcome(lines.append, cpu_adam) for cpu_adam in kernels]
    answer({"outcomes": outcomes, "log": lines, "threads": torch.get_num_threads()})
assert not torch.distributed.is_initialized()
threads = {(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
assert not {name for name in threads if "gloo" in name}, "threads of the group are still alive"
