"""Refuse bad input: one short error with the rule, the value found and the remedy, no traceback and no hang."""

from __future__ import annotations

import contextlib
import copy
import csv
import io
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perf_model.__main__ import main
from perf_model.cli.machine_options import MAX_TOML_BYTES
from perf_model.json_input import MAX_FILE_BYTES, parse_json, printable, read_text, shorten
from perf_model.presets.machines import MACHINES
from perf_model.training_run import meta_model
from tests.cli.test_planning_commands import LLAMA, job
from tests.launch import REPOSITORY

HOSTILE_NAME = "\x1b[2J\x1b]0;owned\x07\u202ename\r\x9b31m"
MAX_ERROR = 4_000

FEW_UNITS = ["--unit-size", "1000000000"]
SWEEP = ["--ranks-per-node", "4", "--sequence", "2048", "--world-sizes", "4", "--micro-batches", "1"]

MACHINE_JOB = job()[2:]

CLUSTER_SIZES = ["--gpus", "8", "--ranks-per-node", "4", "--global-batch", "16", "--sequence", "2048"]
ONE_LAYOUT = ["--tensor-parallel", "1", "--micro-batches", "1", *FEW_UNITS]
CLUSTER = ["cluster", *job()[:4], *CLUSTER_SIZES, *ONE_LAYOUT]


def cluster(option: str, value: object) -> list[str]:
    """Return a command with a bad value; of several, argparse takes the last."""
    return [*CLUSTER, option, str(value)]


RUN = {
    "machine": "a",
    "sweep": "b",
    "model_name": "c",
    "real_params": "1000000000",
    "tp": "1",
    "dp": "4",
    "hidden": "1024",
    "cpu_ratio": "1",
    "sub_group_size": "100000000",
    "interleaved": "1",
    "update_stride": "2",
    "update_s": "1.5",
}


@dataclass(frozen=True)
class Screen:
    """The output of a command: its exit code, stdout and stderr."""

    code: int
    out: str
    error: str


def run_command(arguments: list[str]) -> Screen:
    """Run a planning command in this process. An exception that is not an exit fails the test."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            code = main(arguments)
        except SystemExit as exit_request:
            code = int(exit_request.code or 0)
    return Screen(code, out.getvalue(), error.getvalue())


def is_clean(text: str) -> bool:
    """Return whether a terminal prints every character of ``text`` as it is."""
    return all(letter.isprintable() or letter == "\n" for letter in text)


def assert_refused(screen: Screen, expected: str = "") -> None:
    """Check the exit code, and that the error is short, printable, and has a rule, the value found and a remedy."""
    assert screen.code == 2, screen
    assert is_clean(screen.error)
    assert expected in screen.error
    assert "Traceback" not in screen.error
    assert len(screen.error) < MAX_ERROR
    lines = screen.error.rstrip("\n").split("\n")
    assert 2 <= len(lines) <= 3, "the rule with the value, and the remedy"
    assert any(
        word in screen.error for word in ("found", "expected", "required", "unrecognized", "invalid", "not allowed")
    )
    assert not any(line.startswith("usage:") for line in lines)


def profile_json(**changes: Any) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(MACHINES["h100-pcie5"].profile(4).to_json())
    return {**value, **changes}


def csv_of(*rows: dict[str, str]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, RUN)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def dumped(value: object) -> bytes:
    return json.dumps(value).encode()


def without(values: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != key}


BINARY = bytes(range(256))
DEEP = b"[" * 200_000
WIDE = b'{"a":' * 900 + b"1" + b"}" * 900

FILES: dict[str, bytes] = {
    "empty": b"",
    "space": b" \n",
    "binary": BINARY,
    "zeros": b"\0" * 1000,
    "UTF-16": '{"model_type": "llama"}'.encode("utf-16"),
    "Latin-1": b'{"name": "\xe9"}',
    "half a string": b'{"name": "',
    "null": b"null",
    "number": b"3",
    "list": b"[1]",
    "string": b'"plan"',
    "nested": DEEP,
    "nested objects": WIDE,
    "two values": b"{} {}",
    "NaN": b"NaN",
    "integer of 5,000 digits": b"[" + b"9" * 5000 + b"]",
    "key twice": b'{"version": 2, "version": 2}',
    "key twice inside": b'{"provenance": {"gpu": "a", "gpu": "b"}}',
    "escapes in a key": json.dumps({HOSTILE_NAME: 1, "model_type": HOSTILE_NAME}).encode(),
    "10 MB and a byte": b" " * (MAX_FILE_BYTES + 1),
}
"""Files that are neither a profile, nor a config, nor rules."""

PROFILES: dict[str, dict[str, Any]] = {
    "other version": profile_json(version=1),
    "version is a float": profile_json(version=2.0),
    "huge memory": profile_json(gpu_memory_bytes=10**400),
    "negative memory": profile_json(host_memory_bytes=-1),
    "Infinity": profile_json(gpu_peak_flops=float("inf")),
    "long text": profile_json(name="x" * 1_000_000),
    "lone surrogate": profile_json(name="\ud800"),
    "unknown key": profile_json(**{HOSTILE_NAME * 1000: 1}),
    "no measurements": profile_json(measurements={}),
    "samples are text": profile_json(measurements={"h2d_bytes_per_s": {"samples": ["1"], "waived": None}}),
    "escapes in a quantity": profile_json(measurements={HOSTILE_NAME: {"samples": [1.0], "waived": None}}),
    "line break in a quantity": profile_json(measurements={"a\nb\nc\nd": {"samples": 3}}),
    "threads": profile_json(cpu_adam_by_threads={"0": {"samples": [1e9]}}),
    "provenance": profile_json(provenance={"source": "measured", HOSTILE_NAME: ""}),
    "ranks": profile_json(provenance={"source": "measured", "ranks": 10**30}),
}

MODELS: dict[str, dict[str, Any]] = {
    "no family": without(LLAMA, "model_type"),
    "family is a list": {**LLAMA, "model_type": [1] * 10_000},
    "no width": without(LLAMA, "hidden_size"),
    "huge width": {**LLAMA, "hidden_size": 10**400},
    "negative layers": {**LLAMA, "num_hidden_layers": -1},
    "many layers": {**LLAMA, "num_hidden_layers": 10**9},
    "width is true": {**LLAMA, "hidden_size": True},
    "width is text": {**LLAMA, "hidden_size": "4096" * 2000},
    "heads do not divide": {**LLAMA, "num_attention_heads": 7, "num_key_value_heads": 7},
    "key-value heads do not divide": {**LLAMA, "num_key_value_heads": 5},
    "flag is a number": {**LLAMA, "attention_bias": 1},
    "too many parameters": {**LLAMA, "hidden_size": 10**6, "intermediate_size": 10**8},
    "more experts per token than experts": {
        **LLAMA,
        "model_type": "mixtral",
        "num_local_experts": 2,
        "num_experts_per_tok": 3,
    },
    "no experts": {**LLAMA, "model_type": "qwen3_moe"},
    "layers without experts are text": {
        **LLAMA,
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "mlp_only_layers": "0",
    },
    "rank is text": {
        **LLAMA,
        "model_type": "deepseek_v3",
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "n_shared_experts": 1,
        "q_lora_rank": "8",
    },
}

RULES: dict[str, Any] = {
    "no rule": [],
    "not an object": [1],
    "unknown key": [{"match": "*", "states": "cpu", HOSTILE_NAME: 1}],
    "no states": [{"match": "*"}],
    "other states": [{"match": "*", "states": HOSTILE_NAME * 1000}],
    "states is a list": [{"match": "*", "states": ["cpu"]}],
    "pattern is a number": [{"match": 3, "states": "cpu"}],
    "pattern is empty": [{"match": "", "states": "cpu"}],
    "pattern is long": [{"match": "*a" * 100_000, "states": "cpu"}],
    "pattern matches nothing": [{"match": HOSTILE_NAME, "states": "cpu"}],
    "rule has no effect": [{"match": "*", "states": "cpu"}, {"match": "lm_head.*", "states": "cpu"}],
    "many rules": [{"match": "*", "states": "cpu"}] * 100_000,
    "many patterns": [{"match": ["x*"] * 100_000, "states": "cpu"}],
    "an object": {"match": "*", "states": "cpu"},
}

RUNS: dict[str, bytes] = {
    "empty": b"",
    "binary": BINARY,
    "zeros": b"\0" * 1000,
    "only names": csv_of().encode(),
    "no column": b"machine,sweep\na,b\n",
    "column twice": csv_of(RUN).replace("sweep", "machine").encode(),
    "field is missing": csv_of(RUN).encode() + b"a,b\n",
    "open quote": csv_of(RUN).encode() + b'"',
    "field of 200,000 characters": csv_of({**RUN, "machine": "x" * 200_000}).encode(),
    "name of 5,000 characters": csv_of({**RUN, "machine": "x" * 5_000}).encode(),
    "number of 5,000 digits": csv_of({**RUN, "tp": "9" * 5_000}).encode(),
    "escapes in a number": csv_of({**RUN, "tp": HOSTILE_NAME}).encode(),
    "nan": csv_of({**RUN, "update_s": "nan"}).encode(),
    "blank": csv_of({**RUN, "update_s": ""}).encode(),
    "blank name": csv_of({**RUN, "machine": " "}).encode(),
    "many sub-groups": csv_of({**RUN, "sub_group_size": "1"}).encode(),
    "stride 0": csv_of({**RUN, "update_stride": "0"}).encode(),
    "many runs": csv_of(*[RUN] * 10_001).encode(),
    "10 MB and a byte": b" " * (MAX_FILE_BYTES + 1),
}

MACHINE_FILES: dict[str, bytes] = {
    "empty": b"",
    "binary": BINARY,
    "zeros": b"\0" * 1000,
    "UTF-16": 'preset = "h100"'.encode("utf-16"),
    "nested": b"a = " + b"[" * 5_000,
    "nested objects": b"x = " + b"{a=" * 2_000,
    "key of many parts": b"a." * 4_000 + b"a = 1",
    "key of a million parts": b"a." * 1_000_000 + b"a = 1",
    "key twice": b'preset = "h100"\ncores = 8\ncores = 9',
    "table twice": b"[a]\n[a]",
    "integer of 400 digits": b'preset = "h100"\ncores = 1' + b"0" * 400,
    "integer of 5,000 digits": b'preset = "h100"\ncores = ' + b"9" * 5_000,
    "nan": b'preset = "h100"\nlink_gb_per_s = nan',
    "infinity": b'preset = "h100"\nlink_gb_per_s = inf',
    "date": b'preset = "h100"\ncores = 2026-01-01',
    "escapes": f'preset = "h100"\n{json.dumps(HOSTILE_NAME)} = 1'.encode(),
    "preset is a table": b"[preset]\na = 1",
    "10 kB and a byte": b" " * (MAX_TOML_BYTES + 1),
}
"""Files that describe no machine, for ``--machine``."""

OPTIONS: dict[str, list[str]] = {
    "no command": [],
    "unknown command": [HOSTILE_NAME],
    "long command": ["x" * 100_000],
    "no options": ["plan"],
    "unknown option": ["plan", *job(), f"--{HOSTILE_NAME}"],
    "long option": ["plan", *job(), "--" + "x" * 5_000],
    "world size of 5,000 digits": ["plan", *job(world_size="9" * 5_000)],
    "world size is text": ["plan", *job(world_size=HOSTILE_NAME)],
    "world size is huge": ["plan", *job(world_size=10**20)],
    "micro-batch 0": ["explain", *job(micro_batch=0)],
    "sequence is negative": ["simulate", *job(sequence=-1)],
    "memory is nan": ["plan", *job(gpu_memory_gb="nan")],
    "memory of 5,000 digits": ["plan", *job(gpu_memory_gb="9" * 5_000)],
    "margin is text": ["plan", *job(gpu_memory_margin_gb=HOSTILE_NAME)],
    "overlap": ["plan", *job(overlap=HOSTILE_NAME)],
    "unit size 0": ["plan", *job(unit_size=0)],
    "sub-group size of 25 digits": ["plan", *job(sub_group_size=10**24)],
    "profile is a long name": ["plan", *job(profile="x" * 5_000)],
    "profile has escapes": ["plan", *job(profile=HOSTILE_NAME)],
    "profile has a line break": ["plan", *job(profile="a\nb\nc\nd")],
    "profile has a null character": ["plan", *job(profile="\0")],
    "model is a long name": ["plan", *job(model="x" * 5_000)],
    "model has escapes": ["plan", *job(model=HOSTILE_NAME)],
    "model is empty": ["plan", *job(model="")],
    "model and parameters": ["plan", *job(), "--params", "32e9"],
    "layers without parameters": ["plan", *job(), "--layers", "3"],
    "parameters are text": ["plan", *job()[:2], "--params", HOSTILE_NAME, *job()[4:]],
    "parameters are 1e999999999": ["plan", *job()[:2], "--params", "1e999999999", *job()[4:]],
    "parameters are a fraction": ["plan", *job()[:2], "--params", "1e8.5", *job()[4:]],
    "few parameters": ["plan", *job()[:2], "--params", "7", *job()[4:]],
    "parameters for these layers": [
        "plan",
        *job()[:2],
        "--params",
        "1e9",
        "--layers",
        "90",
        "--hidden",
        "9000",
        *job()[4:],
    ],
    "rules are missing": ["plan", *job(rules=HOSTILE_NAME)],
    "rules have a null character": ["plan", *job(rules="\0")],
    "world sizes": ["sweep", *job()[:4], *SWEEP[:4], "--world-sizes", "1,,2", "--micro-batches", "1"],
    "world sizes of 5,000 digits": [
        "sweep",
        *job()[:4],
        *SWEEP[:4],
        "--world-sizes",
        "9" * 5_000,
        "--micro-batches",
        "1",
    ],
    "csv has a null character": ["sweep", *job()[:4], *SWEEP, *FEW_UNITS, "--csv", "\0"],
    "csv in no folder": ["sweep", *job()[:4], *SWEEP, *FEW_UNITS, "--csv", f"none/{HOSTILE_NAME}"],
    "output has a null character": ["simulate", *job(output="\0", unit_size=10**9)],
    "output below a device": ["simulate", *job(output=f"/dev/null/{HOSTILE_NAME}", unit_size=10**9)],
    "runs are missing": ["validate", "--runs", HOSTILE_NAME],
    "runs have a null character": ["validate", "--runs", "\0"],
    "runs are a folder": ["validate", "--runs", str(REPOSITORY)],
    "cluster without options": ["cluster"],
    "cluster without sizes": CLUSTER[:5],
    "cluster and accumulation": cluster("--accumulation", 2),
    "no GPUs": cluster("--gpus", 0),
    "GPUs are text": cluster("--gpus", HOSTILE_NAME),
    "GPUs of 5,000 digits": cluster("--gpus", "9" * 5_000),
    "GPUs that no node divides": cluster("--gpus", 9),
    "global batch 0": cluster("--global-batch", 0),
    "global batch is huge": cluster("--global-batch", 10**20),
    "global batch that nothing divides": cluster("--global-batch", 17),
    "tokens are nan": cluster("--tokens", "nan"),
    "tokens are 1e999": cluster("--tokens", "1e999"),
    "tokens are negative": cluster("--tokens", -1),
    "tokens have escapes": cluster("--tokens", HOSTILE_NAME),
    "tensor-parallel sizes": cluster("--tensor-parallel", "1,,2"),
    "tensor-parallel size 0": cluster("--tensor-parallel", 0),
    "tensor-parallel size 3": cluster("--tensor-parallel", 3),
    "tensor-parallel size of 5,000 digits": cluster("--tensor-parallel", "9" * 5_000),
    "micro-batches": cluster("--micro-batches", "auto,1"),
    "micro-batches are huge": cluster("--micro-batches", 10**20),
    "network is nan": cluster("--network-gb-per-s", "nan"),
    "network is negative": cluster("--network-gb-per-s", -1),
    "network inside a node has escapes": cluster("--node-gb-per-s", HOSTILE_NAME),
    "network inside a node is infinite": cluster("--node-gb-per-s", "inf"),
    "cluster and a sequence of 0": cluster("--sequence", 0),
    "cluster with the profile of a folder": cluster("--profile", REPOSITORY),
    "profile is a folder": ["plan", *job(profile=REPOSITORY)],
    "model is a folder": ["explain", *job(model=REPOSITORY)],
    "rules are a folder": ["plan", *job(rules=REPOSITORY)],
}


@dataclass(frozen=True)
class BadInput:
    """A command with a bad file or option. ``option`` is the option that gets the file with ``content``."""

    name: str
    arguments: list[str]
    option: str | None = None
    content: bytes = b""


def cases() -> Iterator[BadInput]:
    commands = ("plan", "explain", "simulate")
    for number, (name, content) in enumerate(FILES.items()):
        for option in ("profile", "model", "rules"):
            yield BadInput(f"{option}, {name}", [commands[number % 3], *job()], option, content)
            yield BadInput(f"cluster: {option}, {name}", CLUSTER, option, content)
    for number, (name, value) in enumerate(PROFILES.items()):
        yield BadInput(f"profile, {name}", [commands[number % 3], *job()], "profile", dumped(value))
    for number, (name, value) in enumerate(MODELS.items()):
        yield BadInput(f"model, {name}", [commands[number % 3], *job()], "model", dumped(value))
    for name, value in RULES.items():
        yield BadInput(f"rules, {name}", ["plan", *job()], "rules", dumped(value))
    for name, content in RUNS.items():
        yield BadInput(f"runs, {name}", ["validate", "--runs", "none.csv"], "runs", content)
    for name, content in MACHINE_FILES.items():
        yield BadInput(f"machine, {name}", ["plan", *MACHINE_JOB], "machine", content)
        yield BadInput(f"cluster: machine, {name}", [CLUSTER[0], *CLUSTER[3:]], "machine", content)
    for name, arguments in OPTIONS.items():
        yield BadInput(f"option, {name}", arguments)


CASES = list(cases())


@pytest.fixture(autouse=True)
def _no_child_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no config start transformers: it takes seconds, and has its own tests."""
    monkeypatch.setattr(meta_model, "_run", lambda config: {"error": f"no {HOSTILE_NAME}"})


def with_file(arguments: list[str], option: str, path: Path) -> list[str]:
    """Return ``arguments`` with ``path`` as the value of ``option``; of several, argparse takes the last."""
    return [*arguments, f"--{option}", str(path)]


def test_there_are_a_hundred_cases() -> None:
    assert len(CASES) >= 100
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_bad_input_gets_one_short_error(case: BadInput, tmp_path: Path) -> None:
    arguments = case.arguments
    if case.option is not None:
        path = tmp_path / "input"
        path.write_bytes(case.content)
        arguments = with_file(arguments, case.option, path)
    assert_refused(run_command(arguments))


def test_an_error_says_that_a_key_occurs_twice(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA)[:-1] + ', "hidden_size": 8192}')
    assert_refused(run_command(["plan", *job(model=path)]), "the key 'hidden_size' occurs twice in one object")


def test_an_error_says_that_a_key_of_a_machine_occurs_twice(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_bytes(MACHINE_FILES["key twice"])
    assert_refused(run_command(["plan", *MACHINE_JOB, "--machine", str(path)]), "the key 'cores' occurs twice")


def test_a_file_of_the_largest_size_is_read_and_a_larger_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    text = json.dumps(LLAMA)
    path.write_text(text.ljust(MAX_FILE_BYTES))
    assert run_command(["plan", *job(model=path), *FEW_UNITS]).code == 0
    path.write_text(text.ljust(MAX_FILE_BYTES + 1))
    assert_refused(run_command(["plan", *job(model=path)]), "it has more than 10 MB")


# Names that are printed although the input is good


def assert_printable(screen: Screen, expected: str) -> None:
    assert screen.code == 0, screen.error
    assert is_clean(screen.out)
    assert expected in screen.out


def test_names_of_a_profile_and_a_model_are_printed_with_escapes(tmp_path: Path) -> None:
    provenance = {"source": "measured", "gpu": HOSTILE_NAME, "host": HOSTILE_NAME, "date": HOSTILE_NAME}
    machine = tmp_path / "profile.json"
    machine.write_text(json.dumps(profile_json(provenance=provenance, name=HOSTILE_NAME)))
    folder = tmp_path / HOSTILE_NAME
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    arguments = job(machine, folder / "config.json", unit_size=10**9)
    assert_printable(run_command(["plan", *arguments]), r"\x1b[2J\x1b]0;owned\x07\u202ename\r\x9b31m")
    assert_printable(run_command(["plan", *arguments, "--json"]), "deepspeed_config")
    assert_printable(run_command(["explain", *arguments]), "Busy time")
    output = tmp_path / f"{HOSTILE_NAME} output"
    assert_printable(run_command(["simulate", *arguments, "--output", str(output)]), r"owned\x07")
    assert (output / "timeline.json").is_file()


def test_names_in_a_file_of_runs_are_printed_with_escapes(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    names = dict.fromkeys(("machine", "sweep", "model_name"), HOSTILE_NAME)
    rows = [{**RUN, **names, "update_stride": str(stride), "update_s": str(1 / stride)} for stride in (2, 3, 4, 5)]
    path.write_text(csv_of(*rows), newline="")
    assert_printable(run_command(["validate", "--runs", str(path)]), r"\x1b[2J")
    assert_printable(run_command(["validate", "--runs", str(path), "--json"]), "{")


# Files that are not regular: opening or reading them could take for ever


def run_in_child(arguments: list[str], **options: Any) -> Screen:
    """Run the program in a process of its own, with little memory, and end it if it hangs."""
    limit = 2 * 2**30
    done = subprocess.run(
        [sys.executable, "-m", "perf_model", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        **options,
    )
    return Screen(done.returncode, done.stdout, done.stderr)


def make_fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def make_sparse(path: Path) -> Path:
    with path.open("wb") as file:
        file.truncate(10**12)
    return path


NOT_REGULAR: dict[str, Callable[[Path], Path]] = {
    "FIFO": make_fifo,
    "/dev/zero": lambda path: Path("/dev/zero"),
    "1 TB": make_sparse,
}


@pytest.mark.parametrize(
    ("option", "kind"),
    [
        ("model", "FIFO"),
        ("runs", "/dev/zero"),
        *(
            pytest.param(option, kind, marks=pytest.mark.thorough)
            for option in ("profile", "machine", "model", "rules", "runs")
            for kind in NOT_REGULAR
            if (option, kind) not in (("model", "FIFO"), ("runs", "/dev/zero"))
        ),
    ],
)
def test_a_program_never_waits_for_a_file_that_is_not_regular(option: str, kind: str, tmp_path: Path) -> None:
    path = NOT_REGULAR[kind](tmp_path / "input")
    arguments = {
        "runs": ["validate", "--runs", str(path)],
        "machine": ["plan", *MACHINE_JOB, "--machine", str(path)],
    }.get(option) or ["plan", *job(**{option: path})]
    screen = run_in_child(arguments)
    largest = "10 kB" if option == "machine" else "10 MB"
    assert_refused(screen, f"it has more than {largest}" if kind == "1 TB" else "it is not a regular file")


@pytest.mark.parametrize("kind", NOT_REGULAR)
def test_only_regular_files_of_bounded_size_are_read(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"it is not a regular file|it has more than 10 MB"):
        read_text(NOT_REGULAR[kind](tmp_path / "input"))


# Fuzzing

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)

VALID = {
    "profile": profile_json(),
    "model": LLAMA,
    "rules": [{"match": ["*.mlp.*"], "states": "cpu"}, {"match": "*", "states": "planned"}],
}


MACHINE_LINES = ("cores = 8", "gpus = 4", "nodes = 1", "link_gb_per_s = 20.5", "cores = [", "a.b.c = {}", "[table]")


def changed(value: Any, data: st.DataObject) -> Any:
    """Return a copy of ``value`` in which one value somewhere is another one."""
    if not isinstance(value, (dict, list)) or not value or data.draw(st.integers(0, 4)) == 0:
        return data.draw(json_values)
    result = copy.copy(value)
    key = data.draw(st.sampled_from(sorted(result) if isinstance(result, dict) else range(len(result))))
    result[key] = changed(result[key], data)
    return result


def damaged(content: bytes, data: st.DataObject) -> bytes:
    """Return ``content`` with some bytes replaced by others."""
    begin = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(begin, min(len(content), begin + 20)))
    return content[:begin] + data.draw(st.binary(max_size=20)) + content[end:]


def check_fuzzed(folder: Path, data: st.DataObject) -> bool:
    """Run a command with a file that Hypothesis changes. Return whether it was refused."""
    option = data.draw(st.sampled_from([*VALID, "machine", "runs"]))
    if option == "runs":
        row = {**RUN, data.draw(st.sampled_from(sorted(RUN))): data.draw(st.text(max_size=12))}
        content = csv_of(RUN, row).encode(errors="surrogatepass")
        arguments = ["validate", "--runs", "none"]
    elif option == "machine":
        lines = data.draw(st.lists(st.sampled_from(MACHINE_LINES) | st.text(max_size=12), max_size=5))
        content = "\n".join(['preset = "h100"', *lines]).encode(errors="surrogatepass")
        arguments = data.draw(st.sampled_from([["plan", *MACHINE_JOB, *FEW_UNITS], [CLUSTER[0], *CLUSTER[3:]]]))
    else:
        content = dumped(changed(VALID[option], data))
        arguments = data.draw(st.sampled_from([["plan", *job(), *FEW_UNITS], CLUSTER]))
    if data.draw(st.booleans()):
        content = damaged(content, data)
    path = folder / "fuzzed"
    path.write_bytes(content)
    screen = run_command(with_file(arguments, option, path))
    assert path.read_bytes() == content
    assert is_clean(screen.out)
    if screen.code == 2:
        assert_refused(screen)
    else:
        assert screen.code in (0, 1)
    return screen.code == 2


@given(st.data())
def test_any_file_is_used_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    check_fuzzed(tmp_path_factory.getbasetemp(), data)


@pytest.mark.thorough
@settings(max_examples=2_000)
@given(st.data())
def test_any_of_many_files_is_used_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    check_fuzzed(tmp_path_factory.getbasetemp(), data)


@given(
    st.lists(st.sampled_from([*job(), "--json", "--params", "--layers", "sweep"]) | st.text(max_size=12), max_size=6)
)
def test_any_options_are_used_or_refused(options: list[str]) -> None:
    screen = run_command(["plan", *job(sequence=0), *options])
    if screen.code != 0:
        assert_refused(screen)


@given(
    st.lists(
        st.sampled_from([*CLUSTER_SIZES, "--tokens", "1e12", "--json", "--tensor-parallel", "1,2", "--node-gb-per-s"])
        | st.text(max_size=12),
        max_size=6,
    )
)
def test_any_options_of_a_cluster_are_used_or_refused(options: list[str]) -> None:
    screen = run_command([*cluster("--sequence", 0), *options])
    if screen.code != 0:
        assert_refused(screen)


@given(st.text())
def test_a_printable_text_has_no_control_characters_and_is_unchanged_if_it_had_none(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert (shown == text) == text.isprintable()
    assert printable(shown) == shown


@given(json_values)
def test_a_shortened_value_is_short_and_printable(value: Any) -> None:
    assert shorten(value).isprintable()
    assert len(shorten(value)) < 3_000


@given(json_values)
def test_json_without_repeated_keys_is_parsed_as_usual(value: Any) -> None:
    assert repr(parse_json(json.dumps(value))) == repr(json.loads(json.dumps(value)))
