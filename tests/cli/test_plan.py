"""Test ``plan``: its figures, its screen, and the block to paste."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from perf_model.__main__ import main
from perf_model.prediction.hardware import HardwareProfile
from perf_model.presets.comparison import LARGER_MODELS
from perf_model.presets.machines import MACHINES
from perf_model.presets.models import MODELS
from perf_model.units import significant, size_of
from tests.cli.planning import job, planned, printed_plan, words_of
from tests.launch import REPOSITORY
from tests.model.profiles import CPU_ONLY

KEYS = {"forward_s", "backward_s", "update_s", "exposed_update_s", "fixed_s", "iteration_s"}
KEYS |= {"tokens_per_s", "mfu", "speed_up"}
BASELINES = {"stock", "twin_flow", "all_cpu", "all_streamed", "stride_2", "no_offload"}


def write(folder: Path, value: object) -> Path:
    path = folder / "input.json"
    path.write_text(value.to_json() if isinstance(value, HardwareProfile) else json.dumps(value))
    return path


@pytest.mark.parametrize(
    ("machine", "model"), [*((name, "Llama-3-8B") for name in MACHINES), *(("gh200", name) for name in MODELS)]
)
def test_every_preset_is_planned_for_with_consistent_figures(machine: str, model: str) -> None:
    found = planned(job(machine, model, world_size=16, unit_size=10**9))
    predicted, baselines = found["predicted"], found["baselines"]
    assert (set(predicted), set(baselines)) == (KEYS, BASELINES)
    assert 0 < found["work_lower_bound_s"] <= predicted["update_s"] * (1 + 1e-9)
    assert max(found["busy_s"].values()) <= predicted["update_s"] * (1 + 1e-9), "the busiest resource is a lower bound"
    assert found["ratio_to_work_bound"] == pytest.approx(predicted["update_s"] / found["work_lower_bound_s"])
    stock_s = baselines["stock"]["iteration_s"]
    for name, outcome in {"predicted": predicted, **baselines}.items():
        if outcome["iteration_s"] is None:
            assert outcome["why"]
            continue
        parts = ("forward_s", "backward_s", "exposed_update_s", "fixed_s")
        assert outcome["iteration_s"] == pytest.approx(sum(outcome[part] for part in parts))
        assert outcome["tokens_per_s"] == pytest.approx(16 * 2048 / outcome["iteration_s"])
        assert 0 < outcome["mfu"] < 1
        assert outcome["speed_up"] == (None if stock_s is None else pytest.approx(stock_s / outcome["iteration_s"]))
        assert name == "no_offload" or predicted["exposed_update_s"] <= outcome["exposed_update_s"] * (1 + 1e-9)
    block = found["deepspeed_config"]
    assert block["deep_optimizer_states"] == {"placement": "planned", "unit_size": 10**9}
    assert block["zero_optimization"] == {"stage": 3, "offload_optimizer": {"device": "cpu"}}


def test_overlap_hides_time_and_is_disabled_in_the_block() -> None:
    exposed_s = {}
    for overlap, disabled in {
        "none": {"overlap_backward", "overlap_forward"},
        "backward": {"overlap_forward"},
        "forward": {"overlap_backward"},
        "both": set(),
    }.items():
        found = planned(job(gpu_memory_gb=40, overlap=overlap, unit_size=10**8))
        exposed_s[overlap] = found["predicted"]["exposed_update_s"]
        block = found["deepspeed_config"]["deep_optimizer_states"]
        assert {key for key in block if key.startswith("overlap")} == disabled
    assert exposed_s["both"] < min(exposed_s["forward"], exposed_s["backward"]) < exposed_s["none"]


def test_options_of_the_training_run_and_the_machine_are_planned_for() -> None:
    once, often = planned(job(unit_size=10**8)), planned(job(unit_size=10**8, accumulation=8))
    assert often["predicted"]["forward_s"] == pytest.approx(8 * once["predicted"]["forward_s"])
    assert often["baselines"]["stock"]["update_s"] == once["baselines"]["stock"]["update_s"]
    assert often["deepspeed_config"]["gradient_accumulation_steps"] == 8
    frozen = planned(job(unit_size=10**8, trainable_share=0.01))
    assert frozen["memory"]["pinned_bytes"] < 0.05 * once["memory"]["pinned_bytes"]
    offloaded = planned([*job(unit_size=10**8, trainable_share=0.01), "--offload-param"])
    added_bytes = offloaded["memory"]["host_bytes"] - frozen["memory"]["host_bytes"]
    assert added_bytes == pytest.approx(2 * 0.99 * MODELS["13B"].numel, rel=0.01)
    divided = planned(job(unit_size=10**8, tensor_parallel=2))
    assert divided["deepspeed_config"]["tensor_parallel"] == {"autotp_size": 2}
    nodes = [planned(job(world_size=16, network_gb_per_s=rate, unit_size=10**9))["predicted"] for rate in (50, 1)]
    assert nodes[1]["forward_s"] > 2 * nodes[0]["forward_s"]
    slower = planned(job("rtx4090", "7B", cores=8, host_bandwidth_gb_per_s=40, link_gb_per_s=20, unit_size=10**8))
    assert slower["predicted"]["update_s"] > planned(job("rtx4090", "7B", unit_size=10**8))["predicted"]["update_s"]
    assert "given by the user: cores 8, host_bandwidth_gb_per_s 40, link_gb_per_s 20" in str(slower["inputs"])
    kept = planned(job(unit_size=10**8, states="bf16-masters"))["baselines"]["no_offload"]
    assert kept["why"] == "DeepSpeed offloads bf16 master weights whose moments are fp32"
    assert size_of(10**9, None) == "1.0 GB (limit unknown)"


def test_shared_layers_are_planned_for_with_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"model": "7B", "gpu_memory_gb": 20, "unit_size": 200_000_000}
    shared = job(**options, share_layers="model.layers", every=16)
    own, found = planned(job(**options)), planned(shared)
    assert found["inputs"]["model"]["numel"] < 0.6 * own["inputs"]["model"]["numel"]
    used, of_own = (sum(unit["forward_numel"] for unit in each["units"]) for each in (found, own))
    assert used == pytest.approx(of_own, rel=1e-3)
    trace = tmp_path / "new" / "timeline.json"
    assert "Written: " in words_of([*shared, "--timeline", str(trace)], capsys)
    events = json.loads(trace.read_text())["traceEvents"]
    exposed_s = sum(event["dur"] for event in events if event["name"] == "exposed update") / 1e6
    assert exposed_s == pytest.approx(found["predicted"]["exposed_update_s"])
    assert "Written: " in words_of([*shared, "--timeline", str(tmp_path / "timeline.png")], capsys)
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_the_screen_has_the_answer_and_what_was_assumed_and_the_block_to_paste(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    arguments = job(gpu_memory_gb=50)
    assert main(["plan", *arguments]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 60, "every line fits the terminal"
    words, found = " ".join(shown.split()), planned(arguments)
    plan_s, stock_s = (outcome["iteration_s"] for outcome in (found["predicted"], found["baselines"]["stock"]))
    runs, median, p90 = LARGER_MODELS
    for expected in (
        "13B does not fit on 4 x H100-80GB without offloading (",
        f"{significant(stock_s / plan_s, 2)} times as fast as with stock DeepSpeed's offload",
        "no offload: does not fit: 55 GB of 48.0 GB that --gpu-memory-gb and its margin leave",
        "PRESET, not a measurement of your machine",
        f"Iterations of {runs} published runs on A100-40GB and H100-80GB were off by {median:.0%} in the med",
        f"and by at most {p90:.0%} in nine of ten",
    ):
        assert expected in words
    block = json.loads(shown[shown.index("config:\n") + len("config:\n") :])
    assert block["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    options = {"accumulation": 4, "trainable_share": 0.01, "tensor_parallel": 2, "gpu_memory_gb": 80}
    shown = words_of([*job(**options, unit_size=10**9), "--offload-param"], capsys)
    assert (
        "4 x 1 sequences of 2048 tokens per rank and step, parameters in host memory, 1.0% of each parameter trained, "
        "tensor parallelism of 2 ranks"
    ) in shown
    assert "the plugin's hooks take 170 us more in forward" in shown
    assert "the model has 60% of its speed during updates on the CPU" in shown


def test_units_are_explained_with_the_effect_of_more_memory_and_cores(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = job(gpu_memory_gb=40, unit_size=10**8, eager_memory_gb=4, overlap="backward")
    found = planned(arguments)
    eager_numel = sum(unit["numel"] for unit in found["units"] if unit["eager"])
    assert 0 < 12 * eager_numel <= 4e9
    shown = words_of([*arguments, "--units", "--explain"], capsys)
    assert f"{eager_numel / 1e9:.2f} B parameters, with {12 * eager_numel / 1e9:.1f} GB of host memory" in shown
    effect = r"would (?:change nothing|shorten the iteration by [\d.]+ m?s)"
    for group in (
        rf"cpu: \d+ units, .* for \d+% of the update; one more core per rank {effect}\.",
        rf"streamed: \d+ units, .*; 1 GB more of GPU memory {effect}\.",
        rf"eager units: \d+, .*; 1 GB more of --eager-memory-gb {effect}\.",
        r"lower bound of the update, exposed and hidden time together: \d+ ms \(limited by [\w ]+\);",
    ):
        assert re.search(group, shown), group


def test_changes_with_which_a_job_fits_are_named_in_order_of_cost(capsys: pytest.CaptureFixture[str]) -> None:
    one_rank = {"world_size": 1, "ranks_per_node": 1, "unit_size": 10**9}
    arguments = job("rtx4090", "Qwen2.5-7B", **one_rank, micro_batch=4, sequence=1024)
    assert main(["plan", *arguments]) == 1
    rule, title, *changes, limits, training = capsys.readouterr().err.splitlines()
    assert rule.startswith("Nothing fits: the nearest plan exceeds GPU memory by ")
    assert title == "It fits with:"
    tokens = {line.partition(":")[0].strip(): int(line.split()[-2].replace(",", "")) for line in changes}
    assert list(tokens.values()) == sorted(tokens.values(), reverse=True)
    assert "--sequence 512 --micro-batch 2" in tokens
    assert limits.startswith("GPU memory: raise --gpu-memory-gb")
    assert training.startswith("Without the optimizer, training takes ")
    for change in list(tokens)[:2]:
        assert main(["plan", *arguments, *change.split()]) == 0, change


BOTH_SHORT = {"profile": "rtx4090", "model": "Llama-3-8B", "world_size": 1, "ranks_per_node": 1}
ON_DISK = "--nvme 6.5,5 (assumed GB/s of a disk, read and written)"
FEW_RANKS = {"model": "Llama-3-70B", "world_size": 8, "host_memory_gb": 300}


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"gpu_memory_gb": 16}, ["GPU memory by 1.8 GB per rank", "--gpu-memory-margin-gb"]),
        ({"gpu_memory_gb": 25, "host_memory_gb": 130}, ["host memory by", "--host-memory-gb", "--states bf16: "]),
        ({"gpu_memory_gb": 25, "pinned_memory_gb": 2}, ["pinned memory by", "--pinned-memory-gb"]),
        (FEW_RANKS, ["host memory by", "32 ranks (--world-size or --nodes): "]),
        (
            BOTH_SHORT,
            ["GPU memory by", "host memory by", f"{ON_DISK} --offload-param: ", "bf16-masters --offload-param: "],
        ),
    ],
)
def test_when_nothing_fits_the_error_names_what_takes_less_memory(
    limits: dict[str, Any], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *job(**limits, unit_size=10**9)]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("Nothing fits: the nearest plan exceeds")
    assert [text for text in expected if text not in output.err] == []


def test_where_the_cpu_trains_no_gpu_is_mentioned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = words_of([*job(write(tmp_path, CPU_ONLY), "7B", host_memory_gb=400), "--units", "--explain"], capsys)
    assert "without offloading is not predicted: the CPU is the only accelerator" in shown
    assert "memory per GPU" not in shown


RULES: list[dict[str, Any]] = [
    {"match": "*.mlp.*", "states": "cpu"},
    {"match": "lm_head.*", "states": "resident"},
    {"match": "*", "states": "planned"},
]


def test_units_in_rules_have_the_placement_of_their_rule_and_name_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    one_rank = {"model": "Llama-3-8B", "world_size": 1, "ranks_per_node": 1, "unit_size": 10**9}
    # Not all units fit.
    arguments = job(**one_rank, gpu_memory_gb=50, rules=write(tmp_path, RULES))
    found = planned(arguments)
    placements: dict[str | None, set[str]] = {}
    for unit in found["units"]:
        placements.setdefault(unit["rule"], set()).add(unit["placement"])
    assert set(placements) == {"rule '*.mlp.*'", "rule 'lm_head.*'", None}
    assert (placements["rule '*.mlp.*'"], placements["rule 'lm_head.*'"]) == ({"cpu"}, {"resident"})
    block = found["deepspeed_config"]["deep_optimizer_states"]
    assert (block["placement"], block["unit_size"]) == (RULES, 10**9)
    assert 0 < block["gpu_memory_gb"] < 50, "the optimizer's part of the GPU's memory"
    shown = words_of([*arguments, "--units"], capsys)
    assert "cpu rule '*.mlp.*'" in shown
    assert "more rows; --json prints every unit" in shown
    streamed = planned(job(rules=write(tmp_path, [{"match": "*", "states": "streamed"}]), gpu_memory_gb=40))
    assert streamed["deepspeed_config"]["deep_optimizer_states"]["num_slots"] >= 1


LARGE_UNITS = ["--unit-size", "200000000"]
DESKTOP = ["plan", "--profile", "rtx4090", "--host-memory-gb", "64", "--model", "Qwen2.5-7B", "--offload-param"]


def on_desktop(*options: str) -> tuple[float, float, int]:
    found = json.loads(printed_plan(*DESKTOP[1:], *LARGE_UNITS, *options))
    on_disk = sum(unit["numel"] for unit in found["units"] if unit["on_disk"])
    return found["predicted"]["iteration_s"], found["baselines"]["stock"]["iteration_s"], on_disk


def test_a_model_whose_states_do_not_fit_is_planned_with_disks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DESKTOP, *LARGE_UNITS]) != 0
    assert "keep states on disks: --nvme" in " ".join(capsys.readouterr().err.split())
    shown = words_of([*DESKTOP[1:], *LARGE_UNITS, "--nvme", "6.5,5", "--units", "--explain"], capsys)
    for expected in ("6.5 GB/s read, 5 GB/s written", "cpu, on disk", "(limited by disk)", '"device": "nvme"'):
        assert expected in shown
    slow, fast = (on_desktop("--nvme", rates) for rates in ("3,2", "6,5,11"))
    more_memory = on_desktop("--nvme", "3,2", "--host-memory-gb", "96")
    assert max(fast[0], more_memory[0]) < slow[0]
    assert more_memory[2] < slow[2] == fast[2]
    assert slow[0] < slow[1] > fast[1] > fast[0], "stock reads and writes all states and gradients"


def test_the_documented_desktop_has_the_documented_figures(capsys: pytest.CaptureFixture[str]) -> None:
    page = " ".join((REPOSITORY / "docs" / "planning.md").read_text().split())
    fp32, bf16 = page.split("The answer is ")[1].split("All of this is predicted")[0].split("With `--states bf16`")
    for states, sentences in (("fp32", fp32), ("bf16", bf16)):
        printed = words_of([*DESKTOP[1:], "--nvme", "6.5,5", "--accumulation", "16", "--states", states], capsys)
        figures = re.findall(r"\d+ (?:s|GB)\b", sentences)
        assert len(figures) >= 3
        assert [figure for figure in figures if figure not in printed] == []
