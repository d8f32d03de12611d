"""The command line, ``deep-opt-states``: a file a command, loaded when that one runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code. Raises ``SystemExit(2)``, from argparse, for arguments that it does not know."""
    parser = argparse.ArgumentParser(
        prog="deep-opt-states", description="Interleaved optimizer offloading for DeepSpeed."
    )
    commands = parser.add_subparsers(metavar="command", required=True)

    about = "check that training with the plugin can start here; exit code 1 if it cannot"
    doctor = commands.add_parser("doctor", help=about, description=_sentence(about))
    doctor.set_defaults(run=_doctor)

    about = "measure what this machine does, for the planner"
    several = (
        "Under torchrun, all ranks measure at once, as they train: torchrun ... -m deep_opt_states.cli profile ..."
    )
    profile = commands.add_parser("profile", help=about, description=f"{_sentence(about)} {several}")
    profile.add_argument("--output", type=Path, required=True, metavar="PATH", help="the JSON file to write")
    profile.add_argument("--quick", action="store_true", help="in some seconds, with fewer samples on less memory")
    profile.set_defaults(run=_profile)

    about = "make one HTML page of a training run"
    folder = 'the folder that training has written, with "report" in its config block'
    report = commands.add_parser("report", help=about, description=f"{_sentence(about)} It needs no network.")
    report.add_argument("folder", type=Path, metavar="RUN", help=folder)
    report.add_argument("--output", type=Path, metavar="PATH", help="the page to write; by default RUN/report.html")
    report.set_defaults(run=_report)

    options = parser.parse_args(arguments)
    code: int = options.run(options)
    return code


def _sentence(about: str) -> str:
    return f"{about[0].upper()}{about[1:]}."


def _doctor(options: argparse.Namespace) -> int:
    from deep_opt_states.cli.doctor import run

    return run()


def _profile(options: argparse.Namespace) -> int:
    from deep_opt_states.cli.profile import run

    return run(options.output, quick=options.quick)


def _report(options: argparse.Namespace) -> int:
    from deep_opt_states.cli.report import run

    return run(options.folder, options.output)
