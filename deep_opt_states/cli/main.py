"""Parse the command line ``deep-opt-states``, and run the command.

The planning commands are those of ``python -m perf_model`` and need no torch. The module of a command is imported when
the command runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from perf_model.cli.command_parser import CommandParser
from perf_model.cli.planning_commands import add_list_option, add_planning_commands


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` (None: those of the process) name, and return its exit code.

    Raise ``SystemExit(2)``, from argparse, for unknown arguments.
    """
    parser = CommandParser(prog="deep-opt-states", description="Interleaved optimizer offloading for DeepSpeed.")
    commands = parser.add_subparsers(metavar="command", required=True)
    add_list_option(parser)
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
    config = "check this DeepSpeed config in place of the machine"
    doctor.add_argument("--config", type=Path, metavar="FILE", help=config)
    doctor.set_defaults(run=_doctor)

    about = "make one HTML page of a training run"
    folder = 'the folder that training has written, with "report" in its config block'
    report = commands.add_parser("report", help=about, description=f"{_sentence(about)} It needs no network.")
    report.add_argument("folder", type=Path, metavar="RUN", help=folder)
    report.add_argument("--output", type=Path, metavar="PATH", help="the page to write; default: RUN/report.html")
    report.set_defaults(run=_report)

    about = "make the universal checkpoint of a model from that of one whose layers share parameters"
    delink = commands.add_parser("delink", help=about, description=_sentence(about))
    delink.add_argument("pseudo", type=Path, metavar="PSEUDO", help="the folder that ds_to_universal has written")
    delink.add_argument("real", type=Path, metavar="REAL", help="the folder to write; it must not exist")
    share = "the layer whose parameters were shared: model.layers.0"
    delink.add_argument("--share", required=True, metavar="LAYER", help=share)
    into = 'the other layers: "model.layers.{1..47}"'
    delink.add_argument("--into", required=True, nargs="+", metavar="LAYERS", help=into)
    delink.add_argument("--every", type=int, default=1, metavar="N", help="the number of layers with parameters")
    moments = "mean: exp_avg / L and exp_avg_sq / L^2 (layers shared by scale='sum'); copy (scale='mean'); zero"
    delink.add_argument("--moments", required=True, choices=("mean", "copy", "zero"), help=moments)
    delink.add_argument("--copy", action="store_true", help="copy files, in place of hard links to those of PSEUDO")
    delink.add_argument("--dry-run", action="store_true", help="write nothing")
    model = "compare the names with those of the model in a Hugging Face config.json"
    delink.add_argument("--model", type=Path, metavar="FILE", help=model)
    delink.set_defaults(run=_delink)

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

    return run(options.config)


def _report(options: argparse.Namespace) -> int:
    from deep_opt_states.cli.report_command import run

    return run(options.folder, options.output)


def _delink(options: argparse.Namespace) -> int:
    from deep_opt_states.cli.delink_command import run

    return run(options)
