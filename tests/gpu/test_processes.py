"""The real engine on CUDA beside other processes: none of them changes a bit, or has the states' memory."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.engine import trained
from tests.gpu.figures import figure
from tests.gpu.one_by_one import Answers
from tests.gpu.processes import FORK, GPU_0, TWO_RANKS, WORKERS, has_nvidia_smi
from tests.gpu.test_engine import OURS, check_bits
from tests.gpu.time_left import seconds_left
from tests.launch import run_ranks

PROGRAM = ("-m", "tests.gpu.processes")

CONTEXT_BYTES = 200 * 2**20
"""Less than a CUDA context takes, and more than what nvidia-smi rounds."""

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"{torch.cuda.device_count()} GPU: it takes two")


@pytest.fixture(scope="module")
def found() -> Answers:
    return trained([FORK, WORKERS], PROGRAM)


def test_training_goes_on_beside_a_forked_child(found: Answers) -> None:
    arms = found.of(FORK)["arms"]
    assert len(arms) == 3
    for block, child in arms.items():
        figure(f"memory of a forked child, {block}", child["rss_bytes"] / 1e6, "MB")
        figure(f"memory of its parent before, {block}", child["parent_rss_bytes"] / 1e6, "MB")
    for block, child in arms.items():
        assert child["differences"] == [], block
        assert child["states_bytes"] > 2 * 2**20, block
        assert child["inherited_bytes"] == 0, f"{block}: the child has pages of the states"


def test_workers_that_load_data_change_nothing(found: Answers) -> None:
    arms = found.of(WORKERS)["arms"]
    assert len(arms) == 3
    for block, arm in arms.items():
        assert arm["differences"] == [], block


def test_the_process_ends_well(found: Answers) -> None:
    assert found.ending == ""


@two_gpus
def test_two_ranks_have_the_bits_of_stock_over_nccl() -> None:
    cuda = {"DS_ACCELERATOR": "cuda", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "4"}
    for rank, finished in enumerate(run_ranks(2, [*PROGRAM, TWO_RANKS.name], seconds_left(), **cuda)):
        assert finished.returncode == 0, f"rank {rank}: {finished.output[-5000:]}"
        (answer,) = finished.answers()
        assert "error" not in answer, answer["error"]
        check_bits(answer)


@two_gpus
@pytest.mark.skipif(not has_nvidia_smi(), reason="no nvidia-smi in PATH")
def test_a_rank_on_the_second_gpu_takes_no_memory_of_the_first() -> None:
    answer = trained([GPU_0], PROGRAM, LOCAL_RANK="1").of(GPU_0)
    assert (answer["device"], answer["optimizer"]) == ("cuda:1", OURS)
    figure("memory of GPU 0 taken by a rank on GPU 1", answer["added_bytes"] / 1e6, "MB")
    assert answer["added_bytes"] < CONTEXT_BYTES
