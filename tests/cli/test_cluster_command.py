"""Test ``deep-opt-states cluster``: its layouts, its texts, and the inputs that it refuses."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perf_model.__main__ import main
from perf_model.prediction.hardware import QUANTITIES, REQUIRED
from tests.model.profiles import RATES, profile

JOB = {
    "profile": "h100-pcie5",
    "model": "7B",
    "gpus": 16,
    "ranks_per_node": 8,
    "global_batch": 64,
    "sequence": 2048,
    "network_gb_per_s": 25,
    "node_gb_per_s": 300,
    "unit_size": 200_000_000,
}


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


def test_the_block_of_a_tensor_parallel_layout_enables_autotp(capsys: pytest.CaptureFixture[str]) -> None:
    config = compared(capsys, tensor_parallel=4, micro_batches=2)["deepspeed_config"]
    assert config["tensor_parallel"] == {"autotp_size": 4}
    assert config["gradient_accumulation_steps"] * config["train_micro_batch_size_per_gpu"] * 4 == 64


def test_one_micro_batch_on_one_node_with_a_free_network_is_predicted_as_by_plan(
    capsys: pytest.CaptureFixture[str],
) -> None:
    most = QUANTITIES["all_gather_bytes_per_s"].high / 1e9
    job = {"gpus": 4, "ranks_per_node": 4, "global_batch": 4, "tensor_parallel": 1, "micro_batches": 1}
    found = compared(capsys, **job, node_gb_per_s=most, network_gb_per_s=None)
    (layout,) = found["layouts"]
    plan = ["--profile", "h100-pcie5", "--model", "7B", "--world-size", "4", "--ranks-per-node", "4"]
    plan += ["--micro-batch", "1", "--sequence", "2048", "--unit-size", "200000000", "--json"]
    assert main(["plan", *plan]) == 0
    planned = json.loads(capsys.readouterr().out)
    for name in ("iteration_s", "exposed_update_s", "tokens_per_s", "mfu"):
        assert layout[name] == pytest.approx(planned["predicted"][name], rel=1e-12)
    assert layout["exposed_network_s"] == 0
    assert layout["gpu_peak_bytes"] == planned["memory"]["gpu_peak_bytes"]
    assert layout["host_bytes_per_node"] == planned["memory"]["host_bytes"]
    assert {**planned["deepspeed_config"], "gradient_accumulation_steps": 1} == found["deepspeed_config"]


@given(
    st.sampled_from(["network_gb_per_s", "node_gb_per_s"]),
    st.floats(0.5, 300),
    st.floats(1, 20),
    st.sampled_from([1, 2, 4]),
)
@settings(max_examples=8)
def test_more_bandwidth_is_never_slower(name: str, rate: float, factor: float, tensor_parallel: int) -> None:
    """Check within 0.5 %, which the planner counts as equally good."""
    iterations = []
    for given_rate in (rate, factor * rate):
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            more = {name: given_rate, "tensor_parallel": tensor_parallel, "micro_batches": "1,4"}
            assert main(["cluster", *arguments(**more), "--json"]) == 0
        layouts = json.loads(text.getvalue())["layouts"]
        iterations.append({layout["micro_batch"]: layout["iteration_s"] for layout in layouts})
    for micro_batch, iteration_s in iterations[0].items():
        assert iterations[1][micro_batch] <= 1.005 * iteration_s


def test_a_slow_network_makes_larger_micro_batches_faster_and_limits_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = compared(capsys, network_gb_per_s=2, tensor_parallel=1)
    layouts = found["layouts"]
    sizes = [layout["micro_batch"] for layout in layouts]
    assert sizes == sorted(sizes, reverse=True)
    assert layouts[-1]["limited_by"] == "network"
    assert layouts[-1]["exposed_network_s"] > layouts[-1]["compute_s"]


def test_the_screen_names_the_network_and_the_fixed_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", *arguments(tokens=1e12)]) == 0
    shown = capsys.readouterr().out
    for expected in (
        "7B (5.92 B parameters) on 16 x H100-80GB, 2 x 8, 64 sequences of 2048 tokens per iteration",
        "network between nodes, per GPU: 25 GB/s, given, not measured",
        "network inside a node, per GPU: 300 GB/s, given, not measured",
        "days gpu_hours",
        "by our runs on H100 and H200, with hosts of 16 cores, and not of this machine.",
        '"gradient_accumulation_steps": ',
    ):
        assert expected in shown
    assert "Megatron-LM" not in shown
    block = json.loads(shown[shown.index("config:\n") + len("config:\n") :])
    assert block["bf16"] == {"enabled": True}


def test_megatron_is_compared_on_the_machine_of_its_paper_only(capsys: pytest.CaptureFixture[str]) -> None:
    given = {"network_gb_per_s": None, "node_gb_per_s": None, "profile": "selene", "tensor_parallel": "1,2"}
    limited = compared(capsys, **given, micro_batches=2)["megatron"]
    assert limited["tensor_parallel"] in (1, 2)
    assert limited["micro_batch"] == 2
    assert compared(capsys, **given | {"network_gb_per_s": 25}, micro_batches=2)["megatron"] is None
    assert compared(capsys, **given | {"profile": "h100-pcie5"}, micro_batches=2)["megatron"] is None
    assert main(["cluster", *arguments(**given, micro_batches=2)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Tables 1 and 2 of arXiv 2104.04473 are predicted within 10 and 20%." in shown


def test_rates_that_a_profile_lacks_are_assumed_inside_a_node_and_needed_between_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "alone.json"
    path.write_text(profile({**RATES, "matmul_flops_per_s": 3e14}).to_json())
    more = {"profile": path, "tensor_parallel": 2, "micro_batches": 4, "node_gb_per_s": None}
    found = compared(capsys, **more)
    assert found["network"]["all_gather_bytes_per_s"] == {
        "value": RATES["d2h_bytes_per_s"],
        "origin": "not measured, assumed to be that of the link to the host",
    }
    assert main(["cluster", *arguments(**more, network_gb_per_s=None)]) == 2
    assert "--network-gb-per-s: is needed for 2 nodes, because the profile does not have it" in capsys.readouterr().err


def test_a_preset_has_rates_of_the_network_and_the_number_of_nodes_gives_that_of_the_gpus(
    capsys: pytest.CaptureFixture[str],
) -> None:
    more = {"tensor_parallel": 2, "micro_batches": 4, "node_gb_per_s": None, "network_gb_per_s": None}
    found = compared(capsys, **more, gpus=None, nodes=2)
    assert {entry["origin"] for entry in found["network"].values()} == {"of the preset, not measured"}
    assert found["layouts"][0]["data_parallel"] == 8


def test_layouts_without_memory_are_listed_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(capsys, gpu_memory_gb=24, tensor_parallel="1,4")
    unfit = [layout for layout in found["layouts"] if not layout["fits"]]
    assert unfit
    assert all("exceeds gpu memory by" in layout["why"] for layout in unfit)
    assert main(["cluster", *arguments(gpu_memory_gb=2)]) == 1
    shown = capsys.readouterr().out
    assert "exceeds gpu memory by" in shown
    assert "Paste into" not in shown


def test_rules_that_do_not_fit_together_with_sums_fit_with_the_sums_in_host_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = tmp_path / "rules.json"
    rules.write_text('[{"match": "model.layers.0.*", "states": "resident"}]')
    one_gpu = dict.fromkeys(("network_gb_per_s", "node_gb_per_s", "unit_size")) | {"gpus": 1, "ranks_per_node": 1}
    found = compared(capsys, **one_gpu, profile="l40s", model="13B", global_batch=2, rules=rules)
    assert {(layout["micro_batch"], layout["fits"]) for layout in found["layouts"]} == {(1, True), (2, True)}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"global_batch": 51}, "global_batch: must be a multiple of the data-parallel size, here of 2, found 51"),
        ({"global_batch": 33, "micro_batches": "3,4", "gpus": 8, "tensor_parallel": 1}, "Give --global-batch 32 or 48"),
        ({"gpus": 0}, "Correct --world-size, or --nodes (--gpus of a cluster)."),
        ({"global_batch": 50, "tensor_parallel": 1}, "Give --global-batch 48 or 64, or another number of --gpus."),
        ({"tensor_parallel": 3}, "tensor_parallel: must divide the number of ranks of a node, 8, found 3"),
        ({"gpus": 12}, "ranks_per_node: must divide the world size, 12, found 8"),
        ({"node_gb_per_s": "nan"}, "--node-gb-per-s: must be a number from 0.001 to 10000"),
        ({"network_gb_per_s": -1}, "--network-gb-per-s: must be a number from 0.001 to 10000"),
        ({"network_gb_per_s": -1, "gpus": 8}, "--network-gb-per-s: must be a number from 0.001 to 10000"),
        ({"node_gb_per_s": "nan", "ranks_per_node": 1}, "--node-gb-per-s: must be a number from 0.001 to 10000"),
        ({"global_batch": 0}, "global_batch: must be an integer from 1 to"),
    ],
)
def test_impossible_inputs_are_refused_with_the_remedy(
    more: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", *arguments(**more)]) == 2
    assert message in capsys.readouterr().err


def test_a_machine_without_a_gpu_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cpu.json"
    path.write_text(profile({**{name: RATES[name] for name in REQUIRED}, "matmul_flops_per_s": 1e12}).to_json())
    assert main(["cluster", *arguments(profile=path)]) == 2
    assert "profile: must be of a machine with a GPU" in capsys.readouterr().err


def test_measured_rates_of_the_network_are_used_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = {"matmul_flops_per_s": 3e14, "all_gather_bytes_per_s": 2e11, "inter_node_bytes_per_s": 2e10}
    measured = profile({**RATES, **rates})
    path = tmp_path / "measured.json"
    path.write_text(replace(measured, provenance=replace(measured.provenance, source="measured")).to_json())
    more = {"tensor_parallel": 1, "micro_batches": 4, "network_gb_per_s": None, "node_gb_per_s": None}
    found = compared(capsys, profile=path, **more)
    assert found["network"] == {
        "inter_node_bytes_per_s": {"value": 2e10, "origin": "measured"},
        "all_gather_bytes_per_s": {"value": 2e11, "origin": "measured"},
    }
