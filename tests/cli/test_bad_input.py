"""Refuse bad input: one short error with the rule, the value found and the remedy, and no traceback."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from perf_model.__main__ import main
from perf_model.prediction.hardware import ACCELERATOR_RATES
from perf_model.presets.machines import MACHINES
from tests.cli.planning import LLAMA, job
from tests.model.profiles import RATES, profile

FEW_UNITS = ["--unit-size", "1000000000"]
CLUSTER_SIZES = ["--gpus", "8", "--ranks-per-node", "4", "--global-batch", "16", "--sequence", "2048"]
ONE_LAYOUT = ["--tensor-parallel", "1", "--micro-batches", "1", *FEW_UNITS]
CLUSTER = ["cluster", *job()[:4], *CLUSTER_SIZES, *ONE_LAYOUT]


def run_command(arguments: list[str]) -> tuple[int, str]:
    error = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
        try:
            return main(arguments), error.getvalue()
        except SystemExit as exit_request:
            return int(exit_request.code or 0), error.getvalue()


def assert_refused(arguments: list[str], expected: str = "") -> None:
    """Check the exit code, and that the error is short and states a rule, the value found and a remedy."""
    code, error = run_command(arguments)
    assert code == 2, error
    assert expected in error
    assert len(error) < 4_000
    assert error.replace("\n", "").isprintable()
    assert 2 <= len(error.rstrip("\n").split("\n")) <= 3, "the rule with the value, and the remedy"
    assert any(word in error for word in ("found", "expected", "required", "unrecognized", "invalid", "not allowed"))
    assert not error.startswith("usage:")


FILES: dict[str, tuple[str, bytes]] = {
    # ``tests/test_config.py`` has more of them.
    "rules are a number": ("rules", b"3"),
    "pattern matches nothing": ("rules", b'[{"match": "lm_heads", "states": "cpu"}]'),
    "profile is empty": ("profile", b""),
    "config.json is a profile": ("model", MACHINES["h100-pcie5"].profile(4).to_json().encode()),
    "width is text": ("model", json.dumps({**LLAMA, "hidden_size": "4096"}).encode()),
}


@pytest.mark.parametrize(("option", "content"), FILES.values(), ids=FILES)
def test_a_file_that_cannot_be_used_gets_one_short_error(option: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_bytes(content)
    for arguments in (["plan", *job()], CLUSTER):
        assert_refused([*arguments, f"--{option}", str(path)])


def plan(**changes: Any) -> list[str]:
    return ["plan", *job(**changes)]


PARAMS = ["plan", *job()[:2], *job()[4:], "--params"]
MANY = ",".join(map(str, range(1, 101)))
SIZES = ["sweep", *job()[:4], "--ranks-per-node", "4", "--sequence", "2048"]
OPTIONS: dict[str, tuple[list[str], str]] = {
    "unknown command": (["plans"], ""),
    "no options": (["plan"], "the following arguments are required: --profile"),
    "a control character in a name": (plan(profile="\x1b[31m"), "A profile must be a readable file"),
    "zero": (plan(micro_batch=0), "micro_batch: must be an integer from 1 to 1,000,000, found 0"),
    "too many units": (plan(unit_size=1), "unit_size: must make at most 10,000 units per rank, found 10,943,708"),
    "ranks of a node": (plan(world_size=6), "ranks_per_node: must divide the world size, 6, found 4"),
    "more ranks than cores": (plan(world_size=2000, ranks_per_node=1000), "must be at most 96, the number of cores"),
    "no file": (plan(profile="none.json"), "A profile must be a readable file, found none.json"),
    "no such preset": (plan(profile="rtx409"), "\nOr plan for a preset: rtx4090"),
    "no config": (plan(model="none.json"), "A model must be a preset or a readable config.json, found none.json"),
    "no rules": (plan(rules="none.json"), "--rules: must be a readable file with a JSON list, found none.json: "),
    "a unit of parameters": ([*PARAMS, "32GB"], "32GB"),
    "model and parameters": ([*plan(), "--params", "32e9"], "not allowed with"),
    "few parameters": ([*PARAMS, "7"], "found 7"),
    "too many layers": ([*PARAMS, "1e9", "--layers", "90", "--hidden", "9000"], "found"),
    "every without shared layers": (plan(every=2), "--every: must come with --share-layers, found 2 alone.\nGive both"),
    "layers that do not exist": (plan(share_layers="blocks"), "The model has model.layers."),
    "share": (plan(trainable_share="nan"), "trainable_share: must be"),
    "memory": (plan(gpu_memory_gb="1e-10"), "must be a number of GB (10^9 bytes) from 1e-09 to 1e+09, found '1e-10'"),
    "margin": (plan(gpu_memory_margin_gb=-1), "must be a number of GB (10^9 bytes) from 0 to 1e+09, found '-1'"),
    "cores": (plan(cores=0), "--cores: must be a whole number from 1 to 100000"),
    "link": (plan(link_gb_per_s=0.2), "--link-gb-per-s: must be a number from 0.3 to 2000"),
    "disks": (plan(nvme="6,5,4,3"), "rates"),
    "output": (plan(timeline="/dev/null/trace.json", unit_size=10**9), "/dev/null/trace.json"),
    "picture": (plan(timeline="trace.txt"), "must end with .json"),
    "many pairs": ([*SIZES, "--world-sizes", MANY, "--micro-batches", MANY], "at most 500 pairs, found 10,000"),
    "pairs": ([*SIZES, "--world-sizes", "1,,2", "--micro-batches", "1"], "1,,2"),
    "layouts": ([*CLUSTER, "--tensor-parallel", "3"], "tensor_parallel: must divide the number of ranks of a node, 4"),
    "micro-batches": ([*CLUSTER, "--micro-batches", "auto,1"], "auto"),
    "network": ([*CLUSTER, "--node-gb-per-s", "nan"], "--node-gb-per-s: must be a number from 0.001 to 10000"),
    "GPUs": ([*CLUSTER, "--gpus", "0"], "Correct --world-size, or --nodes (--gpus of a cluster)."),
    "no batch": ([*CLUSTER, "--global-batch", "0"], "global_batch: must be an integer from 1 to "),
    "a large micro-batch": ([*CLUSTER, "--micro-batches", "3"], "times the micro-batch, here of 24, found 16"),
    "batch": ([*CLUSTER, "--global-batch", "50"], "Give --global-batch 48 or 56, or another number of --gpus."),
}


@pytest.mark.parametrize(("arguments", "expected"), OPTIONS.values(), ids=OPTIONS)
def test_impossible_options_get_one_short_error(arguments: list[str], expected: str) -> None:
    assert_refused(arguments, expected)


@pytest.mark.parametrize(
    ("rates", "options", "expected"),
    [
        ({}, ["--link-gb-per-s", "9"], "--link-gb-per-s: changes a preset, found the profile "),
        *(
            (dict.fromkeys(ACCELERATOR_RATES), option, f"{option[0]}: needs a profile of a machine with a GPU, found")
            for option in (["--offload-param"], ["--gpu-memory-margin-gb", "0"], ["--eager-memory-gb", "1"])
        ),
        ({"gpu_adam_params_per_s": None}, ["--rules"], '--rules: "streamed" needs a rate of Adam on the GPU, found no'),
    ],
)
def test_options_that_do_not_suit_a_measured_profile_are_refused(
    rates: dict[str, float | None], options: list[str], expected: str, tmp_path: Path
) -> None:
    machine, rules = tmp_path / "profile.json", tmp_path / "rules.json"
    flops = 1e12 if len(rates) > 1 else 1e14
    machine.write_text(profile({**RATES, "matmul_flops_per_s": flops, **rates}).to_json())
    rules.write_text('[{"match": "*", "states": "streamed"}]')
    arguments = [*plan(profile=machine, unit_size=10**9), *options, *([str(rules)] if "--rules" in options else [])]
    assert_refused(arguments, expected)
