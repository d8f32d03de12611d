"""``get_fp32_grad_partitions`` returns the same as with stock: tensors in host memory that the step reads."""

from __future__ import annotations

from tests.launch import run_ranks


def test_partitions_are_in_host_memory_and_values_written_into_them_take_effect() -> None:
    (finished,) = run_ranks(1, ["-m", "tests.zero.gradients.grad_partition_ranks"], timeout_s=200)
    assert finished.returncode == 0, finished.output[-4000:]
    (found,) = finished.answers()
    assert set(found["stock"]) == {"cpu"}, "host memory"
    assert found["ours"] == found["stock"]
    assert found["differences"] == []
