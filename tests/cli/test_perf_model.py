"""``python -m perf_model``: what it prints, writes and refuses."""

from __future__ import annotations

import contextlib
import copy
import csv
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perf_model.cli.main import main
from perf_model.prediction.hardware import REQUIRED
from perf_model.presets.machines import MACHINES
from perf_model.presets.models import MODELS
from tests.launch import REPOSITORY
from tests.model.profiles import RATES, profile

KEYS = {"forward_s", "backward_s", "update_s", "exposed_update_s", "iteration_s", "tokens_per_s", "mfu"}
BASELINES = {"stock", "twin_flow", "all_cpu", "all_streamed", "stride_2", "no_offload"}

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def job(profile: str | Path = "h100-pcie5", model: str | Path = "13B", world_size: int = 4, **more: Any) -> list[str]:
    options = {
        "profile": profile,
        "model": model,
        "world_size": world_size,
        "ranks_per_node": 4,
        "micro_batch": 1,
        "sequence": 2048,
        **more,
    }
    return [text for key, value in options.items() for text in (f"--{key.replace('_', '-')}", str(value))]


def planned(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("model", MODELS)
def test_every_preset_is_planned_for(machine: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, job(machine, model, world_size=16))
    assert set(found) == {
        "predicted",
        "baselines",
        "lower_bound_s",
        "ratio_to_bound",
        "work_lower_bound_s",
        "memory",
        "placement",
        "deepspeed_config",
    }
    predicted = found["predicted"]
    assert set(predicted) == KEYS
    assert set(found["baselines"]) == BASELINES
    assert set(found["placement"]) == {"cpu", "streamed", "resident"}
    assert set(found["memory"]) == {"gpu_peak_bytes", "host_bytes", "pinned_bytes"}
    assert 0 < found["lower_bound_s"] <= predicted["exposed_update_s"] * (1 + 1e-9)
    assert found["ratio_to_bound"] == pytest.approx(predicted["exposed_update_s"] / found["lower_bound_s"])
    assert found["work_lower_bound_s"] <= predicted["update_s"] * (1 + 1e-9)
    for arm in (predicted, *found["baselines"].values()):
        assert set(arm) >= KEYS
        if arm["iteration_s"] is None:
            assert arm["why"]
            continue
        assert arm["iteration_s"] == pytest.approx(arm["forward_s"] + arm["backward_s"] + arm["exposed_update_s"])
        assert arm["tokens_per_s"] == pytest.approx(16 * 2048 / arm["iteration_s"])
        assert 0 < arm["mfu"] < 1
    for name in ("all_cpu", "all_streamed", "stride_2", "twin_flow", "stock"):
        exposed_s = found["baselines"][name]["exposed_update_s"]
        assert exposed_s is None or predicted["exposed_update_s"] <= exposed_s * (1 + 1e-9), name
    zero = found["deepspeed_config"]["zero_optimization"]
    assert zero["stage"] == 3
    block = found["deepspeed_config"]["deep_optimizer_states"]
    assert block == {"placement": "planned", "gpu_memory_gb": block["gpu_memory_gb"]}
    on_gpu = found["placement"]["streamed"] + found["placement"]["resident"]
    assert (block["gpu_memory_gb"] > 0) == (on_gpu > 0)
    assert block["gpu_memory_gb"] * 1e9 < found["memory"]["gpu_peak_bytes"]


def test_the_screen_has_what_it_takes_to_decide(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *job(gpu_memory_gb=40)]) == 0
    shown = capsys.readouterr().out
    for expected in (
        "13B (11.25 B parameters) on 4 x H100-80GB, 2.81 B a rank",
        "PRESET, not a measurement of your machine",
        "this plan",
        "stock offload",
        "Twin-Flow",
        "all on the CPU",
        "all streamed",
        "no offload: does not fit: 51 GB of 40 GB",
        "exposed + hidden",
        "lower bound of the update, exposed in spite of 476 ms of backward and 160 ms of the next forward to hide it",
        "lower bound of the update, exposed and hidden together",
        "of which pinned",
        "No GPU has been measured against this yet",
        '"placement": "planned"',
    ):
        assert expected in shown
    block = json.loads(shown[shown.index("config:\n") + len("config:\n") :])
    assert block["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}


def test_memory_limits_move_sub_groups_off_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    limits = (80, 30, 12)
    roomy, tight, none = (planned(capsys, job(gpu_memory_gb=limit, sub_group_size=10**8)) for limit in limits)
    assert roomy["placement"]["resident"] > tight["placement"]["resident"] > none["placement"]["resident"] == 0
    for found, limit in ((roomy, 80), (tight, 30), (none, 12)):
        assert found["memory"]["gpu_peak_bytes"] <= limit * 1e9
    seconds = [found["predicted"]["exposed_update_s"] for found in (roomy, tight, none)]
    assert seconds == sorted(seconds)
    assert tight["baselines"]["no_offload"]["why"].startswith("does not fit")


def test_overlap_hides_and_never_adds(capsys: pytest.CaptureFixture[str]) -> None:
    exposed_s = {}
    for overlap in ("none", "backward", "forward", "both"):
        found = planned(capsys, job(gpu_memory_gb=20, overlap=overlap))
        exposed_s[overlap] = found["predicted"]["exposed_update_s"]
        assert exposed_s[overlap] <= found["predicted"]["update_s"] * (1 + 1e-9)
    assert exposed_s["both"] < min(exposed_s["forward"], exposed_s["backward"]) < exposed_s["none"]
    assert planned(capsys, job(gpu_memory_gb=20))["predicted"]["exposed_update_s"] == exposed_s["both"], "the default"


@pytest.mark.parametrize(
    ("overlap", "keys"),
    [
        ("both", {}),
        ("backward", {"overlap_forward": False}),
        ("forward", {"overlap_backward": False}),
        ("none", {"overlap_backward": False, "overlap_forward": False}),
    ],
)
def test_the_block_to_paste_switches_off_what_was_not_predicted(
    overlap: str, keys: dict[str, bool], capsys: pytest.CaptureFixture[str]
) -> None:
    block = planned(capsys, job(overlap=overlap))["deepspeed_config"]["deep_optimizer_states"]
    assert {key: value for key, value in block.items() if key.startswith("overlap")} == keys


@pytest.mark.parametrize(
    ("overlap", "told"),
    [
        ("none", "update, all of it exposed: "),
        ("backward", "update, exposed in spite of 476 ms of backward to hide it: "),
        ("forward", "update, exposed in spite of 160 ms of the next forward to hide it: "),
    ],
)
def test_the_lower_bound_says_what_may_hide_the_update(
    overlap: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *job(gpu_memory_gb=20, overlap=overlap)]) == 0
    shown = capsys.readouterr().out
    assert f"lower bound of the {told}" in shown
    assert ("exposed and hidden together" in shown) == (overlap != "none")


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({"gpu_memory_gb": 10}, ["gpu memory by 1.9 GB a rank", "It fits with 8 ranks"]),
        ({"gpu_memory_gb": 15, "host_memory_gb": 100}, ["host memory by", "It fits with 8 ranks"]),
        ({"gpu_memory_gb": 15, "pinned_memory_gb": 2}, ["pinned memory by"]),
    ],
)
def test_when_nothing_fits_it_says_what_would(
    limits: dict[str, int], told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *job(**limits)]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("Nothing fits: the nearest plan exceeds")
    for expected in told:
        assert expected in output.err


def test_a_profile_and_a_config_json_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine, model = tmp_path / "profile.json", tmp_path / "config.json"
    machine.write_text(profile({**RATES, "matmul_flops_per_s": 1e14}).to_json())
    model.write_text(json.dumps(LLAMA))
    found = planned(capsys, job(machine, model))
    assert found["deepspeed_config"]["deep_optimizer_states"]["profile"] == str(machine)
    assert found["predicted"]["mfu"] is None, "the profile does not say what the GPU's peak is"
    preset = planned(capsys, job(machine, "Llama-3-8B"))
    assert preset["predicted"] == found["predicted"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"profile": "none.json"}, "A profile must be a readable file, found none.json"),
        ({"model": "none.json"}, "A model must be a preset or a readable config.json, found none.json"),
        ({"world_size": 0}, "world_size: must be an integer from 1 to 1,000,000, found 0"),
        ({"world_size": 10**12}, "world_size: must be an integer from 1 to 1,000,000, found 1000000000000"),
        ({"ranks_per_node": 10**12}, "ranks_per_node: must be an integer from 1 to 10,000"),
        ({"micro_batch": 10**12}, "micro_batch: must be an integer from 1 to 1,000,000"),
        ({"sequence": 99999999999999999999}, "sequence: must be an integer from 1 to 10,000,000"),
        ({"micro_batch": 10**4, "sequence": 10**4}, "micro_batch: must be at most 10,000,000 tokens"),
        ({"world_size": 2000, "ranks_per_node": 1000}, "ranks_per_node: must be at most 96, the cores of h100-pcie5"),
        ({"profile": "long" * 1000}, "A profile must be a readable file"),
        ({"profile": "\0"}, "A profile must be a readable file"),
        ({"model": "long" * 1000}, "A model must be a preset or a readable config.json"),
        ({"world_size": 6}, "ranks_per_node: must divide the world size, 6, found 4"),
        ({"sequence": -1}, "sequence: must be an integer from 1 to 10,000,000, found -1"),
        ({"sub_group_size": 0}, "sub_group_size: must be an integer from 1 to 1,000,000,000,000,000, found 0"),
    ],
)
def test_bad_input_gets_rule_value_and_remedy(
    changes: dict[str, Any], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *job(**changes)]) == 2
    message = capsys.readouterr().err
    assert message.startswith(told)
    assert len(message.splitlines()) >= 2, "the remedy"


@pytest.mark.parametrize("limit", ["0", "-1", "1e-10", "nan", "inf", "much"])
def test_a_limit_is_at_least_a_byte(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", *job(gpu_memory_gb=limit)])
    assert f"must be a number of GB (10^9 bytes) from 1e-9 to 1e9, found '{limit}'" in capsys.readouterr().err


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


HOSTILE = st.sampled_from(
    [None, True, 0, -1, 1.0, 1.5, 1e-300, 8.5e10, float("nan"), float("inf"), "", "9", "\ud800", [], {}, nested(300)]
) | st.integers(0, 400).map(lambda power: 10**power)
GOOD = {
    "profile": json.loads(MACHINES["h100-pcie5"].profile(4).to_json()),
    "measured": json.loads(profile({**RATES, "matmul_flops_per_s": 1e14}).to_json()),
    "model": {**LLAMA, "head_dim": 128, "tie_word_embeddings": False, "attention_bias": False},
}


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(GOOD)), st.data())
def test_a_valid_file_with_one_thing_wrong_is_planned_with_or_refused(
    tmp_path_factory: pytest.TempPathFactory, which: str, data: st.DataObject
) -> None:
    value = copy.deepcopy(GOOD[which])
    target = value
    while True:
        key = data.draw(st.sampled_from(sorted(target) if isinstance(target, dict) else range(len(target))))
        if not target[key] or not isinstance(target[key], (dict, list)) or data.draw(st.sampled_from([1, 2, 3])) == 1:
            break
        target = target[key]
    if data.draw(st.sampled_from([1, 2, 3, 4])) == 1:
        del target[key]
    else:
        target[key] = data.draw(HOSTILE)
    path = tmp_path_factory.getbasetemp() / "hostile.json"
    path.write_text(json.dumps(value))
    screen = io.StringIO()
    with contextlib.redirect_stderr(screen), contextlib.redirect_stdout(io.StringIO()):
        code = main(["plan", *job(**{"model" if which == "model" else "profile": path}, sub_group_size=10**9)])
    message = screen.getvalue()
    assert code in (0, 1, 2)
    # The rule, the value found, and in a line of its own the remedy.
    assert code == 0 or (len(message.splitlines()) >= 2 and len(message) < 2000)


@pytest.mark.parametrize("text", ["", "[" * 100_000, "null", '"plan"', "\ufeff{}"])
@pytest.mark.parametrize("what", ["profile", "model"])
def test_any_other_file_is_refused(tmp_path: Path, text: str, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    assert main(["plan", *job(**{what: path})]) == 2
    assert len(capsys.readouterr().err.splitlines()) >= 2


def test_sub_groups_that_would_be_planned_for_hours_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "num_hidden_layers": 2000}))
    assert main(["plan", *job(model=path, sub_group_size=1)]) == 2
    assert "sub_group_size: must make at most 10,000 sub-groups of a rank, found 18,0" in capsys.readouterr().err


def test_a_reader_that_goes_is_no_error_to_tell() -> None:
    command = f"{shlex.join([sys.executable, '-m', 'perf_model', 'plan', *job(), '--json'])} | true"
    shell = ["bash", "-c", f"{command}; echo ${{PIPESTATUS[0]}}"]
    done = subprocess.run(shell, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_a_sweep_is_a_table_and_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sweep.csv"
    arguments = ["--profile", "gh200", "--model", "Llama-3-70B", "--ranks-per-node", "1", "--sequence", "4096"]
    sizes = ["--world-sizes", "1,8,16", "--micro-batches", "1,2", "--csv", str(path)]
    assert main(["sweep", *arguments, *sizes]) == 0
    shown = capsys.readouterr().out
    rows = list(csv.DictReader(path.open()))
    assert [(row["world_size"], row["micro_batch"]) for row in rows] == [
        (world, batch) for world in ("1", "8", "16") for batch in ("1", "2")
    ]
    for row in rows:
        assert (row["iteration_s"] == "") == (row["why"] != "") == (row["world_size"] == "1")
    assert float(rows[2]["tokens_per_s"]) == pytest.approx(8 * 4096 / float(rows[2]["iteration_s"]))
    assert "1 GPUs, micro-batch 2: Nothing fits" in shown
    assert main(["sweep", *arguments, "--world-sizes", "1", "--micro-batches", "1"]) == 1
    assert main(["sweep", *arguments, *sizes[:4], "--csv", str(tmp_path / "none" / "sweep.csv")]) == 2


def test_the_timeline_is_a_grid_a_trace_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new"
    arguments = job(model="7B", gpu_memory_gb=16)
    assert main(["simulate", *arguments, "--output", str(folder)]) == 0
    shown = capsys.readouterr().out
    names = {event["name"] for event in json.loads((folder / "timeline.json").read_text())["traceEvents"]}
    assert {"backward", "forward", "exposed update"} <= names
    (update,) = (line for line in shown.splitlines() if line.startswith("update "))
    assert re.fullmatch(r"update \S+ m?s: \S+ m?s exposed, \S+ m?s hidden", update)
    assert {"GPU_STEP", "CPU_STEP", "PUBLISH"} <= {name.split()[0] for name in names}
    (prefetched, *_) = sorted(name for name in names if name.startswith("PREFETCH"))
    assert f"{prefetched} [" in shown
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "file").touch()
    assert main(["simulate", *arguments, "--output", str(tmp_path / "file" / "below")]) == 2


def test_explain_says_what_moving_a_sub_group_would_cost(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *job(gpu_memory_gb=20, sub_group_size=100_000_000)]) == 0
    shown = capsys.readouterr().out
    for expected in (
        "Each resource has this much to do",
        "host memory",
        "to resident",
        "no room",
        "+",
        "GPU_STEP",
    ):
        assert expected in shown


def test_explain_cuts_nothing_off_where_the_screen_is_narrow(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["explain", *job(gpu_memory_gb=25, sub_group_size=20_000_000)]) == 0
    shown = capsys.readouterr().out
    assert "FLUSH_STATES " in shown
    assert "\u2026" not in shown
    (_, *lines) = shown.splitlines()
    assert max(map(len, lines)) <= 80


def test_where_the_cpu_trains_there_is_no_gpu_to_speak_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = tmp_path / "profile.json"
    rates = {name: RATES[name] for name in REQUIRED}
    machine.write_text(profile({**rates, "matmul_flops_per_s": 1e12}).to_json())
    assert main(["plan", *job(machine, "7B", host_memory_gb=400)]) == 0
    shown = capsys.readouterr().out
    assert "no offload: no accelerator beside the CPU" in shown
    assert "memory: host " in shown
    assert "lower bound of the update, all of it exposed: " in shown, "the CPU cannot train and update at once"
    (stock,) = (line for line in shown.splitlines() if line.startswith("stock offload"))
    assert stock.split()[-1] == "-", "of MFU"
    assert main(["plan", *job(machine, "7B", host_memory_gb=40)]) == 1
    assert "gpu memory" not in capsys.readouterr().err


def test_it_starts_without_what_it_may_not_need() -> None:
    """Torch is seconds, and rich or matplotlib a good part of the half second in which a plan is there."""
    code = "import sys, perf_model.cli.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert not {"torch", "deepspeed", "matplotlib", "rich", "deep_opt_states"} & set(done.stdout.split())


def test_as_a_module_it_helps_and_profile_runs_the_other_program() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "perf_model", *arguments]
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)

    helped = run("--help")
    assert helped.returncode == 0
    for command in ("plan", "sweep", "simulate", "explain", "validate", "profile"):
        assert f"\n    {command} " in helped.stdout
    refused = run("profile", "--output", "/nowhere/profile.json", "--quick")
    assert refused.returncode != 0
    assert "/nowhere" in refused.stderr + refused.stdout
