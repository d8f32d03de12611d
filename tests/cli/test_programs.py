"""Test that the two programs start quickly and do the same."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from typing import Any

import pytest

from deep_opt_states.cli.main import main as deep_opt_states_main
from perf_model.__main__ import COMMANDS_THAT_NEED_TORCH, main
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
