"""Build the parsers of the planning commands, and run the command that was chosen.

Building the parsers imports neither numpy nor the planner: ``deep-opt-states doctor`` has to start, and to report the
missing package, if numpy cannot be imported. The module of a command is imported when the command runs.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from perf_model.cli.command_parser import CommandParser, error_text, integer, parameters
from perf_model.json_input import shorten
from perf_model.prediction.hardware import ProfileError
from perf_model.prediction.memory import GPU_MARGIN_BYTES, DoesNotFit
from perf_model.presets.machines import MACHINES
from perf_model.presets.models import MODELS
from perf_model.published.runs import RunsError
from perf_model.training_run.activations import SCORE_BYTES
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
    _add_accumulation(sweep)
    sweep.set_defaults(tensor_parallel=1, nodes=None)
    sweep.add_argument("--csv", type=Path, help="the file to write the rows to")

    about = "compare tensor-parallel sizes, micro-batches and accumulation for a global batch on a cluster"
    cluster = _add_command(commands, "cluster", about, _cluster)
    _add_machine_and_model(cluster)
    _add_cluster(cluster)
    # The inputs are those of one layout, from which the others are made.
    cluster.set_defaults(tensor_parallel=1, accumulation=1)
    _add_limits(cluster)
    cluster.add_argument("--json", action="store_true", help="print JSON; host bytes are per node")

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
    splits = validate.add_mutually_exclusive_group()
    across_models = (
        "fit the smaller models of each machine and predict its larger models; by default, a few strides of each sweep "
        "are fitted, and its other strides are predicted"
    )
    splits.add_argument("--across-models", action="store_true", help=across_models)
    across_nodes = (
        "fit the runs on the smaller half of the numbers of nodes of each machine, and predict those on more nodes"
    )
    splits.add_argument("--across-nodes", action="store_true", help=across_nodes)
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
    written = "a JSON file written by 'deep-opt-states profile'"
    profile = f"the machine, unless --machine states it: {written}, or a preset: {machines}"
    parser.add_argument("--profile", help=profile)
    machine = "a TOML file with a preset and figures of yours: cores, host_bandwidth_gb_per_s, link_gb_per_s, ..."
    parser.add_argument("--machine", type=Path, metavar="FILE", help=machine)
    add_list_option(parser)
    parser.add_argument("--cores", type=integer, help="cores of a node; default: as in the preset")
    host = "bandwidth of a node's host memory that is reached; default: as in the preset"
    parser.add_argument("--host-bandwidth-gb-per-s", type=float, metavar="GB", help=host)
    link = "rate of copies between host and one GPU, per direction; default: as in the preset"
    parser.add_argument("--link-gb-per-s", type=float, metavar="GB", help=link)
    network = "rate at which one GPU receives from other nodes; default: as in the preset"
    parser.add_argument("--network-gb-per-s", type=float, metavar="GB", help=network)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", help=f"a Hugging Face config.json, or a preset: {models}")
    model.add_argument("--params", type=parameters, metavar="N", help="a dense model with N parameters, as in 32e9")
    for name, meaning in (("layers", "number of layers"), ("hidden", "hidden size")):
        about = f"{meaning} with --params; default: plausible for the number of parameters"
        parser.add_argument(f"--{name}", type=integer, help=about)
    share = "a list of layers that share their parameters, such as model.layers: the pseudo stage of Pseudo-to-Real"
    parser.add_argument("--share-layers", metavar="PATH", help=share)
    every = "with --share-layers: layer i has the parameters of layer i %% N; default: 1"
    parser.add_argument("--every", type=integer, metavar="N", help=every)
    ranks = "ranks that share a host, one per GPU; default: gpus in the file of --machine"
    parser.add_argument("--ranks-per-node", "--gpus-per-node", type=integer, metavar="RANKS", help=ranks)
    parser.add_argument("--sequence", type=integer, required=True, help="tokens per sequence")
    offload_param = "keep the 16-bit parameters in host memory (offload_param: cpu); default: on the GPU"
    parser.add_argument("--offload-param", action="store_true", help=offload_param)
    trainable = "share of the parameters that is trained, such as 0.01 with LoRA; default: %(default)g, all"
    parser.add_argument("--trainable-share", type=_share, default=1.0, metavar="SHARE", help=trainable)
    no_recompute = "keep activations, instead of recomputing them in backward"
    parser.add_argument("--no-recompute", action="store_true", help=no_recompute)
    attention = "the kernels of attention: all but flash keep the scores in GPU memory; default: flash"
    parser.add_argument("--attention", choices=tuple(SCORE_BYTES), default="flash", help=attention)


def _add_nodes(parser: argparse.ArgumentParser, ranks: str) -> None:
    nodes = f"nodes, instead of {ranks}; default: nodes in the file of --machine"
    parser.add_argument("--nodes", type=integer, help=nodes)


def _add_accumulation(parser: argparse.ArgumentParser) -> None:
    accumulation = "micro-batches per step, with one update; default: %(default)s"
    parser.add_argument("--accumulation", type=integer, default=1, help=accumulation)


def _add_job(parser: argparse.ArgumentParser) -> None:
    """Add one world size and one micro-batch."""
    world_size = "ranks, one per GPU; default: nodes times ranks per node"
    parser.add_argument("--world-size", type=integer, help=world_size)
    _add_nodes(parser, "--world-size")
    _add_accumulation(parser)
    parser.add_argument("--micro-batch", type=integer, required=True, help="sequences in one micro-batch of a rank")
    ranks = "ranks of a node that divide the matrices of each layer (AutoTP); default: %(default)s"
    parser.add_argument("--tensor-parallel", type=integer, default=1, metavar="RANKS", help=ranks)


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the GPUs, the global batch, the layouts to compare and the network."""
    gpus = "all GPUs of the cluster, one rank each; default: nodes times ranks per node"
    parser.add_argument("--gpus", type=integer, help=gpus)
    _add_nodes(parser, "--gpus")
    parser.add_argument("--global-batch", type=integer, required=True, help="sequences per iteration, over all GPUs")
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
    parser.add_argument("--gpu-memory-gb", type=_bytes_of_gb, help=memory)
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


def _cluster(options: argparse.Namespace) -> int:
    from perf_model.cli.cluster_command import run

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


def _number(text: str) -> float:
    """Return the number that ``text`` spells, and NaN, which no bounds allow, if it spells none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _bytes_of_gb(text: str, rule: str = "must be a number of GB (10^9 bytes) from 1e-9 to 1e9") -> int:
    """Convert GB (10^9 bytes) to bytes. Raise ``ArgumentTypeError`` unless ``text`` is a number from 1e-9 to 1e9."""
    value = _number(text)
    if not 1e-9 <= value <= 1e9:
        raise argparse.ArgumentTypeError(f"{rule}, found {shorten(text)}")
    return max(1, int(value * GB))


def _margin_of_gb(text: str) -> int:
    """Convert GB (10^9 bytes) to bytes. Zero is allowed, too."""
    if _number(text) == 0:
        return 0
    return _bytes_of_gb(text, "must be a number of GB (10^9 bytes): 0, or from 1e-9 to 1e9")


def _share(text: str) -> float:
    """Convert a share. Raise ``ArgumentTypeError`` unless ``text`` is a number above 0 and at most 1."""
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be a number above 0 and at most 1, found {text!r}")
    return value


def _positive_integers(text: str) -> list[int]:
    """Parse integers separated by commas. Raise ``ArgumentTypeError`` unless all of them are positive."""
    if not re.fullmatch(r"\s*0*[1-9][0-9]{0,18}\s*(,\s*0*[1-9][0-9]{0,18}\s*)*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"must be positive integers separated by commas, found {shorten(text)}")
    return [int(part) for part in text.split(",")]


def _positive_integers_or_auto(text: str) -> list[int] | None:
    """Parse integers as ``_positive_integers`` does; "auto" stands for None."""
    return None if text == "auto" else _positive_integers(text)


def _tokens(text: str) -> float:
    """Parse a number of tokens. Raise ``ArgumentTypeError`` unless it is from 1 to 1e18."""
    value = _number(text)
    if not 1 <= value <= 1e18:
        raise argparse.ArgumentTypeError(f"must be a number of tokens from 1 to 1e18, found {shorten(text)}")
    return value
