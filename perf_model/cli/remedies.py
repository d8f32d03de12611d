"""Search changes of a job, alone and in pairs, with which it fits on the same machine, and sort them by their cost."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import combinations, islice, product
from typing import Any

from perf_model.cli.inputs import Inputs
from perf_model.prediction.cost import DiskRates
from perf_model.prediction.memory import DoesNotFit
from perf_model.schedule.host_layout import WIDTHS_OF_STATES
from perf_model.training_run.model import ModelError
from perf_model.training_run.training_memory import TrainingMemory
from perf_model.units import DIGITS, GB, significant

LEAST_SEQUENCE = 256
"""Shorter sequences are not suggested."""

MOST_HALVINGS = 10

ASSUMED_DISK = DiskRates.one_after_the_other(6.5 * GB, 5 * GB)
"""The rates of the disks of a node, by the specification of an SSD with PCIe 4."""

Changes = dict[str, Any]
"""Fields of ``Job`` with their new values."""


def remedy_for(error: DoesNotFit, inputs: Inputs) -> str:
    """Return the changes with which the job fits, those with most tokens per second first, and the limits to raise."""
    job, alone = inputs.job, str(error).partition("\n")[2]
    # The rest of a GPU's training does not take host memory, and page-locked memory is for the optimizer alone.
    of_training = "gpu_bytes" if inputs.profile.has_accelerator else "host_bytes"
    is_of_training = of_training in error.missing
    found = sorted(_fitting(inputs, error.missing, of_training=is_of_training), key=lambda each: -each[1])
    if job.world_size > job.ranks_on_node:
        # More machines cost more than any change of the job.
        more = ({"world_size": job.world_size * 2**power} for power in range(1, MOST_HALVINGS))
        found += islice(((changes, tokens) for changes in more if (tokens := _tokens_per_s(inputs, changes))), 1)
    if not found:
        tried = "No shorter sequence, smaller micro-batch or recomputation makes it fit, nor --offload-param on a GPU."
        others = "The optimizer's states take that memory: no shorter sequence or smaller micro-batch helps."
        return f"{tried if is_of_training else others}\n{alone}"
    lines = (f"  {_spelled(changes)}: {significant(tokens, DIGITS)} tokens/s" for changes, tokens in found)
    rounded = " (bf16 states change the numerics of training)" if any("states" in each for each, _ in found) else ""
    return "\n".join((f"It fits with{rounded}:", *lines, alone))


def _fitting(inputs: Inputs, missing: Collection[str], *, of_training: bool) -> Iterator[tuple[Changes, float]]:
    """Yield each change that fits, alone or with a second one, in its mildest form, with the tokens per second.

    Unless memory ``of_training`` is ``missing``, only smaller states and disks help.
    """
    job, halvings = inputs.job, range(1, MOST_HALVINGS)
    widths = WIDTHS_OF_STATES[job.states]
    may_use_disk = "host_bytes" in missing and job.disk is None and inputs.profile.has_accelerator
    disk = DiskRates(*(rate / job.ranks_on_node for rate in ASSUMED_DISK))
    levels: list[list[Changes]] = [
        [{"states": name} for name, each in WIDTHS_OF_STATES.items() if each.states < widths.states],
        [{"disk": disk}] if may_use_disk else [],
    ]
    if of_training:
        levels += [
            [{"sequence": short} for power in halvings if (short := job.sequence >> power) >= LEAST_SEQUENCE],
            [{"micro_batch": small} for power in halvings if (small := job.micro_batch >> power) >= 1],
            [] if job.offload_param or not inputs.profile.has_accelerator else [{"offload_param": True}],
            [] if job.recompute else [{"recompute": True}],
        ]
    for number, of_one_kind in enumerate(levels):
        for level, changes in enumerate(of_one_kind):
            if tokens := _tokens_per_s(inputs, changes):
                yield changes, tokens
                # With a second change, only milder forms are of use.
                levels[number] = of_one_kind[:level]
                break
    for one, other in combinations(levels, 2):
        for first, second in sorted(product(one, other), key=lambda pair: one.index(pair[0]) + other.index(pair[1])):
            if tokens := _tokens_per_s(inputs, first | second):
                yield first | second, tokens
                break


def _tokens_per_s(inputs: Inputs, changes: Changes) -> float | None:
    try:
        changed, limits = replace(inputs, job=replace(inputs.job, **changes)), inputs.limits
        left = None if limits.gpu is None else limits.gpu - limits.gpu_margin
        # Planning would take seconds to find that nothing fits.
        if inputs.profile.has_accelerator and left is not None and TrainingMemory(changed.job).gpu_bytes > left:
            return None
        return changed.forecast().predicted.tokens_per_s
    except (DoesNotFit, ModelError):
        return None


def _spelled(changes: Changes) -> str:
    """Return the options of ``plan`` that make the changes."""
    if ranks := changes.get("world_size"):
        return f"{ranks} ranks (--world-size or --nodes)"
    spelled = {
        "recompute": "(without --no-recompute)",
        "offload_param": "--offload-param",
        "disk": "--nvme 6.5,5 (assumed GB/s of a disk, read and written)",
    }
    return " ".join(spelled.get(name, f"--{name.replace('_', '-')} {value}") for name, value in changes.items())
