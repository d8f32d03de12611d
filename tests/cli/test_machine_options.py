"""Test the options and the TOML file that describe a machine, and the options of a training run that plan it."""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from perf_model.__main__ import main
from perf_model.cli.machine_options import FIGURES, read_machine
from perf_model.presets.machines import ALIASES, MACHINES, MachinePreset
from perf_model.presets.models import MODELS
from tests.model.profiles import RATES, profile

JOB = ["--model", "7B", "--micro-batch", "1", "--sequence", "2048", "--unit-size", "100000000"]


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *JOB, *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *JOB, *arguments]) == 2
    message = capsys.readouterr().err
    assert "found" in message
    assert len(message.splitlines()) == 2, "rule and value found, then the remedy"
    return message


@pytest.mark.parametrize("command", ["", "plan", "sweep", "cluster"])
def test_each_planning_command_lists_the_presets(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command.split(), "--list"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for name, preset in MACHINES.items():
        assert f"{name}: {preset.source}" in shown
        assert any(line.startswith(f"{name} ") and preset.gpu in line for line in shown.splitlines())
    assert all(f"{alias} is {name}" in shown for alias, name in ALIASES.items())


def test_the_options_and_their_defaults_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for option in (
        "--accumulation",
        "--offload-param",
        "--trainable-share",
        "--network-gb-per-s",
    ):
        described = shown[shown.rindex(f" {option}") :]
        assert "default: " in described[:260], option


def test_options_replace_the_figures_of_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = ["--profile", "rtx4090", "--gpus-per-node", "2", "--nodes", "2"]
    slower = planned(capsys, *ranks, "--cores", "8", "--host-bandwidth-gb-per-s", "40", "--link-gb-per-s", "20")
    preset = planned(capsys, "--profile", "rtx4090", "--ranks-per-node", "2", "--world-size", "4")
    assert slower["predicted"]["update_s"] > preset["predicted"]["update_s"], "its host is slower"
    assert "given by the user: cores 8, host_bandwidth_gb_per_s 40, link_gb_per_s 20" in str(slower["inputs"])


@pytest.mark.parametrize(
    ("name", "near"), [("rtx409", "rtx4090"), ("H100-PCIE", "h100-pcie5"), ("a100-80g", "a100-80gb")]
)
def test_an_unknown_preset_is_answered_with_the_nearest_names(
    name: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *JOB, "--profile", name, "--ranks-per-node", "1", "--nodes", "1"]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"A profile must be a readable file, found {name}: No such file")
    assert f"\nOr plan for a preset: {near}" in message
    assert "--cores, --host-bandwidth-gb-per-s, --link-gb-per-s" in message


def test_a_slower_link_slows_pageable_copies_and_collectives_over_it() -> None:
    for name, has_peer_link in (("rtx4090", False), ("h100-pcie5", True)):
        preset = MACHINES[name]
        figures = {**dict.fromkeys(FIGURES), "link_gb_per_s": 3.0}
        options = {"profile": name, **figures}
        changed = read_machine(argparse.Namespace(**options))
        assert isinstance(changed, MachinePreset)
        assert changed.profile(1).rate("h2d_bytes_per_s") == pytest.approx(3e9)
        assert changed.profile(1).rate("pageable_h2d_bytes_per_s") == 3e9 < preset.pageable_bytes_per_s
        peers = preset.peer_bytes_per_s if has_peer_link else 1.5e9
        assert changed.profile(2).rate("all_gather_bytes_per_s") == pytest.approx(peers)


@pytest.mark.parametrize("name", MACHINES)
def test_each_preset_has_a_valid_profile_with_figures_at_their_bounds(name: str) -> None:
    for bounds in product(*((figure.low, figure.high) for figure in FIGURES.values())):
        figures = dict(zip(FIGURES, bounds, strict=True))
        options = {"profile": name, **figures}
        changed = read_machine(argparse.Namespace(**options))
        assert isinstance(changed, MachinePreset)
        ranks = 1 if min(figures["cores"], figures["host_bandwidth_gb_per_s"]) == 1 else 1000
        assert changed.profile(ranks).rate("dram_update_bytes_per_s") >= 1e9


def test_the_network_limits_forward_across_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = ("--profile", "h100", "--ranks-per-node", "8", "--nodes", "2")
    fast, slow = (planned(capsys, *nodes, "--network-gb-per-s", rate)["predicted"] for rate in ("50", "1"))
    assert slow["forward_s"] > 2 * fast["forward_s"]
    assert slow["forward_s"] == pytest.approx(2 * 5.92e9 * 15 / 16 / 8e9, rel=1e-3)


def test_accumulation_offloaded_and_frozen_parameters_are_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    machine = ("--profile", "h100", "--ranks-per-node", "4", "--nodes", "1")
    once = planned(capsys, *machine)
    often = planned(capsys, *machine, "--accumulation", "8")
    assert often["predicted"]["forward_s"] == pytest.approx(8 * once["predicted"]["forward_s"])
    assert often["baselines"]["stock"]["update_s"] == once["baselines"]["stock"]["update_s"]
    assert often["deepspeed_config"]["gradient_accumulation_steps"] == 8
    assert "gradient_accumulation_steps" not in once["deepspeed_config"]
    offloaded = planned(capsys, *machine, "--offload-param")
    assert offloaded["deepspeed_config"]["zero_optimization"]["offload_param"] == {"device": "cpu"}
    frozen = planned(capsys, *machine, "--trainable-share", "0.01")
    assert frozen["baselines"]["stock"]["update_s"] < 0.02 * once["baselines"]["stock"]["update_s"]
    of_optimizer, of_trained = (found["memory"]["pinned_bytes"] for found in (once, frozen))
    assert of_trained < 0.05 * of_optimizer


def test_offloaded_parameters_take_host_memory_if_they_are_frozen_and_with_stock(
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine = ("--profile", "h100", "--ranks-per-node", "4", "--nodes", "1")
    share = ("--trainable-share", "0.01")
    frozen, offloaded = planned(capsys, *machine, *share), planned(capsys, *machine, *share, "--offload-param")
    added_bytes = offloaded["memory"]["host_bytes"] - frozen["memory"]["host_bytes"]
    numel = MODELS["7B"].numel
    assert added_bytes == pytest.approx(2 * 0.99 * numel, rel=0.01)
    # Stock keeps the parameters beside its 18 bytes of states and gradients; the plugin needs 16 in all.
    limit_gb = str((offloaded["memory"]["reserved_host_bytes"] + 19 * numel) / 1e9)
    limited = planned(capsys, *machine, "--offload-param", "--host-memory-gb", limit_gb)
    assert "does not fit" in limited["baselines"]["stock"]["why"]
    assert "why" not in limited["baselines"]["all_cpu"]
    stock = planned(capsys, *machine, "--host-memory-gb", limit_gb)["baselines"]["stock"]
    assert "why" not in stock


def test_tensor_parallel_ranks_train_the_same_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    machine = ("--profile", "h100", "--ranks-per-node", "4", "--nodes", "1")
    alone = planned(capsys, *machine)["predicted"]
    divided = planned(capsys, *machine, "--tensor-parallel", "2")
    assert divided["deepspeed_config"]["tensor_parallel"] == {"autotp_size": 2}
    tokens, tokens_of_two = (found["tokens_per_s"] * found["iteration_s"] for found in (alone, divided["predicted"]))
    assert tokens_of_two == pytest.approx(tokens / 2)
    assert "tensor_parallel: must divide" in refused(capsys, *machine, "--tensor-parallel", "3")


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ([], "the following arguments are required: --profile"),
        (
            ["--profile", "h100", "--ranks-per-node", "4", "--nodes", "1", "--world-size", "4"],
            "argument --world-size: not allowed with argument --nodes",
        ),
        (["--profile", "h100", "--cores", "many"], "argument --cores: invalid int value: 'many'"),
    ],
)
def test_missing_and_contradicting_options_are_refused(
    arguments: list[str], rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", *JOB, *arguments])
    assert caught.value.code == 2
    assert rule in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["--profile", "h100", "--cores", "0"], "--cores: must be a number from 1 to 100000"),
        (["--profile", "h100", "--link-gb-per-s", "nan"], "--link-gb-per-s: must be a number from 0.3 to 2000"),
        (["--profile", "h100", "--link-gb-per-s", "0.2"], "--link-gb-per-s: must be a number from 0.3 to 2000"),
        (
            ["--profile", "h100", "--host-bandwidth-gb-per-s", "6000"],
            "--host-bandwidth-gb-per-s: must be a number from 1 to 2500",
        ),
        (
            ["--profile", "h100", "--host-bandwidth-gb-per-s", "3", "--ranks-per-node", "4"],
            "dram_update_bytes_per_s: must be from 1e+09",
        ),
        (["--profile", "h100", "--nodes", "0"], "world_size: must be an integer from 1"),
        *(
            (["--profile", "h100", "--trainable-share", share], "trainable_share: must be")
            for share in ("0", "1.5", "nan")
        ),
        (
            ["--profile", "h100", "--accumulation", "0"],
            "accumulation: must be",
        ),
    ],
)
def test_impossible_options_are_refused(arguments: list[str], rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = ["--ranks-per-node", "1", "--nodes", "1"]
    assert rule in refused(capsys, *ranks, *arguments)


def test_a_measured_profile_keeps_its_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "profile.json"
    file.write_text(profile({**RATES, "matmul_flops_per_s": 1e14}).to_json())
    message = refused(capsys, "--profile", str(file), "--ranks-per-node", "1", "--nodes", "1", "--link-gb-per-s", "9")
    assert message.startswith("--link-gb-per-s: changes a preset, found the profile ")
