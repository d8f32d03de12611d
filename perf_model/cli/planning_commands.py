"""Build the parsers of the planning commands. A command's module is imported only when the command runs."""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from importlib import import_module, metadata
from pathlib import Path
from typing import NoReturn

from perf_model.cli.screen import show, tables
from perf_model.json_input import shorten
from perf_model.prediction.cost import DiskRates
from perf_model.prediction.hardware import ProfileError
from perf_model.prediction.memory import GPU_MARGIN_BYTES, DoesNotFit
from perf_model.presets.machines import ALIASES, FIGURES, MACHINES, REACHED_SHARE
from perf_model.presets.models import MODELS
from perf_model.schedule.host_layout import WIDTHS_OF_STATES
from perf_model.training_run.job import DEFAULT_SUB_GROUP_SIZE
from perf_model.training_run.model import ModelError
from perf_model.training_run.training_memory import SCORE_BYTES
from perf_model.units import GB

PICTURES = (".png", ".svg", ".pdf")

LIST_HELP = "list the presets of machines with their figures, and exit"


class CommandParser(argparse.ArgumentParser):
    """A parser that reports an error in two lines, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Print ``message`` and the remedy to stderr, and exit with code 2."""
        self.exit(2, f"{self.prog}: error: {message}\nFor all options, run: {self.prog} --help\n")


def installed_version() -> str | None:
    try:
        return metadata.version("deep_opt_states")
    except metadata.PackageNotFoundError:
        return None


def interruptible(main: Callable[[Sequence[str] | None], int]) -> Callable[..., int]:
    """Wrap the main function of a program, so that Ctrl-C ends it with one line on stderr and the exit code 130."""

    @wraps(main)
    def run(arguments: Sequence[str] | None = None) -> int:
        try:
            return main(arguments)
        except KeyboardInterrupt:
            print("\nInterrupted by Ctrl-C.", file=sys.stderr)
            return 128 + signal.SIGINT

    return run


def new_program(prog: str, description: str) -> tuple[CommandParser, argparse._SubParsersAction[CommandParser]]:
    """Return the parser of a program, whose option ``run`` executes the command, and the parsers of its commands."""
    parser = CommandParser(prog=prog, description=description)
    parser.add_argument("--version", action="version", version=installed_version() or "not installed")
    parser.add_argument("--list", action=_ListMachines, nargs=0, help=LIST_HELP)
    parser.set_defaults(run=lambda _: parser.print_help())
    commands = parser.add_subparsers(metavar="command")
    _add_plan(commands)
    _add_sweep(commands)
    _add_cluster(commands)
    return parser, commands


def _add_plan(commands: argparse._SubParsersAction[CommandParser]) -> None:
    about = "find the plan with the least exposed update time, and compare it with the alternatives"
    plan = _add_command(commands, "plan", about)
    add, ranks = plan.add_argument, plan.add_mutually_exclusive_group()
    ranks.add_argument("--world-size", type=int, help="ranks, one per GPU")
    ranks.add_argument("--nodes", type=int, help="nodes, instead of --world-size; default: 1")
    _add_accumulation_and_states(plan)
    add("--micro-batch", type=int, default=1, help="sequences in one micro-batch of a rank; default: %(default)s")
    tensor_parallel = "ranks of a node that divide the matrices of each layer (AutoTP); default: %(default)s"
    add("--tensor-parallel", type=int, default=1, metavar="RANKS", help=tensor_parallel)
    _add_limits(plan)
    add("--json", action="store_true", help="print JSON; host and pinned bytes are per node")
    add("--units", action="store_true", help="print the units with their placements")
    explain = "print for each group of units the resource that it fills, and the effect of one more GB or core"
    add("--explain", action="store_true", help=explain)
    timeline = f"write the predicted timeline: a Chrome trace (.json) or a picture ({', '.join(PICTURES)})"
    add("--timeline", type=_timeline_file, metavar="FILE", help=timeline)


def _add_sweep(commands: argparse._SubParsersAction[CommandParser]) -> None:
    sweep = _add_command(commands, "sweep", "plan for several numbers of GPUs and micro-batches")
    sweep.add_argument("--world-sizes", type=_positive_integers, required=True, help="for example 1,2,4,8")
    sweep.add_argument("--micro-batches", type=_positive_integers, required=True, help="for example 1,2,4")
    _add_limits(sweep)
    _add_accumulation_and_states(sweep)
    sweep.set_defaults(tensor_parallel=1)
    sweep.add_argument("--csv", type=Path, help="the file to write the rows to")


def _add_cluster(commands: argparse._SubParsersAction[CommandParser]) -> None:
    about = "compare tensor-parallel sizes, micro-batches and accumulation for a global batch on a cluster"
    cluster = _add_command(commands, "cluster", about)
    add, ranks = cluster.add_argument, cluster.add_mutually_exclusive_group(required=True)
    ranks.add_argument("--gpus", type=int, help="all GPUs of the cluster, one rank each")
    ranks.add_argument("--nodes", type=int, help="nodes, instead of --gpus")
    add("--global-batch", type=int, required=True, help="sequences per iteration, over all GPUs")
    tokens = partial(_number, what="a number of tokens", low=1, high=1e18)
    add("--tokens", type=tokens, help="tokens to train on, for days and GPU-hours; for example 300e9")
    sizes = "tensor-parallel sizes to compare; default: powers of two inside a node"
    add("--tensor-parallel", type=_positive_integers, dest="tensor_parallel_sizes", metavar="SIZES", help=sizes)
    micro = "micro-batches to compare, in sequences, or 'auto', the default: all that divide the global batch"
    add("--micro-batches", type=_positive_integers_or_auto, metavar="SIZES", help=micro)
    inside = "rate at which one GPU receives from others of its node; default: as in the profile, or the link's rate"
    add("--node-gb-per-s", type=_type_of("network_gb_per_s"), metavar="GB", help=inside)
    cluster.set_defaults(tensor_parallel=1, accumulation=1, states="fp32")
    _add_limits(cluster)
    add("--json", action="store_true", help="print JSON; host bytes are per node")


def _add_command(commands: argparse._SubParsersAction[CommandParser], name: str, about: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
    parser.set_defaults(run=partial(_exit_code, name))
    add = parser.add_argument
    profile = "the machine: a JSON file written by 'deep-opt-states profile', or a preset: "
    add("--profile", required=True, help=profile + ", ".join(MACHINES))
    add("--list", action=_ListMachines, nargs=0, help=LIST_HELP)
    for key, figure in FIGURES.items():
        metavar, about = None if key == "cores" else "GB", f"{figure.meaning}; default: as in the preset"
        add(f"--{key.replace('_', '-')}", type=_type_of(key), metavar=metavar, help=about)
    model = parser.add_mutually_exclusive_group(required=True)
    named = "a config.json of Hugging Face, a folder with one, a name in the cache of Hugging Face, or a preset: "
    model.add_argument("--model", help=named + ", ".join(MODELS))
    model.add_argument("--params", type=_parameters, metavar="N", help="a dense model with N parameters, as in 7B")
    for name, meaning in (("layers", "number of layers"), ("hidden", "hidden size")):
        about = f"{meaning} with --params; default: plausible for the number of parameters"
        add(f"--{name}", type=int, help=about)
    share = "a list of layers that share their parameters, such as model.layers: the pseudo stage of Pseudo-to-Real"
    add("--share-layers", metavar="PATH", help=share)
    every = "with --share-layers: layer i has the parameters of layer i %% N; default: 1"
    add("--every", type=int, metavar="N", help=every)
    ranks = "ranks that share a host, one per GPU; default: all, at most 8, and 1 with --nodes"
    add("--ranks-per-node", "--gpus-per-node", type=int, metavar="RANKS", help=ranks)
    add("--sequence", type=int, default=2048, help="tokens per sequence; default: %(default)s")
    offload_param = "keep the 16-bit parameters in host memory (offload_param: cpu); default: on the GPU"
    add("--offload-param", action="store_true", help=offload_param)
    trainable = "share of the parameters that is trained, such as 0.01 with LoRA; default: %(default)g, all"
    add("--trainable-share", type=float, default=1.0, metavar="SHARE", help=trainable)
    add("--no-recompute", action="store_true", help="keep activations, instead of recomputing them in backward")
    attention = "the kernels of attention: all but flash keep the scores in GPU memory; default: flash"
    add("--attention", choices=tuple(SCORE_BYTES), default="flash", help=attention)
    return parser


def _add_accumulation_and_states(parser: argparse.ArgumentParser) -> None:
    accumulation = "micro-batches per step, with one update; default: %(default)s"
    parser.add_argument("--accumulation", type=int, default=1, help=accumulation)
    states = "master weights and moments: fp32, bf16 masters, or both bf16 (keys of DeepSpeed's bf16); default: fp32"
    parser.add_argument("--states", choices=tuple(WIDTHS_OF_STATES), default="fp32", help=states)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add, gigabytes = parser.add_argument, partial(_bytes, least_gb=1e-9)
    memory = "the whole memory of a GPU, and not the key gpu_memory_gb of the config; default: as in the profile"
    add("--gpu-memory-gb", type=gigabytes, help=memory)
    margin = f"GPU memory that the plan leaves free, as training does; default: {GPU_MARGIN_BYTES / GB:.0f}"
    add("--gpu-memory-margin-gb", type=partial(_bytes, least_gb=0), help=margin)
    add("--host-memory-gb", type=gigabytes, help="host memory per node; default: as in the profile")
    nvme = "GB/s that the node's disks read and write (and both together), for states that do not fit into host memory"
    add("--nvme", type=_rates, metavar="READ,WRITE[,BOTH]", help=f"{nvme}; default: no disks")
    add("--pinned-memory-gb", type=gigabytes, help="page-locked host memory per rank; default: unlimited")
    eager = "host memory per rank for eager units, 0 for none; default: half of the memory that is left"
    add("--eager-memory-gb", type=partial(_bytes, least_gb=0), help=eager)
    sub_group_size = f"sub_group_size of the DeepSpeed config; default: DeepSpeed's, {DEFAULT_SUB_GROUP_SIZE}"
    add("--sub-group-size", type=int, help=sub_group_size)
    rules = 'a JSON list of rules by name, as in "placement" of the config; default: everything is planned'
    add("--rules", type=Path, metavar="FILE", help=rules)
    add("--unit-size", type=int, help="parameters per unit of a rank, at most; default: the best of several sizes")
    overlap = "the phases that the update is overlapped with; default: both, as in training"
    add("--overlap", choices=("none", "backward", "forward", "both"), default="both", help=overlap)


class _ListMachines(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        headers = ("preset", "GPU", "GPU GB", "peak TFLOPS", "link GB/s", "peers GB/s", "network GB/s")
        rows = []
        for preset in MACHINES.values():
            figures = (
                preset.gpu_memory_bytes / GB,
                preset.peak_flops / 1e12,
                REACHED_SHARE * preset.link_bytes_per_s / GB,
                preset.peer_bytes_per_s / GB,
                preset.network_bytes_per_s / GB,
                preset.cores,
                preset.host_bytes_per_s / GB,
                preset.host_memory_bytes / GB,
            )
            rows.append((preset.name, preset.gpu, *(f"{figure:,.4g}" for figure in figures)))
        for table in tables((*headers, "cores", "host GB/s", "host GB"), rows, 1, left=headers[:2]):
            show(table)
        names = ", ".join(f"{alias} is {name}" for alias, name in ALIASES.items())
        print(f"\nLink, peers and network are per GPU and direction, cores and host per node. {names}.\nSources:")
        for preset in MACHINES.values():
            print(f"  {preset.name}: {preset.source}")
        parser.exit()


def _exit_code(name: str, options: argparse.Namespace) -> int:
    """Return the exit code: 1 if nothing fits or the reader of stdout has closed it, 2 for unusable input."""
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


def _type_of(key: str) -> Callable[[str], float]:
    """Return the type of an option with a figure of a machine."""
    kind, (low, high, *_) = int if key == "cores" else float, FIGURES[key]
    return partial(_number, what="a whole number" if key == "cores" else "a number", low=low, high=high, kind=kind)


def _number(text: str, what: str, low: float, high: float, kind: Callable[[str], float] = float) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"must be {what} from {low:g} to {high:g}, found {shorten(text)}")
    return value


def _bytes(text: str, least_gb: float) -> int:
    return int(GB * _number(text, "a number of GB (10^9 bytes)", least_gb, 1e9))


def _rates(text: str) -> DiskRates:
    rates = [GB * _number(rate, "rates in GB/s, as in 6.5,5, each", 0.01, 1e4) for rate in text.split(",")]
    if len(rates) == 2:
        return DiskRates.one_after_the_other(*rates)
    if len(rates) != len(DiskRates._fields):
        raise argparse.ArgumentTypeError(f"must be two or three rates in GB/s, as in 6.5,5, found {shorten(text)}")
    return DiskRates(*rates)


def _parameters(text: str) -> int:
    what, exponents = "a whole number of parameters such as 7B, 500M or 32e9,", {"M": "e6", "B": "e9", "T": "e12"}
    written_out = re.sub(r"(?<=[0-9.])[MBT]$", lambda unit: exponents[unit[0].upper()], text, flags=re.IGNORECASE)
    value = _number(written_out, what, 1, 1e15)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"must be {what} found {shorten(text)}")
    return int(value)


def _timeline_file(text: str) -> Path:
    if (path := Path(text)).suffix not in (".json", *PICTURES):
        raise argparse.ArgumentTypeError(f"must end with .json, {', '.join(PICTURES)}, found {shorten(text)}")
    return path


def _positive_integers(text: str) -> list[int]:
    if not re.fullmatch(r"\s*0*[1-9][0-9]*\s*(,\s*0*[1-9][0-9]*\s*)*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"must be positive integers separated by commas, found {shorten(text)}")
    return [int(part) for part in text.split(",")]


def _positive_integers_or_auto(text: str) -> list[int] | None:
    return None if text == "auto" else _positive_integers(text)
