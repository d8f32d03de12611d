"""Build the parsers of the planning commands, and run the command that was chosen.

Building the parsers imports neither numpy nor the planner: ``deep-opt-states doctor`` has to start, and to report the
missing package, if numpy cannot be imported. The module of a command is imported when the command runs.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from perf_model.cli.command_parser import CommandParser, error_text, integer, parameters
from perf_model.json_input import shorten
from perf_model.prediction.hardware import ProfileError
from perf_model.presets.machines import MACHINES
from perf_model.presets.models import MODELS
from perf_model.published.runs import RunsError
from perf_model.search.budgets import GPU_MARGIN_BYTES, DoesNotFit
from perf_model.training_run.job import DEFAULT_SUB_GROUP_SIZE
from perf_model.training_run.model import ModelError
from perf_model.units import GB


def add_planning_commands(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add the parser of each planning command to ``commands``.

    Each parser sets the option ``run``: a function that takes the options and returns the exit code.
    """
    about = "find the plan with the least exposed update time, and compare it with the alternatives"
    plan = _add_command(commands, "plan", about, _plan)
    _add_machine_and_model(plan)
    _add_job(plan)
    _add_limits(plan)
    plan.add_argument("--json", action="store_true", help="print JSON; host and pinned bytes are per node")

    sweep = _add_command(commands, "sweep", "plan for several numbers of GPUs and micro-batches", _sweep)
    _add_machine_and_model(sweep)
    sweep.add_argument("--world-sizes", type=_positive_integers, required=True, help="for example 1,2,4,8")
    sweep.add_argument("--micro-batches", type=_positive_integers, required=True, help="for example 1,2,4")
    _add_limits(sweep)
    sweep.add_argument("--csv", type=Path, help="the file to write the rows to")

    simulate = _add_command(commands, "simulate", "show the predicted timeline of the plan", _simulate)
    _add_machine_and_model(simulate)
    _add_job(simulate)
    _add_limits(simulate)
    folder = "the folder for timeline.json and timeline.png; default: simulation"
    simulate.add_argument("--output", type=Path, default=Path("simulation"), help=folder)

    explain = _add_command(commands, "explain", "show in numbers why each unit has its placement", _explain)
    _add_machine_and_model(explain)
    _add_job(explain)
    _add_limits(explain)

    about = "fit rates on a few measured runs, predict the other runs, and compare"
    validate = _add_command(commands, "validate", about, _validate)
    runs = "measured runs, with the columns of benchmarks/data/published_runs.csv"
    validate.add_argument("--runs", type=Path, required=True, metavar="CSV", help=runs)
    across_models = (
        "fit the smaller models of each machine and predict its larger models; by default, a few strides of each sweep "
        "are fitted, and its other strides are predicted"
    )
    validate.add_argument("--across-models", action="store_true", help=across_models)
    validate.add_argument("--json", action="store_true", help="print JSON")


def _add_command(
    commands: argparse._SubParsersAction[CommandParser],
    name: str,
    about: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
    parser.set_defaults(run=lambda options: _exit_code(run, options))
    return parser


def _add_machine_and_model(parser: argparse.ArgumentParser) -> None:
    machines, models = ", ".join(MACHINES), ", ".join(MODELS)
    profile = f"the machine: a JSON file written by 'deep-opt-states profile', or a preset: {machines}"
    parser.add_argument("--profile", required=True, help=profile)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", help=f"a Hugging Face config.json, or a preset: {models}")
    model.add_argument("--params", type=parameters, metavar="N", help="a dense model of so many parameters, as in 32e9")
    for name in ("layers", "hidden"):
        about = f"{name} of the model of --params; default: plausible for its number of parameters"
        parser.add_argument(f"--{name}", type=integer, help=about)
    parser.add_argument("--ranks-per-node", type=integer, required=True, help="ranks that share a host")
    parser.add_argument("--sequence", type=integer, required=True, help="tokens per sequence")
    no_recompute = "keep activations, instead of recomputing them in backward"
    parser.add_argument("--no-recompute", action="store_true", help=no_recompute)


def _add_job(parser: argparse.ArgumentParser) -> None:
    """Add one world size and one micro-batch."""
    parser.add_argument("--world-size", type=integer, required=True, help="ranks, one per GPU")
    parser.add_argument("--micro-batch", type=integer, required=True, help="sequences per rank in one step")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu-memory-gb", type=_bytes_of_gb, help="memory per GPU; default: as in the profile")
    margin = f"GPU memory that the plan leaves free, as training does; default: {GPU_MARGIN_BYTES / GB:.0f}"
    parser.add_argument("--gpu-memory-margin-gb", type=_margin_of_gb, help=margin)
    parser.add_argument("--host-memory-gb", type=_bytes_of_gb, help="host memory per node; default: as in the profile")
    pinned = "page-locked host memory per rank; default: unlimited"
    parser.add_argument("--pinned-memory-gb", type=_bytes_of_gb, help=pinned)
    sub_group_size = f"sub_group_size of the DeepSpeed config; default: DeepSpeed's, {DEFAULT_SUB_GROUP_SIZE}"
    parser.add_argument("--sub-group-size", type=integer, help=sub_group_size)
    rules = 'a JSON list of rules by name, as in "placement" of the config; default: everything is planned'
    parser.add_argument("--rules", type=Path, metavar="FILE", help=rules)
    unit_size = "parameters per unit of a rank, at most; default: the best of several sizes"
    parser.add_argument("--unit-size", type=integer, help=unit_size)
    overlap = "the phases that the update is overlapped with; default: both, as in training"
    parser.add_argument("--overlap", choices=("none", "backward", "forward", "both"), default="both", help=overlap)


def _exit_code(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Run a command, and return its exit code.

    Return 1 if nothing fits in memory or the reader of stdout has closed it, 2 for input that cannot be used.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name may have letters that the encoding of the terminal lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = run(options)
        # Otherwise the rest of the buffer would be written at exit, where an error cannot be caught.
        sys.stdout.flush()
    except DoesNotFit as error:
        print(error_text(error), file=sys.stderr)
        return 1
    except (ModelError, ProfileError, RunsError) as error:
        print(error_text(error), file=sys.stderr)
        return 2
    except MemoryError:
        rule = "Planning must fit in the memory of this machine, found too little"
        print(f"{rule}.\nPlan for fewer units: give a larger --unit-size or --sub-group-size.", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # A reader such as head has exited. Python flushes once more at exit: let it write to the null device.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _plan(options: argparse.Namespace) -> int:
    from perf_model.cli.plan_command import run

    return run(options)


def _sweep(options: argparse.Namespace) -> int:
    from perf_model.cli.sweep_command import run

    return run(options)


def _simulate(options: argparse.Namespace) -> int:
    from perf_model.cli.simulate_command import run

    return run(options)


def _explain(options: argparse.Namespace) -> int:
    from perf_model.cli.explain_command import run

    return run(options)


def _validate(options: argparse.Namespace) -> int:
    from perf_model.cli.validate_command import run

    return run(options)


def _bytes_of_gb(text: str) -> int:
    """Convert GB (10^9 bytes) to bytes. Raise ``ArgumentTypeError`` unless ``text`` is a number from 1e-9 to 1e9."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 1e-9 <= value <= 1e9:
        raise argparse.ArgumentTypeError(f"must be a number of GB (10^9 bytes) from 1e-9 to 1e9, found {shorten(text)}")
    return max(1, int(value * GB))


def _margin_of_gb(text: str) -> int:
    """Convert GB (10^9 bytes) to bytes. Zero is allowed, too."""
    return 0 if text in ("0", "0.0") else _bytes_of_gb(text)


def _positive_integers(text: str) -> list[int]:
    """Parse integers separated by commas. Raise ``ArgumentTypeError`` unless all of them are positive."""
    if not re.fullmatch(r"\s*0*[1-9][0-9]{0,18}\s*(,\s*0*[1-9][0-9]{0,18}\s*)*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"must be positive integers separated by commas, found {shorten(text)}")
    return [int(part) for part in text.split(",")]
