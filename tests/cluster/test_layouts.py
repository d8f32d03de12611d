"""Test the layouts of a cluster and the command that compares them: which ones there are, their time and memory."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf_model.__main__ import main
from perf_model.cli import cluster_command
from perf_model.cluster.layouts import layouts_of, tensor_parallel_sizes
from perf_model.presets.models import MODELS
from perf_model.training_run.training_memory import TrainingMemory
from tests.model.profiles import CPU_ONLY, RATES, job, profile

CLUSTER = job(MODELS["Llama-3-8B"], 64, 8, sequence=4096)


@given(st.integers(1, 8), st.sampled_from([1, 2, 4, 8]), st.integers(1, 64), st.sampled_from([None, [1, 5]]))
def test_every_layout_trains_the_global_batch_on_all_gpus(
    nodes: int, ranks_per_node: int, sequences: int, micro_batches: list[int] | None
) -> None:
    gpus = nodes * ranks_per_node
    cluster = replace(CLUSTER, world_size=gpus, ranks_per_node=ranks_per_node)
    sizes = tensor_parallel_sizes(cluster)
    assert sizes == [size for size in (1, 2, 4, 8) if size <= ranks_per_node]
    layouts = layouts_of(cluster, gpus * sequences, sizes, micro_batches)
    assert len(set(layouts)) == len(layouts) > 0
    for layout in layouts:
        assert layout.tensor_parallel * layout.data_parallel == gpus
        assert layout.data_parallel * layout.micro_batch * layout.accumulation == gpus * sequences
        assert micro_batches is None or layout.micro_batch in micro_batches


TENSOR_PARALLEL = job(MODELS["Llama-3-8B"], 16, 8, micro_batch=2, sequence=512, tensor_parallel=4)


def test_tensor_parallel_ranks_divide_matrices_operations_and_activations() -> None:
    whole = replace(TENSOR_PARALLEL, tensor_parallel=1)
    shape = whole.shape
    norms = (2 * shape.layers + 1) * shape.hidden
    assert TENSOR_PARALLEL.shard_numel == (shape.numel - norms) // 4 + norms
    assert TENSOR_PARALLEL.data_parallel == 4
    assert TENSOR_PARALLEL.tokens == whole.tokens / 4
    assert TENSOR_PARALLEL.work.forward_flops / 1e12 == whole.work.forward_flops / 1e12 / 4
    assert TENSOR_PARALLEL.work.backward_flops / 1e12 == pytest.approx(whole.work.backward_flops / 1e12 / 4)
    assert TENSOR_PARALLEL.mfu(1.0, 1e15) == pytest.approx(whole.mfu(1.0, 1e15) / 4)
    layer_bytes, divided_bytes = (TrainingMemory(job).layer_bytes for job in (whole, TENSOR_PARALLEL))
    norms_bytes = 2 * 8 * 2 * 512 * shape.hidden
    assert divided_bytes - norms_bytes == (layer_bytes - norms_bytes) / 4, "all but the inputs of the norms is divided"
    numel = sum(partition.numel for partition in TENSOR_PARALLEL.partitions)
    assert numel == pytest.approx(TENSOR_PARALLEL.shard_numel / 4, rel=1e-4)


JOB = {"profile": "h100-pcie5", "model": "7B", "gpus": 16, "ranks_per_node": 8, "global_batch": 64, "sequence": 2048}
JOB |= {"network_gb_per_s": 25, "node_gb_per_s": 300, "unit_size": 200_000_000}


def arguments(**more: Any) -> list[str]:
    options = {name: value for name, value in {**JOB, **more}.items() if value is not None}
    return [text for key, value in options.items() for text in (f"--{key.replace('_', '-')}", str(value))]


def compared(capsys: pytest.CaptureFixture[str], **more: Any) -> dict[str, Any]:
    assert main(["cluster", *arguments(**more), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_layouts_are_sorted_and_every_figure_follows_from_the_iteration(capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(capsys, tokens=1e12)
    layouts = [layout for layout in found["layouts"] if layout["fits"]]
    assert {layout["tensor_parallel"] for layout in layouts} == {1, 2, 4, 8}
    assert [layout["iteration_s"] for layout in layouts] == sorted(layout["iteration_s"] for layout in layouts)
    for layout in layouts:
        parts = layout["compute_s"] + layout["exposed_network_s"] + layout["exposed_update_s"]
        assert parts == pytest.approx(layout["iteration_s"])
        assert min(layout["compute_s"], layout["exposed_network_s"] + 1, layout["exposed_update_s"] + 1) > 0
        assert layout["tokens_per_s"] == pytest.approx(64 * 2048 / layout["iteration_s"])
        assert layout["days"] == pytest.approx(1e12 / layout["tokens_per_s"] / 86_400)
        assert layout["gpu_hours"] == pytest.approx(24 * 16 * layout["days"])
        assert 0 < layout["mfu"] < 1
        assert layout["limited_by"] in ("compute", "network", "update")
        assert layout["gpu_peak_bytes"] < 86e9
    best, config = layouts[0], found["deepspeed_config"]
    assert config["train_micro_batch_size_per_gpu"] == best["micro_batch"]
    assert config["gradient_accumulation_steps"] == best["accumulation"]
    assert config.get("tensor_parallel", {"autotp_size": 1})["autotp_size"] == best["tensor_parallel"]
    assert config["deep_optimizer_states"]["placement"] == "planned"
    assert config["zero_optimization"]["stage"] == 3


def test_megatron_is_compared_on_the_machine_of_its_paper_only(capsys: pytest.CaptureFixture[str]) -> None:
    given = dict.fromkeys(("network_gb_per_s", "node_gb_per_s"))
    given |= {"profile": "selene", "tensor_parallel": "1,2", "micro_batches": 2}
    for change in ({"network_gb_per_s": 25}, {"profile": "h100-pcie5"}, {"gpus": 8}):
        assert compared(capsys, **given | change)["megatron"] is None, change
    for uncertain, times in ((0.0, r"[\d.]+ times"), (math.inf, "about")):
        with mock.patch.multiple(cluster_command, LEAST_CERTAIN=0.0, MOST_UNCERTAIN=uncertain):
            assert main(["cluster", *arguments(**given)]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert re.search(rf"is {times} as fast as the best with t = 1 above. Tables 1 and 2 of arXiv", shown)


def test_the_screen_names_the_network_and_layouts_without_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", *arguments(tokens=1e12)]) == 0
    shown = capsys.readouterr().out
    assert "16 x H100-80GB, 2 x 8, 64 sequences of 2048 tokens per iteration" in shown
    assert "network between nodes, per GPU: 25 GB/s, given, not measured" in shown
    json.loads(shown[shown.index("config:\n") + len("config:\n") :])
    layouts = compared(capsys, gpu_memory_gb=24, tensor_parallel="1,4")["layouts"]
    unfit = [layout for layout in layouts if not layout["fits"]]
    assert unfit
    assert all("exceeds GPU memory by" in layout["why"] for layout in unfit)
    assert main(["cluster", *arguments(gpu_memory_gb=2)]) == 1
    assert "Paste into" not in capsys.readouterr().out


def test_the_origin_of_rates_of_the_network_is_stated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    more = {"tensor_parallel": 2, "micro_batches": 4, "node_gb_per_s": None, "network_gb_per_s": None}

    def origins(**options: Any) -> list[str]:
        found = compared(capsys, **{**more, **options})["network"]
        return [found[f"{name}_bytes_per_s"]["origin"] for name in ("inter_node", "all_gather")]

    assert origins(gpus=None, nodes=2) == ["of the preset, not measured"] * 2
    unmeasured = profile({**RATES, "matmul_flops_per_s": 3e14})
    path.write_text(unmeasured.to_json())
    assert main(["cluster", *arguments(profile=path, **more)]) == 2
    assert "--network-gb-per-s: is needed for 2 nodes, because the profile does not have it" in capsys.readouterr().err
    assumed = "not measured, assumed to equal the link to the host"
    assert origins(profile=path, network_gb_per_s=25) == ["given, not measured", assumed]
    rates = {"matmul_flops_per_s": 3e14, "all_gather_bytes_per_s": 2e11, "inter_node_bytes_per_s": 2e10}
    measured = replace(unmeasured.provenance, source="measured")
    path.write_text(replace(profile({**RATES, **rates}), provenance=measured).to_json())
    assert origins(profile=path) == ["measured"] * 2
    path.write_text(CPU_ONLY.to_json())
    assert main(["cluster", *arguments(profile=path)]) == 2
    assert "profile: must be of a machine with a GPU" in capsys.readouterr().err
