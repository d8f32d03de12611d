"""Test the real engine on CUDA next to other processes: none of them changes a bit or shares the states' memory."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.engine import trained
from tests.gpu.figures import figure
from tests.gpu.one_by_one import Answers
from tests.gpu.processes import FORK, GPU_0, TWO_RANKS, WORKERS, has_nvidia_smi
from tests.gpu.test_engine import PLUGIN, check_bits
from tests.gpu.time_left import seconds_left
from tests.launch import run_ranks

PROGRAM = ("-m", "tests.gpu.processes")

CONTEXT_BYTES = 200 * 2**20
"""Less than the memory of a CUDA context, and more than the rounding of nvidia-smi."""

two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"the test needs two GPUs, found {torch.cuda.device_count()}"
)


@pytest.fixture(scope="module")
def found() -> Answers:
    return trained([FORK, WORKERS], PROGRAM)


def test_a_forked_child_changes_no_bits_and_inherits_no_states(found: Answers) -> None:
    variants = found.result(FORK)["variants"]
    assert len(variants) == 3
    for block, child in variants.items():
        figure(f"memory of a forked child, {block}", child["rss_bytes"] / 1e6, "MB")
        figure(f"memory of its parent before, {block}", child["parent_rss_bytes"] / 1e6, "MB")
    for block, child in variants.items():
        assert child["differences"] == [], block
        assert child["states_bytes"] > 2 * 2**20, block
        assert child["inherited_bytes"] == 0, f"{block}: the child has pages of the states"


def test_workers_that_load_data_change_no_bits(found: Answers) -> None:
    variants = found.result(WORKERS)["variants"]
    assert len(variants) == 3
    for block, variant in variants.items():
        assert variant["differences"] == [], block


def test_the_process_of_the_process_cases_exits_without_an_error(found: Answers) -> None:
    assert found.ending == ""


@two_gpus
def test_two_ranks_have_the_bits_of_stock_over_nccl() -> None:
    cuda = {"DS_ACCELERATOR": "cuda", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "4"}
    for rank, finished in enumerate(run_ranks(2, [*PROGRAM, TWO_RANKS.name], seconds_left(), fresh=True, **cuda)):
        assert finished.returncode == 0, f"rank {rank}: {finished.output[-5000:]}"
        (answer,) = finished.answers()
        assert "error" not in answer, answer["error"]
        check_bits(answer)


@two_gpus
@pytest.mark.skipif(not has_nvidia_smi(), reason="no nvidia-smi in PATH")
def test_a_rank_on_the_second_gpu_uses_no_memory_of_the_first() -> None:
    answer = trained([GPU_0], PROGRAM, LOCAL_RANK="1").result(GPU_0)
    assert (answer["device"], answer["optimizer"]) == ("cuda:1", PLUGIN)
    figure("memory of GPU 0 used by a rank on GPU 1", answer["added_bytes"] / 1e6, "MB")
    assert answer["added_bytes"] < CONTEXT_BYTES
