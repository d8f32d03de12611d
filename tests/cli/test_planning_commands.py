"""Test ``plan``: its figures, texts and pictures, and the options that it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from perf_model.__main__ import main
from perf_model.prediction.cost import Resource
from perf_model.prediction.hardware import REQUIRED
from perf_model.presets.machines import MACHINES
from perf_model.presets.models import MODELS
from tests.cli.planning import LLAMA, job, planned, printed_plan
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


def test_one_gpu_one_sequence_and_2048_tokens_are_the_defaults() -> None:
    short = ["--profile", "h100", "--params", "1B", "--unit-size", "1000000000"]
    job_of = json.loads(printed_plan(*short))["inputs"]["job"]
    sizes = ("world_size", "ranks_per_node", "micro_batch", "sequence")
    assert [job_of[key] for key in sizes] == [1, 1, 1, 2048]
    job_of = json.loads(printed_plan(*short, "--world-size", "16"))["inputs"]["job"]
    assert [job_of[key] for key in sizes] == [16, 8, 1, 2048]
