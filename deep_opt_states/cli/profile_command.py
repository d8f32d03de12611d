"""Measure this machine with a progress bar, write the profile and print it."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import track
from rich.text import Text

from deep_opt_states.config import Unsupported
from deep_opt_states.files import replace_file
from deep_opt_states.profiler.disk import doubts, measure_quantities
from deep_opt_states.profiler.probes import ProbeError
from deep_opt_states.profiler.profile import FULL, QUICK, measure
from deep_opt_states.profiler.ranks import call_on_all_ranks, collective_groups, launched_ranks
from deep_opt_states.profiler.training_step import measure_training
from perf_model.cli.screen import new_table, progress, show
from perf_model.prediction.hardware import HardwareProfile, Measurement, ProfileError

if TYPE_CHECKING:
    from deep_opt_states.zero.start.devices import AcceleratorChoice

UNITS = {
    "_bytes_per_s": {1e9: "GB/s"},
    "_params_per_s": {1e6: "M params/s"},
    "_flops_per_s": {1e12: "TFLOP/s", 1e9: "GFLOP/s"},
    "_threads": {1.0: "threads"},
    "_s": {1e-6: "us"},
}
"""Units by scale, the largest first, by the end of the name of a quantity; the first that matches counts."""


def run(options: argparse.Namespace) -> int:
    """Write and print the profile on rank 0, and return the exit code: 1, with the reason on stderr, if it fails."""
    output: Path = options.output
    is_rank_0 = os.environ.get("RANK", "0") == "0"
    prints_errors = True
    try:
        # Before the ranks have connected, an error ends this process, and the launcher ends the other ranks.
        if is_rank_0:
            check_output(output)
        with progress("Loading DeepSpeed"):
            from deepspeed.accelerator import get_accelerator

            from deep_opt_states.zero.start.node_share import core_share
        accelerator = _accelerator(int(os.environ.get("LOCAL_RANK", "0")))
        # The CPU accelerator has no memory of its own.
        device = None if accelerator.slots_on_host else accelerator.device
        shows_bar = is_rank_0 and sys.stderr.isatty()
        bar = partial(track, description="Measuring", console=Console(stderr=True), disable=not shows_bar)
        with launched_ranks(os.environ) as ranks:
            # From here on, an error is raised on all ranks.
            prints_errors = is_rank_0
            num_ranks = ranks.size
            share = core_share(accelerator, ranks)
            found = ranks.gather(call_on_all_ranks(ranks, lambda: doubts(options.nvme)))
            for doubt in sorted(set(chain(*found))) if is_rank_0 else []:
                print(doubt)
            groups = collective_groups(ranks, get_accelerator().communication_backend_name(), os.environ)
            measure_with = partial(measure, device, ranks, QUICK if options.quick else FULL, progress=bar)
            profile = measure_with(threads=share.threads, cores=share.cores, groups=groups)
            for measure_steps in [] if options.quick else bar([measure_training], description="Training a few layers"):
                profile = replace(profile, measurements={**profile.measurements, **measure_steps(ranks)})
            for measure_disk in bar([measure_quantities], description="Reading and writing") if options.nvme else []:
                on_disk = measure_disk(ranks, options.nvme)
                profile = replace(profile, measurements={**profile.measurements, **on_disk})
        if is_rank_0:
            replace_file(output, profile.to_json())
    except (ProfileError, ProbeError, Unsupported, OSError) as error:
        if prints_errors:
            print(error, file=sys.stderr)
        return 1
    if is_rank_0:
        _print(profile, num_ranks)
        print(f"Written: {output}")
    return 0


def check_output(path: Path) -> None:
    """Raise ``ProfileError`` if no profile can be written to ``path``: check before the long measurement."""
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "not a regular file")
        # Permissions do not show that a file system is full or read-only.
        trial = path.with_name(f".{path.name}.{os.getpid()}")
        replace_file(trial, "")
        trial.unlink()
    except OSError as error:
        raise ProfileError(
            f"--output: must be a file, to be written or replaced, in a folder that can be written; found {path}: "
            f"{error.strerror}.\nGive another path, or make the folder and let this user write in it."
        ) from error


def _accelerator(local_rank: int) -> AcceleratorChoice:
    """Choose the accelerator of this rank. Raise ``ProfileError`` if there are fewer GPUs than ranks."""
    from deepspeed.accelerator import get_accelerator

    from deep_opt_states.zero.start.devices import choose_device

    accelerator = get_accelerator()
    if accelerator.device_name() == "cuda":
        count = accelerator.device_count()
        if local_rank >= count:
            raise ProfileError(
                f"LOCAL_RANK: must be less than the number of GPUs, {count}; found {local_rank}.\n"
                f"Start at most one rank per GPU on this machine."
            )
        accelerator.set_device(local_rank)
    return choose_device()


def _print(profile: HardwareProfile, num_ranks: int) -> None:
    origin = profile.provenance
    show(f"{origin.host}: {origin.cpu}, {origin.cores} cores in use")
    if num_ranks > 1:
        nodes = f" (of {num_ranks}; the ranks of a node load that node only)" if num_ranks > origin.ranks else ""
        show(f"{origin.ranks} ranks together on each node{nodes}; each figure is of the slowest rank")
    show(f"{origin.gpu or 'no GPU'}, torch {origin.torch}, DeepSpeed {origin.deepspeed}, {origin.date}")
    table = new_table(("quantity", "median", "20th to 80th", "unit"), left=("quantity", "unit"), gap=2)
    reasons = list(dict.fromkeys(found.waived for found in profile.measurements.values() if found.waived is not None))
    for name, measurement in profile.measurements.items():
        table.add_row(*_row(name, measurement, reasons))
    show(table)
    for number, reason in enumerate(reasons, start=1):
        show(f"({number}) {reason}")
    sufficient, all_threads = profile.get("cpu_adam_threads"), origin.cores // origin.ranks
    if sufficient is not None and sufficient < all_threads:
        show(f'{sufficient:g} of {all_threads} CPU threads update at the full rate ("cpu_threads": {sufficient:g})')


def _row(quantity: str, measurement: Measurement, reasons: list[str]) -> tuple[Text, ...]:
    """Return the cells of a row, with the number of its reason for a waived quantity."""
    if measurement.waived is not None:
        return Text(quantity), Text("WAIVED", "yellow"), Text(""), Text(f"({reasons.index(measurement.waived) + 1})")
    units = next(UNITS[ending] for ending in UNITS if quantity.endswith(ending))
    scale = next((scale for scale in units if measurement.median >= scale), min(units))
    low, high = measurement.spread
    spread = f"{_figure(low / scale)} to {_figure(high / scale)}"
    return Text(quantity), Text(_figure(measurement.median / scale)), Text(spread), Text(units[scale])


def _figure(value: float) -> str:
    """Format with three significant digits, or with all digits before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
