"""Parse the command line ``deep-opt-states``, and run the command.

The planning commands are those of ``python -m perf_model`` and need no torch. The module of a command is imported when
the command runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from perf_model.cli.command_parser import CommandParser
from perf_model.cli.planning_commands import add_planning_commands


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` (None: those of the process) name, and return its exit code.

    Raise ``SystemExit(2)``, from argparse, for unknown arguments.
    """
    parser = CommandParser(prog="deep-opt-states", description="Interleaved optimizer offloading for DeepSpeed.")
    commands = parser.add_subparsers(metavar="command", required=True)
    add_planning_commands(commands)

    about = "measure the rates of this machine, for the planner"
    under_torchrun = (
        "Under torchrun, all ranks measure at once, as they train: torchrun ... -m deep_opt_states.cli profile ..."
    )
    profile = commands.add_parser("profile", help=about, description=f"{_sentence(about)} {under_torchrun}")
    profile.add_argument("--output", type=Path, required=True, metavar="PATH", help="the JSON file to write")
    profile.add_argument("--quick", action="store_true", help="take some seconds: fewer samples, on less memory")
    profile.set_defaults(run=_profile)

    about = "check that training with the plugin can start here; exit code 1 if it cannot"
    doctor = commands.add_parser("doctor", help=about, description=_sentence(about))
    doctor.set_defaults(run=_doctor)

    about = "make one HTML page of a training run"
    folder = 'the folder that training has written, with "report" in its config block'
    report = commands.add_parser("report", help=about, description=f"{_sentence(about)} It needs no network.")
    report.add_argument("folder", type=Path, metavar="RUN", help=folder)
    report.add_argument("--output", type=Path, metavar="PATH", help="the page to write; default: RUN/report.html")
    report.set_defaults(run=_report)

    options = parser.parse_args(arguments)
    code: int = options.run(options)
    return code


def _sentence(about: str) -> str:
    return f"{about[0].upper()}{about[1:]}."


def _profile(options: argparse.Namespace) -> int:
    from deep_opt_states.cli.profile_command import run

    return run(options.output, quick=options.quick)


def _doctor(options: argparse.Namespace) -> int:
    from deep_opt_states.cli.doctor_command import run

    return run()


def _report(options: argparse.Namespace) -> int:
    from deep_opt_states.cli.report_command import run

    return run(options.folder, options.output)
