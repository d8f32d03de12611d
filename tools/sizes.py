"""Predict sizes of models that people train, for docs/sizes.md: one table row for each line of ``plan``."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from perf_model.cli.inputs import Inputs, read_inputs
from perf_model.cli.planning_commands import new_program
from perf_model.prediction.memory import DoesNotFit, MemoryUse
from perf_model.training_run.forecast import Forecast, Infeasible, Outcome
from perf_model.training_run.micro_batch import NO_OVERHEADS, PARAM_BYTES, Network, Overheads, PhaseRates
from perf_model.units import DIGITS, seconds, significant, size

SSD_GB_PER_S = (6.5, 5.0)
"""The rates at which one SSD with PCIe 4 reads and writes, as in docs/planning.md."""

GIB = 2**30

COLUMNS = (
    *("Model", "Host memory", "States", "Iteration", "Tokens/s", "GPU", "Host", "Disk"),
    *("Iteration, stock", "Tokens/s, stock", "GPU, stock", "Host, stock"),
)


class Machine(NamedTuple):
    """GPUs of one host, and what is trained on them. Without ``host_gib``, the host has the memory of the preset."""

    title: str
    profile: str
    models: Sequence[str]
    gpus: int = 1
    host_gib: Sequence[int | None] = (None,)


MACHINES = (
    Machine(
        title="7B on one RTX 4090 (24 GB)",
        profile="rtx4090",
        models=("Qwen2.5-7B", "Llama-2-7B", "Mistral-7B"),
        host_gib=(64, 96, 128),
    ),
    Machine(title="8B on one H100 (80 GB)", profile="h100", models=("Llama-3-8B",)),
    Machine(title="14B and 32B on one H200", profile="h200", models=("Qwen2.5-14B", "Qwen2.5-32B")),
    Machine(title="70B on eight H100s", profile="h100", models=("Llama-3-70B",), gpus=8),
)

FROM_STAGE_2 = (
    ("rtx4090", 1, "Qwen2.5-7B"),
    ("rtx4090", 8, "Qwen2.5-7B"),
    ("h100", 1, "Llama-3-8B"),
    ("h100", 8, "Llama-3-8B"),
    ("h100", 8, "Qwen2.5-32B"),
    ("h100", 8, "Llama-3-70B"),
)
"""Preset, GPUs and model of each row about ZeRO-2."""


def sizes_tables() -> str:
    """Return a table for each machine, with the command of its first row. This takes a minute."""
    return "\n\n".join("\n".join(_table(machine)) for machine in MACHINES)


def _table(machine: Machine) -> Iterator[str]:
    lines = list(commands(machine))
    yield f"### {machine.title}\n\n    deep-opt-states {lines[0]}\n"
    yield f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
    yield from filter(None, map(table_row, lines))


def commands(machine: Machine) -> Iterator[str]:
    """Yield the command lines: fp32 states, bf16 states, and fp32 states with disks."""
    disks = ",".join(f"{machine.gpus * rate:g}" for rate in SSD_GB_PER_S)
    for model in machine.models:
        for host_gib in machine.host_gib:
            host = "" if host_gib is None else f" --host-memory-gb {host_gib * GIB / 1e9:.1f}"
            ranks = f" --world-size {machine.gpus}" if machine.gpus > 1 else ""
            command = f"plan --profile {machine.profile} --model {model}{ranks}{host} --accumulation 8"
            yield from (command, f"{command} --states bf16", f"{command} --nvme {disks}")


def table_row(command: str) -> str:
    """Return the row of a command, empty if no states are on its disks. Parameters are on the host if they must be."""
    cells = _cells(command)
    return f"| {' | '.join(cells)} |" if cells else ""


def _cells(command: str) -> list[str]:
    inputs = _inputs(command)
    job, limits = inputs.job, inputs.limits
    states = "fp32, NVMe" if job.disk else job.states
    found = _forecast(command)
    if isinstance(found, DoesNotFit) and "gpu_bytes" in found.missing:
        found, states = _forecast(f"{command} --offload-param"), f"{states}, `offload_param`"
    row = [job.shape.name, size(limits.host or 0), states]
    if isinstance(found, DoesNotFit):
        per_machine = {"gpu_bytes": 1, "host_bytes": job.ranks_on_node}
        shortfall = " and ".join(
            f"{size(per_machine[name] * missing, DIGITS)} of {name.partition('_')[0]} memory"
            for name, missing in found.missing.items()
        )
        return [*row, f"does not fit: lacks {shortfall}", *[""] * 4, "does not fit", *[""] * 3]
    if job.disk and not found.disk_bytes:
        return []
    disk = size(found.disk_bytes, DIGITS) if found.disk_bytes else ""
    ours, stock = (found.predicted, found.memory), (found.baselines["stock"], found.memory_of_stock)
    return [*row, *_outcome(*ours), disk, *_outcome(*stock)]


def _outcome(outcome: Outcome, memory: MemoryUse) -> list[str]:
    sizes = [size(memory.gpu_bytes, DIGITS), size(memory.host_bytes)]
    if isinstance(outcome, Infeasible):
        return [outcome.reason.partition(":")[0], "", *sizes]
    return [seconds(outcome.iteration_s, DIGITS), significant(outcome.tokens_per_s, DIGITS), *sizes]


def _inputs(command: str) -> Inputs:
    parser, _ = new_program("deep-opt-states", "")
    options = parser.parse_args(shlex.split(command))
    [inputs] = read_inputs(options, (options.world_size, options.micro_batch))
    return inputs


def _forecast(command: str) -> Forecast | DoesNotFit:
    try:
        return _inputs(command).forecast()
    except DoesNotFit as error:
        return error


def from_stage_2_table() -> str:
    """Return one row for each model and machine: what ZeRO-3 does with parameters, and its time without update."""
    rows = ["| Model | GPUs | Parameters per GPU, ZeRO-2 | ZeRO-3 | Gathered | Forward and backward | Arithmetic |"]
    rows.append("|---|---|---|---|---|---|---|")
    for preset, gpus, model in FROM_STAGE_2:
        inputs = _inputs(f"plan --profile {preset} --model {model} --world-size {gpus}")
        work, whole = inputs.job.work, PARAM_BYTES * inputs.job.shape.numel
        rates = PhaseRates.from_profile(inputs.profile, gpus, Overheads.from_profile(inputs.profile).of_plugin)
        alone = replace(rates, network=Network(ranks_per_node=gpus), overheads=NO_OVERHEADS)
        times = [seconds(work.forward_s(each) + work.backward_s(each), DIGITS) for each in (rates, alone)]
        gathered = size(2 * whole * (gpus - 1) / gpus) if gpus > 1 else "nothing"
        cells = (model, f"{gpus} x {inputs.profile.provenance.gpu}", size(whole), size(whole / gpus), gathered, *times)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)
