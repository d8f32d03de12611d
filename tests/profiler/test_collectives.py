"""Test the probes of collectives and of training steps on real ranks: nodes, agreement and waivers."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from torch.distributed import ProcessGroup

from deep_opt_states.device.cpu import HostDevice
from deep_opt_states.profiler import ranks as ranks_module
from deep_opt_states.profiler import training_step
from deep_opt_states.profiler.probes import ProbeError
from deep_opt_states.profiler.profile import sample
from deep_opt_states.profiler.ranks import (
    CollectiveGroups,
    Ranks,
    collective,
    collective_groups,
    launched_ranks,
    ranks_by_node,
)
from deep_opt_states.profiler.training_step import measure_training
from perf_model.prediction.hardware import QUANTITIES, TRAINING_QUANTITIES
from tests.profiler.virtual import SMALL
from tests.ranks import on_ranks
from tests.software_gpu import device as software_gpu
from tests.software_gpu.plugged import plugged
from tests.software_gpu.process_group import BACKEND, register_backend
from tests.software_gpu.settings import Settings

WHOLE_BYTES = 2**18


@pytest.mark.parametrize(
    ("hosts", "local_world_size", "nodes"),
    [("aaaa", None, [[0, 1, 2, 3]]), ("abab", None, [[0, 2], [1, 3]]), ("aaaa", "2", [[0, 1], [2, 3]])],
)
def test_ranks_of_one_host_name_are_on_one_node_unless_torchrun_started_fewer_there(
    hosts: str, local_world_size: str | None, nodes: list[list[int]]
) -> None:
    ranks = mock.Mock(gather=lambda value: [(host, local_world_size) for host in hosts])
    assert ranks_by_node(ranks, {}) == nodes


def test_no_group_is_created_for_one_rank_or_for_nodes_that_differ() -> None:
    assert collective_groups(Ranks(), "gloo", {}) == CollectiveGroups(in_node="one rank", across_nodes="one rank")
    ranks = mock.Mock(size=3, gather=lambda value: [("a", None), ("a", None), ("b", None)])
    differ = "the nodes have different numbers of ranks, 1 to 2"
    assert collective_groups(ranks, "gloo", {}) == CollectiveGroups("one rank on a node", differ)


def measured(ranks: Ranks, group: ProcessGroup | str, *, reduces: bool = False) -> list[float]:
    assert not isinstance(group, str), group
    prepare = partial(collective, HostDevice(), group, WHOLE_BYTES, "bytes_per_s", reduces=reduces)
    return [rates["bytes_per_s"] for rates in sample(prepare, SMALL, ranks)]


def results(group: ProcessGroup | str) -> list[Any]:
    assert not isinstance(group, str), group
    part, whole = torch.full((2,), float(group.rank())), torch.empty(2 * group.size())
    ranks_module._ALL_GATHER(whole, part, group=group)
    ranks_module._REDUCE_SCATTER(part, whole, group=group)
    return [group.rank(), group.size(), whole.tolist(), part.tolist()]


def measure_collectives() -> dict[str, Any]:
    with launched_ranks(os.environ) as ranks:
        groups = collective_groups(ranks, "gloo", {"LOCAL_WORLD_SIZE": "2"})
        found = {
            "in a node": measured(ranks, groups.in_node),
            "reduced in a node": measured(ranks, groups.in_node, reduces=True),
            "across nodes": measured(ranks, groups.across_nodes),
            "without a backend": collective_groups(ranks, "no_such_backend", {}).in_node,
        }
        own = {"results in a node": results(groups.in_node), "results across nodes": results(groups.across_nodes)}
        with mock.patch.object(ranks_module, "TIMEOUT", timedelta(seconds=1)):
            on_one_node = collective_groups(ranks, "gloo", {})
        group = on_one_node.in_node
        assert (on_one_node.across_nodes, isinstance(group, str)) == ("one node", False)
        failing = mock.patch.object(ranks_module, "_ALL_GATHER", side_effect=MemoryError("on purpose"))
        with (
            failing if ranks.rank == 1 else nullcontext(),
            pytest.raises(ProbeError, match="rank 1: MemoryError: on purpose"),
        ):
            measured(ranks, group)
        assert ranks.gather(found) == [found] * ranks.size, "the same samples and reasons on all ranks"
        return {**found, **own}


def test_collectives_over_gloo_are_right_and_agreed_on_two_nodes() -> None:
    for rank, found in enumerate(on_ranks(4, measure_collectives, group=nullcontext)):
        assert "no_such_backend" in found["without a backend"].lower()
        # This rank gathers the numbers of the two, and receives its own number from both.
        for place, name in ((rank % 2, "in a node"), (rank // 2, "across nodes")):
            assert found[f"results {name}"] == [place, 2, [0.0, 0.0, 1.0, 1.0], [2.0 * place] * 2]
        for name in ("in a node", "reduced in a node", "across nodes"):
            assert len(found[name]) >= SMALL.min_samples
            assert all(0 < rate < QUANTITIES["all_gather_bytes_per_s"].high for rate in found[name])


TINY = training_step.Layers(width=64, tokens=16, layers=2)


def measure_steps(on_gpu: bool) -> dict[str, float]:
    training_step.STEPS = 2
    for sizes in (training_step.SMALL, training_step.LARGE, training_step.MANY_TOKENS):
        sizes.update(dict.fromkeys(sizes, TINY))
    training_step.LARGE.update(dict.fromkeys(training_step.LARGE, replace(TINY, width=256)))
    if on_gpu:
        software_gpu.register()
        register_backend()
    with plugged(Settings()) if on_gpu else nullcontext():
        deepspeed.init_distributed(**({"dist_backend": BACKEND} if on_gpu else {}))
        return training_step.measure_here()


@pytest.mark.parametrize(("on_gpu", "num_ranks"), [(False, 2), (True, 1)], ids=["CPU", "software GPU"])
def test_engines_train_on_each_accelerator_and_measure_every_quantity(on_gpu: bool, num_ranks: int) -> None:
    for found in on_ranks(num_ranks, measure_steps, on_gpu, group=nullcontext):
        assert found.keys() == TRAINING_QUANTITIES.keys()
        assert found.pop("module_gradients_s") >= 0
        assert found.pop("module_step_s") >= 0
        assert min(found.values()) > 0


def values_with(module_s: float) -> str:
    values = {name: 1e9 if name.endswith("_per_s") else module_s for name in TRAINING_QUANTITIES}
    return f"import sys, json; json.dump({values!r}, open(sys.argv[1], 'w'))"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise OSError('no compiler')", "training a few layers with DeepSpeed failed (OSError: no compiler)"),
        ("import time; time.sleep(60)", "training a few layers took more than 1 s"),
        (values_with(6e-4), None),
        (values_with(6e-1), "implausible: module_"),
    ],
    ids=["failure", "timeout", "plausible", "implausible"],
)
def test_the_quantities_of_a_process_are_waived_with_the_reason_if_it_fails(
    code: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = subprocess.run

    def replaced(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return run([sys.executable, "-c", code, command[-1]], **options)

    monkeypatch.setattr(training_step, "TIMEOUT_S", 1.0 if "sleep" in code else 60.0)
    monkeypatch.setattr(training_step.subprocess, "run", replaced)
    waived = [found.waived for found in measure_training(Ranks()).values()]
    assert len(waived) == len(TRAINING_QUANTITIES)
    assert all(found is None if reason is None else found is not None and found.startswith(reason) for found in waived)
