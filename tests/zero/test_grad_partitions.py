"""``get_fp32_grad_partitions`` is what it is with stock: tensors in host memory that the step reads."""

from __future__ import annotations

from tests.launch import run_ranks


def test_partitions_are_in_host_memory_and_what_is_written_into_them_counts() -> None:
    (finished,) = run_ranks(1, ["-m", "tests.zero.scripts.grad_partitions"], timeout_s=200)
    assert finished.returncode == 0, finished.output[-4000:]
    (found,) = finished.answers()
    assert set(found["stock"]) == {"cpu"}, "not the recording accelerator, cpu:0"
    assert found["ours"] == found["stock"]
    assert found["differences"] == []
