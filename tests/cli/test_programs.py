"""Test that both programs start quickly and do the same, and the options that name a machine or a model; test sweep."""

from __future__ import annotations

import argparse
import csv
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from deep_opt_states.cli.main import main as deep_opt_states_main
from deep_opt_states.names import __version__
from perf_model.__main__ import COMMANDS_THAT_NEED_TORCH, main
from perf_model.cli import screen
from perf_model.cli.inputs import read_model
from perf_model.presets.machines import ALIASES, MACHINES
from perf_model.training_run.model import ModelError
from tests.cli.planning import PLANNING_COMMANDS, SWEEP, job
from tests.launch import REPOSITORY


def test_a_reader_that_closes_the_pipe_causes_no_error_message() -> None:
    command = f"{shlex.join([sys.executable, '-m', 'perf_model', 'plan', *job(), '--json'])} | true"
    shell = ["bash", "-c", f"{command}; echo ${{PIPESTATUS[0]}}"]
    done = subprocess.run(shell, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("1\n", "")


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import perf_model.__main__", {"numpy"}),
        ("import deep_opt_states.cli.main", {"numpy"}),
        (f"from deep_opt_states.cli.main import main; assert main({['plan', *job(), '--json']!r}) == 0", set()),
    ],
    ids=["perf_model", "deep_opt_states", "plan"],
)
def test_the_programs_start_and_plan_without_torch_rich_and_matplotlib(code: str, absent: set[str]) -> None:
    """Check the imports: torch takes seconds, and the doctor has to start where the others cannot be imported."""
    command = [sys.executable, "-c", f"import sys; {code}; print(*sys.modules, file=sys.stderr)"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert not ({"torch", "deepspeed", "matplotlib", "rich"} | absent) & set(done.stderr.split())


@pytest.mark.parametrize(
    ("program", "run", "commands"),
    [
        ("perf_model", main, PLANNING_COMMANDS),
        ("deep_opt_states.cli", deep_opt_states_main, (*PLANNING_COMMANDS, *COMMANDS_THAT_NEED_TORCH)),
    ],
)
def test_a_program_runs_as_a_module_and_prints_its_commands_and_its_version(
    program: str, run: Any, commands: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = subprocess.check_output([sys.executable, "-m", program, "--help"], cwd=REPOSITORY, text=True)
    assert re.findall(r"^    (\w+) ", shown, re.MULTILINE) == [*commands]
    assert run([]) == 0
    assert capsys.readouterr().out.startswith("usage: ")
    with pytest.raises(SystemExit, match="0"):
        run(["--version"])
    assert capsys.readouterr().out.split()[-1] == __version__


@pytest.mark.parametrize("command", COMMANDS_THAT_NEED_TORCH)
def test_a_command_that_needs_torch_names_its_program(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([command, "--output", "profile.json"])
    assert f"found '{command}'. Run: deep-opt-states {command}\n" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["", "plan", "cluster"])
def test_each_planning_command_lists_the_presets(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([*command.split(), "--list"])
    shown = capsys.readouterr().out
    for name, preset in MACHINES.items():
        assert f"{name}: {preset.source}" in shown
        assert any(line.startswith(f"{name} ") and preset.gpu in line for line in shown.splitlines())
    assert all(f"{alias} is {name}" in shown for alias, name in ALIASES.items())


SMALL = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}


def options(model: str | Path) -> argparse.Namespace:
    names = ("params", "layers", "hidden", "every", "share_layers")
    return argparse.Namespace(model=str(model), **dict.fromkeys(names))


def test_a_folder_or_a_name_in_the_cache_is_read_as_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "hub" / "models--org--tiny" / "snapshots" / "0123"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(SMALL))
    from_folder = read_model(options(folder))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    by_hub = read_model(options("org/tiny"))
    assert (by_hub.name, by_hub.tensors) == ("tiny", from_folder.tensors)
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert read_model(options("org/tiny")) == by_hub


def test_an_unknown_name_gets_near_presets_and_the_place_of_a_config() -> None:
    with pytest.raises(ModelError) as caught:
        read_model(options("meta-llama/Llama-3.1-8B"))
    _, remedy = str(caught.value).splitlines()
    assert remedy.startswith("Presets: Llama-3-8B, ")
    assert "https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json" in remedy


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_is_shown_on_a_terminal_after_a_second(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = mock.Mock()
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    monkeypatch.setattr(screen, "Timer", timer)
    monkeypatch.setenv("TERM", "xterm")
    with screen.progress("Working"):
        assert capsys.readouterr().err == ""
        for seconds, start in (call.args for call in timer.call_args_list):
            assert seconds == 1.0
            start()
    output = capsys.readouterr()
    assert ("Working" in output.err) is is_terminal
    assert output.out == ""


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
    one_pair = ["--world-sizes", "8", "--micro-batches", "1", *sizes[4:6], "--csv", str(tmp_path / "none/sweep.csv")]
    assert main(["sweep", *SWEEP, *one_pair]) == 2
    output = capsys.readouterr()
    assert "tokens/s" in output.out, "the table is printed although the file cannot be written"
    assert output.err.startswith("--csv: must be a file that can be written")
