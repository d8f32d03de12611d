"""Build the parsers of the planning commands, and run the command that was chosen.

Building the parsers does not import the planner. The module of a command is imported when the command runs.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from perf_model.cli.command_parser import CommandParser
from perf_model.json_input import shorten
from perf_model.prediction.hardware import ProfileError
from perf_model.prediction.memory import GPU_MARGIN_BYTES, DoesNotFit
from perf_model.presets.machines import MACHINES
from perf_model.presets.models import MODELS
from perf_model.training_run.activations import SCORE_BYTES
from perf_model.training_run.job import DEFAULT_SUB_GROUP_SIZE
from perf_model.training_run.model import ModelError
from perf_model.units import GB


def add_planning_commands(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add the parser of each planning command to ``commands``.

    Each parser sets the option ``run``: a function that takes the options and returns the exit code.
    """
    about = "find the plan with the least exposed update time, and compare it with the alternatives"
    plan = _add_command(commands, "plan", about)
    _add_machine_and_model(plan)
    _add_job(plan)
    _add_limits(plan)
    plan.add_argument("--json", action="store_true", help="print JSON; host and pinned bytes are per node")

    sweep = _add_command(commands, "sweep", "plan for several numbers of GPUs and micro-batches")
    _add_machine_and_model(sweep)
    sweep.add_argument("--world-sizes", type=_positive_integers, required=True, help="for example 1,2,4,8")
    sweep.add_argument("--micro-batches", type=_positive_integers, required=True, help="for example 1,2,4")
    _add_limits(sweep)
    _add_accumulation(sweep)
    sweep.set_defaults(tensor_parallel=1)
    sweep.add_argument("--csv", type=Path, help="the file to write the rows to")

    about = "compare tensor-parallel sizes, micro-batches and accumulation for a global batch on a cluster"
    cluster = _add_command(commands, "cluster", about)
    _add_machine_and_model(cluster)
    _add_cluster(cluster)
    # The inputs are those of one layout, from which the others are made.
    cluster.set_defaults(tensor_parallel=1, accumulation=1)
    _add_limits(cluster)
    cluster.add_argument("--json", action="store_true", help="print JSON; host bytes are per node")

    simulate = _add_command(commands, "simulate", "show the predicted timeline of the plan")
    _add_machine_and_model(simulate)
    _add_job(simulate)
    _add_limits(simulate)
    folder = "the folder for timeline.json and timeline.png; default: simulation"
    simulate.add_argument("--output", type=Path, default=Path("simulation"), help=folder)


def _add_command(
    commands: argparse._SubParsersAction[CommandParser],
    name: str,
    about: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
    parser.set_defaults(run=lambda options: _exit_code(name, options))
    return parser


def _add_machine_and_model(parser: argparse.ArgumentParser) -> None:
    machines, models = ", ".join(MACHINES), ", ".join(MODELS)
    written = "a JSON file written by 'deep-opt-states profile'"
    parser.add_argument("--profile", required=True, help=f"the machine: {written}, or a preset: {machines}")
    add_list_option(parser)
    parser.add_argument("--cores", type=int, help="cores of a node; default: as in the preset")
    host = "bandwidth of a node's host memory that is reached; default: as in the preset"
    parser.add_argument("--host-bandwidth-gb-per-s", type=float, metavar="GB", help=host)
    link = "rate of copies between host and one GPU, per direction; default: as in the preset"
    parser.add_argument("--link-gb-per-s", type=float, metavar="GB", help=link)
    network = "rate at which one GPU receives from other nodes; default: as in the preset"
    parser.add_argument("--network-gb-per-s", type=float, metavar="GB", help=network)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", help=f"a Hugging Face config.json, or a preset: {models}")
    model.add_argument("--params", type=_parameters, metavar="N", help="a dense model with N parameters, as in 32e9")
    for name, meaning in (("layers", "number of layers"), ("hidden", "hidden size")):
        about = f"{meaning} with --params; default: plausible for the number of parameters"
        parser.add_argument(f"--{name}", type=int, help=about)
    share = "a list of layers that share their parameters, such as model.layers: the pseudo stage of Pseudo-to-Real"
    parser.add_argument("--share-layers", metavar="PATH", help=share)
    every = "with --share-layers: layer i has the parameters of layer i %% N; default: 1"
    parser.add_argument("--every", type=int, metavar="N", help=every)
    ranks = "ranks that share a host, one per GPU"
    parser.add_argument("--ranks-per-node", "--gpus-per-node", type=int, required=True, metavar="RANKS", help=ranks)
    parser.add_argument("--sequence", type=int, required=True, help="tokens per sequence")
    offload_param = "keep the 16-bit parameters in host memory (offload_param: cpu); default: on the GPU"
    parser.add_argument("--offload-param", action="store_true", help=offload_param)
    trainable = "share of the parameters that is trained, such as 0.01 with LoRA; default: %(default)g, all"
    parser.add_argument("--trainable-share", type=float, default=1.0, metavar="SHARE", help=trainable)
    no_recompute = "keep activations, instead of recomputing them in backward"
    parser.add_argument("--no-recompute", action="store_true", help=no_recompute)
    attention = "the kernels of attention: all but flash keep the scores in GPU memory; default: flash"
    parser.add_argument("--attention", choices=tuple(SCORE_BYTES), default="flash", help=attention)


def _add_accumulation(parser: argparse.ArgumentParser) -> None:
    accumulation = "micro-batches per step, with one update; default: %(default)s"
    parser.add_argument("--accumulation", type=int, default=1, help=accumulation)


def _add_job(parser: argparse.ArgumentParser) -> None:
    """Add one world size and one micro-batch."""
    ranks = parser.add_mutually_exclusive_group(required=True)
    ranks.add_argument("--world-size", type=int, help="ranks, one per GPU")
    ranks.add_argument("--nodes", type=int, help="nodes, instead of --world-size")
    _add_accumulation(parser)
    parser.add_argument("--micro-batch", type=int, required=True, help="sequences in one micro-batch of a rank")
    tensor_parallel = "ranks of a node that divide the matrices of each layer (AutoTP); default: %(default)s"
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="RANKS", help=tensor_parallel)


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the GPUs, the global batch, the layouts to compare and the network."""
    ranks = parser.add_mutually_exclusive_group(required=True)
    ranks.add_argument("--gpus", type=int, help="all GPUs of the cluster, one rank each")
    ranks.add_argument("--nodes", type=int, help="nodes, instead of --gpus")
    parser.add_argument("--global-batch", type=int, required=True, help="sequences per iteration, over all GPUs")
    parser.add_argument("--tokens", type=_tokens, help="tokens to train on, for days and GPU-hours; for example 300e9")
    sizes = "tensor-parallel sizes to compare; default: powers of two inside a node"
    parser.add_argument(
        "--tensor-parallel", type=_positive_integers, dest="tensor_parallel_sizes", metavar="SIZES", help=sizes
    )
    micro = "micro-batches to compare, in sequences, or 'auto', the default: all that divide the global batch"
    parser.add_argument("--micro-batches", type=_positive_integers_or_auto, metavar="SIZES", help=micro)
    inside = "rate at which one GPU receives from others of its node; default: as in the profile, or that of the link"
    parser.add_argument("--node-gb-per-s", type=float, metavar="GB", help=inside)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    memory = "the whole memory of a GPU, and not the key gpu_memory_gb of the config; default: as in the profile"
    parser.add_argument("--gpu-memory-gb", type=_gigabytes, help=memory)
    margin = f"GPU memory that the plan leaves free, as training does; default: {GPU_MARGIN_BYTES / GB:.0f}"
    parser.add_argument("--gpu-memory-margin-gb", type=_margin, help=margin)
    parser.add_argument("--host-memory-gb", type=_gigabytes, help="host memory per node; default: as in the profile")
    pinned = "page-locked host memory per rank; default: unlimited"
    parser.add_argument("--pinned-memory-gb", type=_gigabytes, help=pinned)
    sub_group_size = f"sub_group_size of the DeepSpeed config; default: DeepSpeed's, {DEFAULT_SUB_GROUP_SIZE}"
    parser.add_argument("--sub-group-size", type=int, help=sub_group_size)
    rules = 'a JSON list of rules by name, as in "placement" of the config; default: everything is planned'
    parser.add_argument("--rules", type=Path, metavar="FILE", help=rules)
    unit_size = "parameters per unit of a rank, at most; default: the best of several sizes"
    parser.add_argument("--unit-size", type=int, help=unit_size)
    overlap = "the phases that the update is overlapped with; default: both, as in training"
    parser.add_argument("--overlap", choices=("none", "backward", "forward", "both"), default="both", help=overlap)


def add_list_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--list``, which lists the presets and exits."""
    parser.add_argument("--list", action=_ListMachines, help="list the presets with their figures, and exit")


class _ListMachines(argparse.Action):
    """An option that lists the presets and exits."""

    def __init__(self, option_strings: list[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """List the presets, and raise ``SystemExit(0)``."""
        from perf_model.cli.machine_options import list_machines

        list_machines()
        parser.exit()


def _exit_code(name: str, options: argparse.Namespace) -> int:
    """Run the command ``name``, and return its exit code.

    Return 1 if nothing fits in memory or the reader of stdout has closed it, 2 for input that cannot be used.
    """
    run: Callable[[argparse.Namespace], int] = import_module(f"perf_model.cli.{name}_command").run
    try:
        code = run(options)
        # Otherwise the rest of the buffer would be written at exit, where an error cannot be caught.
        sys.stdout.flush()
    except (DoesNotFit, ModelError, ProfileError) as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, DoesNotFit) else 2
    except BrokenPipeError:
        # A reader such as head has exited. Python flushes once more at exit: let it write to the null device.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _number(text: str, what: str, low: float, high: float) -> float:
    """Return the number that ``text`` spells. Raise ``ArgumentTypeError`` unless it is from ``low`` to ``high``."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"must be {what} from {low:g} to {high:g}, found {shorten(text)}")
    return value


def _gigabytes(text: str) -> int:
    """Convert GB (10^9 bytes) to bytes."""
    return int(GB * _number(text, "a number of GB (10^9 bytes)", 1e-9, 1e9))


def _margin(text: str) -> int:
    """Convert GB (10^9 bytes) to bytes, of which 0 is allowed."""
    return int(GB * _number(text, "a number of GB (10^9 bytes)", 0, 1e9))


def _tokens(text: str) -> float:
    return _number(text, "a number of tokens", 1, 1e18)


def _parameters(text: str) -> int:
    """Return the number of parameters that ``text`` spells, such as 32e9."""
    value = _number(text, "a whole number of parameters such as 32e9,", 1, 1e15)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"must be a whole number of parameters such as 32e9, found {shorten(text)}")
    return int(value)


def _positive_integers(text: str) -> list[int]:
    """Parse integers separated by commas. Raise ``ArgumentTypeError`` unless all of them are positive."""
    if not re.fullmatch(r"\s*0*[1-9][0-9]*\s*(,\s*0*[1-9][0-9]*\s*)*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"must be positive integers separated by commas, found {shorten(text)}")
    return [int(part) for part in text.split(",")]


def _positive_integers_or_auto(text: str) -> list[int] | None:
    """Parse integers as ``_positive_integers`` does; "auto" stands for None."""
    return None if text == "auto" else _positive_integers(text)
