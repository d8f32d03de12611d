"""Check that all ranks run the same plan or none runs any, and that no rank waits for another forever."""

from __future__ import annotations

import os
import re
import sys
from contextlib import ExitStack, nullcontext, redirect_stdout
from io import StringIO
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig

from deep_opt_states import zero
from deep_opt_states.config import Config, ConfigError, Unsupported
from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.host.machine import Core
from deep_opt_states.names import SWITCH
from deep_opt_states.zero import plugin
from deep_opt_states.zero.internals.agreement import RanksDisagree
from deep_opt_states.zero.start import node_share, planning, release
from deep_opt_states.zero.start.devices import AcceleratorChoice
from deep_opt_states.zero.start.node_share import share_cores
from perf_model.presets.machines import MACHINES
from tests.ranks import ranks
from tests.zero.parity.case import CPU, STRIDE_2, STRIDE_3, Case
from tests.zero.parity.training import closing_engine

PLUGIN = "DeepOptimizerStates_Stage3"
ANOTHER_ACCELERATOR = "Unsupported: this rank has another accelerator"
THE_PLAN = r"RanksDisagree: All ranks must run the same plan.*rank 0, 2: [0-9a-f]{16}.*rank 1: [0-9a-f]{16}"
SWITCHED_OFF = r"RanksDisagree.* rank 0, 2: on / .* rank 1: off"
FAILED_ON_2 = f"another one has failed / .*rank 2: {ANOTHER_ACCELERATOR}"

DIFFERENCES: dict[str, tuple[tuple[dict[str, Any], ...], tuple[str, str, str]]] = {
    "plans": ((STRIDE_2, STRIDE_3, STRIDE_2), (THE_PLAN,) * 3),
    "one off": ((CPU, CPU, CPU), (SWITCHED_OFF,) * 3),
    "off for one, disabled for all": (({"enabled": False},) * 3, ("trains with DeepSpeedZeroOptimizer_Stage3",) * 3),
    "one without a kernel": (({"placement": "planned"},) * 3, (FAILED_ON_2, FAILED_ON_2, "")),
}
"""The blocks of the three ranks, and what is found on each. A rank that fails alone raises its own error."""


def start_with(difference: str, block: dict[str, Any]) -> str:
    rank = dist.get_rank()
    case = Case(name="disagreeing", blocks=(), world_size=3)
    profile = MACHINES["h100-pcie5"].profile(ranks=1)
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(planning, "quick_profile", return_value=profile))
        if "off" in difference and rank == 1:
            patches.enter_context(mock.patch.dict(os.environ, {SWITCH: "0"}))
        if difference == "one without a kernel" and rank == 2:
            # It fails while the planner decides.
            unsupported = Unsupported("this rank has another accelerator")
            patches.enter_context(mock.patch.object(AcceleratorChoice, "validate", side_effect=unsupported))
        try:
            with closing_engine(case, block) as engine:
                return f"trains with {type(engine.optimizer).__name__}"
        except (RanksDisagree, ConfigError, Unsupported) as error:
            return f"{type(error).__name__}: {' / '.join(str(error).splitlines())}"


@pytest.mark.P6
@ranks(3)
def test_every_rank_names_the_rank_that_differs() -> None:
    rank = dist.get_rank()
    for difference, (blocks, expected) in DIFFERENCES.items():
        answer = start_with(difference, blocks[rank])
        assert re.search(expected[rank], answer) if expected[rank] else answer == ANOTHER_ACCELERATOR, difference


CONFIG = Case(name="release", blocks=(), schedule=False).ds_config(CPU)


def start(*, version: str = "0.20.0") -> str:
    with mock.patch.object(deepspeed, "__version__", version):
        try:
            engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=CONFIG)
        except (Unsupported, RanksDisagree) as refusal:
            return str(refusal)
        name = type(engine.optimizer).__name__
        engine.destroy()
        return name


@pytest.mark.P6
@ranks(1)
def test_an_untested_release_is_used_with_one_warning_unless_it_lacks_a_name() -> None:
    with redirect_stdout(StringIO()) as output:
        assert [start(), start(), start(version="0.21.0")] == [PLUGIN] * 3
    for version in ("0.20.0", "0.21.0"):
        assert output.getvalue().count(f"DeepSpeed {version} was not tested with deep_opt_states") == 1

    def assert_refused(expected: str, **release_of: str) -> None:
        rule, missing, remedy = start(**release_of).splitlines()
        assert rule.endswith(", an untested release that lacks")
        assert expected in missing
        assert remedy == "Install one that was tested: pip install deepspeed==0.19.8."

    with mock.patch.object(release, "missing_names", return_value=["Engine._hook is missing"]):
        assert_refused("Engine._hook is missing", version="0.22.0")
    with pytest.MonkeyPatch.context() as patch:
        # Import the plugin again at its next use, without a module of DeepSpeed.
        patch.delitem(sys.modules, "deep_opt_states.zero.plugin")
        patch.delattr(zero, "plugin")
        patch.setitem(sys.modules, "deepspeed.runtime.zero.offload_config", None)
        assert_refused("import of deepspeed.runtime.zero.offload_config")


@pytest.mark.P6
@ranks(2)
def test_every_rank_raises_if_one_refuses_and_none_waits_for_a_rank_that_has_read_a_config() -> None:
    rank = dist.get_rank()
    if rank == 0:
        DeepSpeedConfig(CONFIG)
    assert start() == PLUGIN
    missing = mock.patch.object(plugin, "warn_of_untested_release", side_effect=AttributeError("gone"))
    with missing if rank == 1 else nullcontext():
        refused = start()
    assert ("rank 1: ", "an untested release that lacks\n  gone\n")[rank] in refused


@ranks(2)
def test_the_ranks_of_a_node_share_its_cores_whatever_omp_num_threads_is() -> None:
    """Check two NUMA nodes of 8 cores with one OMP thread, which also torchrun sets; rank 0's GPU is on the last."""
    rank = dist.get_rank()
    assert os.environ["OMP_NUM_THREADS"] == "1"
    node = tuple(Core(cpus=(cpu, cpu + 16), node=cpu // 8) for cpu in range(16))
    emulated = {"cores_of": lambda allowed: node, "gpu_node": lambda: 1 - rank}
    on_gpu = AcceleratorChoice(HostDevice(), slots_on_host=False)
    with mock.patch.multiple(node_share, **emulated), redirect_stdout(StringIO()) as output:
        share = share_cores(Config(), on_gpu)
        assert (share.threads, share.cores) == (6, ((8, 9, 10, 11, 12, 13), (0, 1, 2, 3, 4, 5))[rank])
        assert share.launch_cores == ((14, 15, 30, 31), (6, 7, 22, 23))[rank]
        with pytest.raises(ConfigError, match=r"deep_optimizer_states.cpu_threads: must be at most the 32 CPUs"):
            share_cores(Config(cpu_threads=33), on_gpu)
    line = "(8 of 16 physical cores, on NUMA node 1 like its GPU); OMP_NUM_THREADS=1 is for PyTorch's operations"
    assert output.getvalue().count(line) == (rank == 0)
