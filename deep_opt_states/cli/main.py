"""Parse the command line ``deep-opt-states``, and run the command, whose module is imported only then."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

from perf_model.cli.planning_commands import interruptible, new_program
from perf_model.cli.screen import progress


@interruptible
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of ``arguments`` and return its exit code. Raise ``SystemExit(2)`` for unknown arguments."""
    parser, commands = new_program("deep-opt-states", "Interleaved optimizer offloading for DeepSpeed.")

    def add(name: str, about: str, more: str = "") -> argparse.ArgumentParser:
        def run(options: argparse.Namespace) -> int:
            # DeepSpeed and transformers are imported for seconds.
            with progress("Loading"):
                command = importlib.import_module(f"deep_opt_states.cli.{name}_command")
            code: int = command.run(options)
            return code

        description = f"{about[0].upper()}{about[1:]}.{more}"
        command: argparse.ArgumentParser = commands.add_parser(name, help=about, description=description)
        command.set_defaults(run=run)
        return command

    under_torchrun = (
        " Under torchrun, all ranks measure together, as they train: torchrun ... -m deep_opt_states.cli profile ..."
    )
    profile = add("profile", "measure the rates of this machine, for the planner", under_torchrun)
    profile.add_argument("--output", type=Path, required=True, metavar="PATH", help="the JSON file to write")
    profile.add_argument("--quick", action="store_true", help="take some seconds: fewer samples, on less memory")
    nvme = "folders on the disks for states that do not fit into host memory, whose rates are also measured"
    profile.add_argument("--nvme", type=Path, nargs="+", default=[], metavar="FOLDER", help=nvme)

    doctor = add("doctor", "check that training with the plugin can start here; exit code 1 if it cannot")
    config = "check this DeepSpeed config in place of the machine"
    doctor.add_argument("--config", type=Path, metavar="FILE", help=config)

    report = add("report", "make one HTML page of a training run", " It needs no network.")
    folder = 'the folder that training has written, with "report" in its config block'
    report.add_argument("folder", type=Path, metavar="RUN", help=folder)
    report.add_argument("--output", type=Path, metavar="PATH", help="the page to write; default: RUN/report.html")

    about = "make a universal checkpoint with a copy for each layer of one whose layers share parameters"
    delink = add("delink", about)
    delink.add_argument("pseudo", type=Path, metavar="PSEUDO", help="the folder that ds_to_universal has written")
    delink.add_argument("real", type=Path, metavar="REAL", help="the folder to write; it must not exist")
    share = "the layer whose parameters were shared: model.layers.0"
    delink.add_argument("--share", required=True, metavar="LAYER", help=share)
    into = 'the other layers: "model.layers.{1..47}"'
    delink.add_argument("--into", required=True, nargs="+", metavar="LAYERS", help=into)
    delink.add_argument("--every", type=int, default=1, metavar="N", help="the number of layers with parameters")
    moments = "mean: exp_avg / L and exp_avg_sq / L^2 (layers shared by scale='sum'); copy (scale='mean'); zero"
    delink.add_argument("--moments", required=True, choices=("mean", "copy", "zero"), help=moments)
    delink.add_argument("--copy", action="store_true", help="copy files of PSEUDO, instead of hard-linking them")
    delink.add_argument("--dry-run", action="store_true", help="write nothing")
    model = "compare the names with the model of a Hugging Face config.json"
    delink.add_argument("--model", type=Path, metavar="FILE", help=model)

    options = parser.parse_args(arguments)
    code: int = options.run(options) or 0
    return code
