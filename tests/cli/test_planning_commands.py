"""Test the planning commands: the texts and files that they write, the inputs that they refuse, the two programs."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from deep_opt_states.cli.main import main as deep_opt_states_main
from perf_model.__main__ import COMMANDS_THAT_NEED_TORCH, main
from perf_model.cli import inputs, model_option, sweep_command
from perf_model.prediction.cost import Resource
from perf_model.prediction.hardware import REQUIRED
from perf_model.presets.machines import MACHINES
from perf_model.presets.models import MODELS
from perf_model.training_run.hf_config import read_hf_config
from tests.launch import REPOSITORY
from tests.model.profiles import RATES, profile

KEYS = {
    "forward_s",
    "backward_s",
    "update_s",
    "exposed_update_s",
    "fixed_s",
    "iteration_s",
    "tokens_per_s",
    "mfu",
    "speed_up",
}
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


SWEEP = ["--profile", "gh200", "--model", "Llama-3-70B", "--ranks-per-node", "1", "--sequence", "4096"]

PLANNING_COMMANDS = ("plan", "sweep", "cluster")


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


@cache
def printed_plan(*arguments: str) -> str:
    """Return the JSON that ``plan`` prints; it plans for the same arguments once per process."""
    with redirect_stdout(io.StringIO()) as shown:
        assert main(["plan", *arguments, "--json"]) == 0
    return shown.getvalue()


def planned(arguments: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed_plan(*arguments))
    return found


@pytest.mark.parametrize(
    ("machine", "model"),
    [
        *[(machine, "Llama-3-8B") for machine in MACHINES],
        *[(machine, model) for machine in ("a100-pcie4", "gh200") for model in MODELS if model != "Llama-3-8B"],
    ],
)
def test_every_preset_is_planned_for(machine: str, model: str) -> None:
    found = planned(job(machine, model, world_size=16))
    assert set(found) == {
        "predicted",
        "budgets",
        "baselines",
        "work_lower_bound_s",
        "ratio_to_work_bound",
        "busy_s",
        "memory",
        "placement",
        "units",
        "windows",
        "versions",
        "inputs",
        "order",
        "num_slots",
        "unit_size",
        "plan",
        "deepspeed_config",
    }
    predicted = found["predicted"]
    assert set(predicted) == KEYS
    assert set(found["baselines"]) == BASELINES
    assert set(found["placement"]) == {"cpu", "streamed", "resident"}
    assert set(found["memory"]) == {
        "gpu_peak_bytes",
        "host_bytes",
        "reserved_host_bytes",
        "pinned_bytes",
        "eager_bytes",
        "disk_bytes",
        "no_offload_bytes",
    }
    assert 0 < found["work_lower_bound_s"] <= predicted["update_s"] * (1 + 1e-9)
    assert max(found["busy_s"].values()) <= predicted["update_s"] * (1 + 1e-9), "the busiest resource is a lower bound"
    assert found["ratio_to_work_bound"] == pytest.approx(predicted["update_s"] / found["work_lower_bound_s"])
    for outcome in (predicted, *found["baselines"].values()):
        assert set(outcome) >= KEYS
        if outcome["iteration_s"] is None:
            assert outcome["why"]
            continue
        assert outcome["iteration_s"] == pytest.approx(
            outcome["forward_s"] + outcome["backward_s"] + outcome["exposed_update_s"] + outcome["fixed_s"]
        )
        assert outcome["tokens_per_s"] == pytest.approx(16 * 2048 / outcome["iteration_s"])
        assert 0 < outcome["mfu"] < 1
        stock_s = found["baselines"]["stock"]["iteration_s"]
        assert outcome["speed_up"] == (None if stock_s is None else pytest.approx(stock_s / outcome["iteration_s"]))
    for name in ("all_cpu", "all_streamed", "stride_2", "twin_flow", "stock"):
        exposed_s = found["baselines"][name]["exposed_update_s"]
        assert exposed_s is None or predicted["exposed_update_s"] <= exposed_s * (1 + 1e-9), name
    zero = found["deepspeed_config"]["zero_optimization"]
    block = found["deepspeed_config"]["deep_optimizer_states"]
    assert block == {"placement": "planned"}
    assert zero == {"stage": 3, "offload_optimizer": {"device": "cpu"}}


def test_all_on_the_cpu_is_predicted_as_the_plan_of_a_rule_with_the_same_placements(tmp_path: Path) -> None:
    """Check the order, too: in that of the indices, the first layer would wait for the unit with the norms."""
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps([{"match": "*", "states": "cpu"}]))
    compared = planned(job(unit_size=10**8))["baselines"]["all_cpu"]
    predicted = planned(job(unit_size=10**8, rules=rules))["predicted"]
    assert predicted["update_s"] - predicted["exposed_update_s"] > 0.1, "the first layers do not wait for everything"
    assert compared["exposed_update_s"] == pytest.approx(predicted["exposed_update_s"], rel=1e-9)


@pytest.mark.parametrize("columns", [60, 80])
def test_plan_prints_the_figures_of_every_alternative_and_the_block_to_paste(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["plan", *job(gpu_memory_gb=50)]) == 0
    shown = capsys.readouterr().out
    words = " ".join(shown.split())
    for expected in (
        "13B (11.25 B parameters) on 4 x H100-80GB, 2.81 B per rank",
        "PRESET, not a measurement of your machine",
        "this plan",
        "stock offload",
        "Twin-Flow",
        "all on the CPU",
        "all streamed",
        "no offload: does not fit: 55 GB of 48.0 GB that --gpu-memory-gb and its margin leave",
        "forward backward exposed hidden",
        "iteration tokens/s MFU speed-up",
        "assumed: bf16, gradient checkpointing, flash attention, 360 GB/s in a node",
        "memory per GPU: ",
        "memory per host: ",
        "the host takes at least 650 us per module in forward",
        "the stock offload of DeepSpeed today, with asynchronous copies of gradients",
        "Iterations of 45 published runs on A100-40GB and H100-80GB were off by",
        '"placement": "planned"',
    ):
        assert expected in words
    assert "slots" not in words, "units are printed on request"
    assert max(map(len, shown.splitlines())) <= columns, "every line fits the terminal"
    block = json.loads(shown[shown.index("config:\n") + len("config:\n") :])
    assert block["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}


def test_options_of_a_gpu_are_refused_without_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = tmp_path / "profile.json"
    cpu_only = {name: RATES[name] for name in REQUIRED}
    machine.write_text(profile({**cpu_only, "matmul_flops_per_s": 1e12}).to_json())
    for option, *value in (("--offload-param",), ("--gpu-memory-margin-gb", "0"), ("--eager-memory-gb", "1")):
        assert main(["plan", *job(machine), option, *value]) == 2
        assert capsys.readouterr().err.startswith(f"{option}: needs a profile of a machine with a GPU, found")


@pytest.mark.parametrize("states", ["streamed", "resident", "cpu"])
def test_a_rule_for_the_gpu_is_refused_where_its_adam_has_no_rate(
    states: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps([{"match": "*embed*", "states": "cpu"}, {"match": "*", "states": states}]))
    rates = {**RATES, "matmul_flops_per_s": 1e14}
    cpu_only = {**{name: RATES[name] for name in REQUIRED}, "matmul_flops_per_s": 1e12}
    for number, (found, why) in enumerate(
        [({**rates, "gpu_adam_params_per_s": None}, "no accelerator"), (cpu_only, "not in the profile")]
    ):
        machine = tmp_path / f"profile{number}.json"
        machine.write_text(profile(found).to_json())
        code = main(["plan", *job(machine, rules=rules, host_memory_gb=10**4, unit_size=10**9)])
        message = capsys.readouterr().err
        if states == "cpu":
            assert code == 0, message
            continue
        assert code == 2
        assert message == (
            f'--rules: "{states}" needs a rate of Adam on the GPU, found none ({why}).\n'
            "Remove the rule, or plan with another profile.\n"
        )


def test_plan_states_how_many_parameters_are_eager_and_their_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"gpu_memory_gb": 40, "unit_size": 10**8}
    by_default, none = (planned(job(**options, **more)) for more in ({}, {"eager_memory_gb": 0}))
    few = planned(job(**options, eager_memory_gb=4))
    eager_numel = sum(unit["numel"] for unit in few["units"] if unit["eager"])
    assert few["memory"]["eager_bytes"] == 4 * 12 * eager_numel, "of four ranks"
    assert 0 < 12 * eager_numel <= 4e9
    assert few["memory"]["host_bytes"] - few["memory"]["eager_bytes"] == none["memory"]["host_bytes"]
    iteration_s = [found["predicted"]["iteration_s"] for found in (by_default, few, none)]
    assert iteration_s == sorted(iteration_s)
    assert iteration_s[0] < iteration_s[2]
    assert main(["plan", *job(**options, eager_memory_gb=4), "--units"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{eager_numel / 1e9:.2f} B parameters, with {12 * eager_numel / 1e9:.1f} GB of host memory" in shown
    assert main(["plan", *job(**options, eager_memory_gb=0), "--units"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("eager") == shown.count('"eager": false') == 1


def test_memory_limits_move_units_off_the_gpu() -> None:
    limits = (80, 40, 24.2)
    large, small, none = (planned(job(gpu_memory_gb=limit, unit_size=10**8)) for limit in limits)
    assert large["placement"]["resident"] > small["placement"]["resident"] > none["placement"]["resident"]
    assert none["placement"]["resident"] == 0, "not even the unit that forward uses first fits"
    for found, limit in zip((large, small, none), limits, strict=True):
        assert found["memory"]["gpu_peak_bytes"] <= limit * 1e9
    seconds = [found["predicted"]["exposed_update_s"] for found in (large, small, none)]
    assert seconds == sorted(seconds)
    assert small["baselines"]["no_offload"]["why"].startswith("does not fit")


def test_overlap_hides_time_and_never_adds_any() -> None:
    exposed_s = {}
    for overlap in ("none", "backward", "forward", "both"):
        found = planned(job(gpu_memory_gb=40, overlap=overlap, unit_size=10**8))
        exposed_s[overlap] = found["predicted"]["exposed_update_s"]
        assert exposed_s[overlap] <= found["predicted"]["update_s"] * (1 + 1e-9)
    assert exposed_s["both"] < min(exposed_s["forward"], exposed_s["backward"]) < exposed_s["none"]
    by_default = planned(job(gpu_memory_gb=40, unit_size=10**8))
    assert by_default["predicted"]["exposed_update_s"] == exposed_s["both"]


@pytest.mark.parametrize(
    ("overlap", "keys"),
    [
        ("both", {}),
        ("backward", {"overlap_forward": False}),
        ("forward", {"overlap_backward": False}),
        ("none", {"overlap_backward": False, "overlap_forward": False}),
    ],
)
def test_the_block_to_paste_disables_overlap_that_was_not_predicted(overlap: str, keys: dict[str, bool]) -> None:
    block = planned(job(overlap=overlap, unit_size=10**8))["deepspeed_config"]["deep_optimizer_states"]
    assert {key: value for key, value in block.items() if key.startswith("overlap")} == keys


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [
        ("none", "all of it exposed"),
        ("backward", "exposed and hidden time together"),
        ("forward", "exposed and hidden time together"),
    ],
)
def test_the_lower_bound_states_whether_it_has_hidden_time_and_which_resource_limits(
    overlap: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *job(gpu_memory_gb=30, overlap=overlap, unit_size=10**8), "--units"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    bound = rf"lower bound of the update, {expected}: \d+ ms \(limited by ([\w ]+)\); this plan takes (\S+) times"
    found = re.search(bound, shown)
    assert found is not None
    assert found[1] in {resource.value for resource in Resource}
    assert float(found[2]) >= 1.0


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (
            {"gpu_memory_gb": 16},
            ["gpu memory by 1.8 GB per rank", "--gpu-memory-margin-gb"],
        ),
        (
            {"gpu_memory_gb": 25, "host_memory_gb": 130},
            ["host memory by", "--host-memory-gb"],
        ),
        ({"gpu_memory_gb": 25, "host_memory_gb": 200}, ["host memory by"]),
        ({"gpu_memory_gb": 25, "pinned_memory_gb": 2}, ["pinned memory by", "--pinned-memory-gb"]),
    ],
)
def test_when_nothing_fits_the_error_names_what_takes_less_memory(
    limits: dict[str, int], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *job(**limits)]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("Nothing fits: the nearest plan exceeds")
    for text in expected:
        assert text in output.err


def test_profile_and_model_are_read_from_files(tmp_path: Path) -> None:
    machine, model = tmp_path / "profile.json", tmp_path / "config.json"
    machine.write_text(profile({**RATES, "matmul_flops_per_s": 1e14}).to_json())
    model.write_text(json.dumps(LLAMA))
    found = planned(job(machine, model))
    assert found["deepspeed_config"]["deep_optimizer_states"]["profile"] == str(machine)
    assert found["predicted"]["mfu"] is None, "the profile does not have the peak of the GPU"
    preset = planned(job(machine, "Llama-3-8B"))
    assert preset["predicted"] == found["predicted"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"profile": "none.json"}, "A profile must be a readable file, found none.json"),
        ({"model": "none.json"}, "A model must be a preset or a readable config.json, found none.json"),
        ({"world_size": 0}, "world_size: must be an integer from 1 to 1,000,000, found 0"),
        ({"world_size": 10**12}, "world_size: must be an integer from 1 to 1,000,000, found 1000000000000"),
        ({"ranks_per_node": 10**12}, "ranks_per_node: must be an integer from 1 to 1,000,000"),
        ({"micro_batch": 10**12}, "micro_batch: must be an integer from 1 to 1,000,000"),
        ({"sequence": 99999999999999999999}, "sequence: must be an integer from 1 to 10,000,000"),
        (
            {"world_size": 2000, "ranks_per_node": 1000},
            "ranks_per_node: must be at most 96, the number of cores of h100-pcie5",
        ),
        ({"profile": "long" * 1000}, "A profile must be a readable file"),
        ({"profile": "\0"}, "A profile must be a readable file"),
        ({"model": "long" * 1000}, "A model must be a preset or a readable config.json"),
        ({"world_size": 6}, "ranks_per_node: must divide the world size, 6, found 4"),
        ({"sequence": -1}, "sequence: must be an integer from 1 to 10,000,000, found -1"),
        ({"sub_group_size": 0}, "sub_group_size: must be an integer from 1 to 1,000,000,000,000,000, found 0"),
        ({"unit_size": 0}, "unit_size: must be an integer from 1 to 1,000,000,000,000,000, found 0"),
        ({"rules": "none.json"}, "--rules: must be a readable file with a JSON list, found none.json: "),
    ],
)
def test_bad_input_is_refused_with_rule_value_and_remedy(
    changes: dict[str, Any], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *job(**changes)]) == 2
    message = capsys.readouterr().err
    assert message.startswith(expected)
    assert len(message.splitlines()) >= 2, "the remedy"


@pytest.mark.parametrize("limit", ["0", "-1", "1e-10", "nan", "inf", "much"])
def test_a_memory_limit_is_a_number_of_gb_and_at_least_one_byte(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", *job(gpu_memory_gb=limit)])
    assert f"must be a number of GB (10^9 bytes) from 1e-09 to 1e+09, found '{limit}'" in capsys.readouterr().err


@pytest.mark.parametrize(("margin", "is_valid"), [("0", True), ("0e0", True), ("-1", False), ("2GB", False)])
def test_a_margin_may_be_zero(margin: str, is_valid: bool, capsys: pytest.CaptureFixture[str]) -> None:
    if is_valid:
        assert planned(job(gpu_memory_margin_gb=margin, unit_size=10**9)) == planned(
            job(gpu_memory_margin_gb=0, unit_size=10**9)
        )
        return
    with pytest.raises(SystemExit, match="2"):
        main(["plan", *job(gpu_memory_margin_gb=margin)])
    assert f"must be a number of GB (10^9 bytes) from 0 to 1e+09, found '{margin}'" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "null", '"plan"', "\ufeff{}"])
@pytest.mark.parametrize("option", ["profile", "model"])
def test_a_file_of_another_kind_is_refused(
    tmp_path: Path, text: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    assert main(["plan", *job(**{option: path})]) == 2
    assert len(capsys.readouterr().err.splitlines()) >= 2


@pytest.mark.parametrize(
    ("size", "found"), [(1, "10,943,708 or more"), (250_000, "11,2"), (10**8, None)], ids=["tiny", "small", "few"]
)
def test_so_many_units_that_planning_would_take_hours_are_refused(
    size: int, found: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["plan", *job(unit_size=size)])
    message = capsys.readouterr().err
    expected = f"unit_size: must make at most 10,000 units per rank, found {found}"
    assert (code == 2 and message.startswith(expected)) if found else code == 0


def test_a_reader_that_closes_the_pipe_causes_no_error_message() -> None:
    command = f"{shlex.join([sys.executable, '-m', 'perf_model', 'plan', *job(), '--json'])} | true"
    shell = ["bash", "-c", f"{command}; echo ${{PIPESTATUS[0]}}"]
    done = subprocess.run(shell, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_sweep_prints_a_table_and_writes_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sweep.csv"
    sizes = ["--world-sizes", "1,8,16", "--micro-batches", "1,2", "--unit-size", "500000000", "--csv", str(path)]
    assert main(["sweep", *SWEEP, *sizes]) == 0
    shown = capsys.readouterr().out
    rows = list(csv.DictReader(path.open()))
    assert [(row["world_size"], row["micro_batch"]) for row in rows] == [
        (world, batch) for world in ("1", "8", "16") for batch in ("1", "2")
    ]
    for row in rows:
        assert (row["iteration_s"] == "") == (row["why"] != "") == (row["world_size"] == "1")
    assert float(rows[2]["tokens_per_s"]) == pytest.approx(8 * 4096 / float(rows[2]["iteration_s"]))
    assert "1 GPUs, micro-batch 2: Nothing fits" in shown
    assert main(["sweep", *SWEEP, "--world-sizes", "1", "--micro-batches", "1", *sizes[4:6]]) == 1
    capsys.readouterr()
    assert main(["sweep", *SWEEP, *sizes[:-2], "--csv", str(tmp_path / "none" / "sweep.csv")]) == 2
    output = capsys.readouterr()
    assert output.out == shown, "the table is printed although the file cannot be written"
    assert output.err.startswith("--csv: must be a file that can be written")


def test_sweep_marks_the_best_row_and_shows_mfu_in_per_cent(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--world-sizes", "8", "--micro-batches", "2,1,4", "--unit-size", "1000000000"]
    assert main(["sweep", *SWEEP, *sizes]) == 0
    header, *rows = capsys.readouterr().out.splitlines()[:4]
    tokens = [float(row.split()[header.split().index("tokens/s") + 2].replace(",", "")) for row in rows]
    assert rows[tokens.index(max(tokens))].endswith("*")
    assert not rows[1].endswith("*"), "with fewer tokens/s than the row above"
    assert all(re.search(r" \d+% ", row) for row in rows)
    assert max(map(len, (header, *rows))) <= 60


def test_sweep_has_a_limit_of_points(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sweep_command, "read_inputs", lambda *_: pytest.fail("read"))
    many = ",".join(map(str, range(1, 101)))
    assert main(["sweep", *SWEEP, "--world-sizes", many, "--micro-batches", many]) == 2
    assert "must make at most 500 pairs, found 10,000" in capsys.readouterr().err


def test_sweep_refuses_an_impossible_pair_before_it_plans_and_reads_the_model_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read = []
    monkeypatch.setattr(model_option, "read_hf_config", lambda path: read.append(path) or read_hf_config(path))
    monkeypatch.setattr(inputs.Inputs, "forecast", lambda _: pytest.fail("planned"))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    model = ["--profile", "h100", "--model", str(path), "--ranks-per-node", "4", "--sequence", "2048"]
    assert main(["sweep", *model, "--world-sizes", "4,8,6", "--micro-batches", "1,2"]) == 2
    assert capsys.readouterr().err.startswith("ranks_per_node: must divide the world size, 6, found 4")
    assert read == [path]


def test_a_trace_or_a_picture_of_the_timeline_is_written_only_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trace, picture = tmp_path / "new" / "timeline.json", tmp_path / "timeline.png"
    arguments = job(model="7B", gpu_memory_gb=24.5, unit_size=10**8)
    assert main(["plan", *arguments]) == 0
    assert not list(tmp_path.iterdir())
    capsys.readouterr()
    assert main(["plan", *arguments, "--timeline", str(trace)]) == 0
    assert "Written: " in capsys.readouterr().out
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"backward", "forward", "exposed update"} <= names
    assert {"GPU_STEP", "SPECULATE", "COMMIT", "PUBLISH"} <= {name.split()[0] for name in names}
    assert main(["plan", *arguments, "--timeline", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    (tmp_path / "file").touch()
    assert main(["plan", *arguments, "--timeline", str(tmp_path / "file" / "below.json")]) == 2
    with pytest.raises(SystemExit, match="2"):
        main(["plan", *arguments, "--timeline", str(tmp_path)])


def test_the_picture_of_shared_layers_has_the_exposed_time_of_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = job(model="7B", gpu_memory_gb=20, share_layers="model.layers", every=16, unit_size=200_000_000)
    found = planned(arguments)
    assert main(["plan", *arguments, "--timeline", str(tmp_path / "timeline.json")]) == 0
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    exposed_s = sum(event["dur"] for event in events if event["name"] == "exposed update") / 1e6
    assert exposed_s == pytest.approx(found["predicted"]["exposed_update_s"])


def test_where_the_cpu_trains_no_gpu_is_mentioned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = tmp_path / "profile.json"
    rates = {name: RATES[name] for name in REQUIRED}
    machine.write_text(profile({**rates, "matmul_flops_per_s": 1e12}).to_json())
    assert main(["plan", *job(machine, "7B", host_memory_gb=400), "--units", "--explain"]) == 0
    shown = capsys.readouterr().out
    assert "no offload: the CPU is the only accelerator" in shown
    assert "memory per host: " in shown
    assert "memory per GPU" not in shown
    assert "lower bound of the update, all of it exposed: " in shown, "the CPU cannot train and update at once"
    (stock,) = (line for line in shown.splitlines() if line.startswith("stock offload"))
    assert stock.split()[-2:] == ["-", "1.0x"], "MFU and speed-up"
    answer = " ".join(" ".join(shown.splitlines()[:3]).split())
    assert "without offloading is not predicted: the CPU is the only accelerator" in answer
    assert "published runs" not in shown, "they were on GPUs"
    assert main(["plan", *job(machine, "7B", host_memory_gb=40)]) == 1
    assert "gpu memory" not in capsys.readouterr().err


@pytest.mark.parametrize("module", ["perf_model.__main__", "deep_opt_states.cli.main"])
def test_the_programs_start_without_torch_rich_matplotlib_or_numpy(module: str) -> None:
    """Check the imports: torch takes seconds, and the doctor has to start where the others cannot be imported."""
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert not {"torch", "deepspeed", "matplotlib", "rich", "numpy"} & set(done.stdout.split())


def commands_in_the_help(*program: str) -> list[str]:
    command = [sys.executable, "-m", *program, "--help"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return re.findall(r"^    (\w+) ", done.stdout, re.MULTILINE)


def test_both_programs_run_as_modules_and_list_their_commands() -> None:
    assert commands_in_the_help("perf_model") == [*PLANNING_COMMANDS]
    assert commands_in_the_help("deep_opt_states.cli") == [*PLANNING_COMMANDS, *COMMANDS_THAT_NEED_TORCH]


@pytest.mark.parametrize("run", [main, deep_opt_states_main])
def test_a_program_without_a_command_prints_its_help(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    assert capsys.readouterr().out.startswith("usage: ")


def test_one_gpu_one_sequence_and_2048_tokens_are_the_defaults() -> None:
    short = ["--profile", "h100", "--params", "1B", "--unit-size", "1000000000"]
    job_of = json.loads(printed_plan(*short))["inputs"]["job"]
    sizes = ("world_size", "ranks_per_node", "micro_batch", "sequence")
    assert [job_of[key] for key in sizes] == [1, 1, 1, 2048]
    job_of = json.loads(printed_plan(*short, "--world-size", "16"))["inputs"]["job"]
    assert [job_of[key] for key in sizes] == [16, 8, 1, 2048]


@pytest.mark.parametrize("command", COMMANDS_THAT_NEED_TORCH)
def test_a_command_that_needs_torch_is_refused_with_the_program_that_has_it(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([command, "--output", "profile.json"])
    assert f"found '{command}'. Run: deep-opt-states {command}\n" in capsys.readouterr().err


def without_program(text: str, program: str) -> str:
    """Remove the texts that differ: the name of the program, the line breaks after it, and the other commands."""
    assert f"usage: {program} " in text or "usage:" not in text
    text = re.sub(rf"^(usage: |For all options, run: )?{re.escape(program)}", r"\1PROGRAM", text, flags=re.MULTILINE)
    return re.sub(r"\(choose from .*\)", "", " ".join(text.split()))


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["plan", *job(unit_size=10**9)], 0),
        (["plan", *job(unit_size=10**9), "--json"], 0),
        (["plan", *job(gpu_memory_gb=10, unit_size=10**9)], 1),
        (["plan", *job(world_size=0)], 2),
        (["plan", *job(gpu_memory_gb=0)], 2),
        (["plan", *job(), "--unknown"], 2),
        (["sweep", *SWEEP, "--world-sizes", "8", "--micro-batches", "1", "--unit-size", "500000000"], 0),
        (["sweep", *SWEEP, "--world-sizes", "1", "--micro-batches", "1", "--unit-size", "500000000"], 1),
        (["sweep", *SWEEP, "--world-sizes", "0", "--micro-batches", "1"], 2),
        (["plan", *job(timeline="/proc/nowhere.json", unit_size=10**9)], 2),
        (["--version"], 0),
        *(([command, "--help"], 0) for command in PLANNING_COMMANDS),
        (["unknown"], 2),
    ],
)
def test_both_programs_do_the_same(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    results = []
    for program, run in (("python -m perf_model", main), ("deep-opt-states", deep_opt_states_main)):
        try:
            exit_code = run(arguments)
        except SystemExit as error:
            exit_code = error.code
        output = capsys.readouterr()
        results.append((exit_code, *(without_program(text, program) for text in (output.out, output.err))))
    assert results[0] == results[1]
    assert results[0][0] == code


def test_deep_opt_states_plan_prints_the_plan_of_the_twin_and_imports_no_torch() -> None:
    arguments = ["plan", *job(), "--json"]
    code = (
        "import sys\nfrom deep_opt_states.cli.main import main\n"
        f"code = main({arguments!r})\n"
        "print(*sys.modules, file=sys.stderr)\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert not {"torch", "deepspeed", "rich", "matplotlib"} & set(done.stderr.split())
    twin = subprocess.run(
        [sys.executable, "-m", "perf_model", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout == twin.stdout
