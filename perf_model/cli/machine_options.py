"""Read the machine that a command plans for: a measured profile, a preset, or a preset with figures of the user's."""

from __future__ import annotations

import argparse
import platform
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from perf_model.json_input import printable, read_text, reason, shorten
from perf_model.prediction.hardware import ProfileError
from perf_model.presets.machines import ALIASES, MACHINES, REACHED_SHARE, MachinePreset, find_machine
from perf_model.training_run.model import ModelError
from perf_model.units import GB

_FORMAT = 'For example: preset = "rtx4090", cores = 24, host_bandwidth_gb_per_s = 60, gpus = 2.'


MAX_TOML_BYTES = 10_000
"""The size of the largest file of ``--machine``: it has seven keys at most.

The time of tomllib grows with the square of the number of parts of a dotted key: 64 kB of them take 18 s.
"""

_KEY = re.compile(r"""^[ \t]*["']?([A-Za-z0-9_-]+)["']?[ \t]*=""", re.MULTILINE)


class _Bounds(NamedTuple):
    """A figure of a machine that a user may give: its bounds, and whether it is a whole number."""

    low: float
    high: float
    whole: bool
    meaning: str


FIGURES = {
    "cores": _Bounds(1, 10**5, True, "cores of a node"),
    "host_bandwidth_gb_per_s": _Bounds(1, 2500, False, "bandwidth of a node's host memory that is reached, in GB/s"),
    "link_gb_per_s": _Bounds(0.3, 2000, False, "rate of copies between host and one GPU, per direction, in GB/s"),
    "network_gb_per_s": _Bounds(1e-3, 1e4, False, "rate at which one GPU receives from other nodes, in GB/s"),
}
"""The figures of a preset that options and the TOML file replace.

With all values between these bounds, the quantities of the profile are between their own (``QUANTITIES``) if each rank
has a core and ``MIN_HOST_GB_PER_S``.
"""

MIN_HOST_GB_PER_S = 1
"""The least bandwidth of host memory that a rank has, in GB/s."""

_COUNTS = {
    "gpus": _Bounds(1, 10**4, True, "GPUs of a node"),
    "nodes": _Bounds(1, 10**6, True, "nodes"),
}


@dataclass(frozen=True, kw_only=True)
class ChosenMachine:
    """The machine to plan for: ``preset``, or the profile in the file ``path``.

    ``gpus`` are those of a node, and ``nodes`` the number of nodes; None if neither an option nor the file has it.
    ``given`` are the names of the figures in ``FIGURES`` that the user gave instead of the preset's.
    """

    preset: MachinePreset | None
    path: Path | None
    gpus: int | None
    nodes: int | None
    given: frozenset[str]

    def ranks_per_node(self) -> int:
        """Return the ranks of a node. Raise ``ModelError`` if they are not known."""
        if self.gpus is None:
            raise ModelError(
                "--ranks-per-node: is needed to share the host among the GPUs of a node, found nothing.\n"
                'Give --ranks-per-node, or "gpus" in the file of --machine.'
            )
        return self.gpus

    def world_size(self) -> int:
        """Return the ranks of all nodes, if the command line has no --world-size. Raise ``ModelError`` if unknown."""
        if self.nodes is None:
            raise ModelError(
                "--world-size: is needed, found nothing.\nGive --nodes or --world-size, or --gpus of a cluster."
            )
        return self.nodes * self.ranks_per_node()


def read_machine(options: argparse.Namespace) -> ChosenMachine:
    """Return the machine that ``options`` name. Raise ``ProfileError`` or ``ModelError`` if they name none."""
    if (options.profile is None) == (options.machine is None):
        found = "neither" if options.profile is None else "both"
        raise ProfileError(f"--profile or --machine: exactly one is needed, found {found}.\nGive --profile h100.")
    given = {name: value for name in FIGURES if (value := getattr(options, name)) is not None}
    for name, value in given.items():
        check_figure(f"--{name.replace('_', '-')}", value, FIGURES[name])
    if options.nodes is not None:
        check_figure("--nodes", options.nodes, _COUNTS["nodes"])
    written: dict[str, Any] = {}
    if options.machine is None:
        preset = find_machine(options.profile)
    else:
        preset, written = _read_toml(options.machine)
    figures = {**written, **given}
    changes = {name: figures[name] for name in FIGURES if name in figures}
    if preset is None and changes:
        option, found = next(iter(changes)).replace("_", "-"), printable(options.profile)
        rule = f"--{option}: changes a preset, found the profile {found}"
        raise ProfileError(f"{rule}.\nLeave it out, or plan for a preset: {', '.join(MACHINES)}.")
    return ChosenMachine(
        preset=None if preset is None else _changed(preset, changes),
        path=Path(options.profile) if preset is None else None,
        gpus=written.get("gpus") if options.ranks_per_node is None else options.ranks_per_node,
        nodes=written.get("nodes") if options.nodes is None else options.nodes,
        given=frozenset(changes),
    )


def _changed(preset: MachinePreset, changes: dict[str, Any]) -> MachinePreset:
    """Return ``preset`` with these figures, and with a source that names them."""
    if not changes:
        return preset
    named = ", ".join(f"{name} {value:g}" for name, value in changes.items())
    values: dict[str, Any] = {"source": f"{preset.source}; given by the user: {named}"}
    if "cores" in changes:
        values["cores"] = changes["cores"]
    if "host_bandwidth_gb_per_s" in changes:
        values["host_bytes_per_s"] = changes["host_bandwidth_gb_per_s"] * GB
    if "link_gb_per_s" in changes:
        # A preset has the specified rate, and the user gives the rate that copies reach.
        values["link_bytes_per_s"] = changes["link_gb_per_s"] * GB / REACHED_SHARE
    if "network_gb_per_s" in changes:
        values["network_bytes_per_s"] = changes["network_gb_per_s"] * GB
    return replace(preset, **values)


def _read_toml(path: Path) -> tuple[MachinePreset, dict[str, Any]]:
    """Return the preset and the figures in the file. Raise ``ProfileError`` if it cannot be used."""
    try:
        import tomllib
    except ImportError:
        rule = f"--machine: needs Python 3.11, whose tomllib reads TOML, found Python {platform.python_version()}"
        raise ProfileError(f"{rule}.\nGive --profile and options such as --cores instead.") from None
    text = ""
    try:
        text = read_text(path, MAX_TOML_BYTES)
        found = tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else _repeated_key(text) or reason(error)
        raise ProfileError(f"--machine: must be a TOML file, found {printable(path)}: {why}.\n{_FORMAT}") from None
    bounds = {**FIGURES, **_COUNTS}
    unknown = sorted(set(found) - {"preset", *bounds})
    if unknown:
        rule = f"--machine {printable(path)}: must only have the keys preset, {', '.join(bounds)}"
        raise ProfileError(f"{rule}, found {shorten(unknown)}.\n{_FORMAT}")
    name = found.pop("preset", None)
    preset = find_machine(name) if isinstance(name, str) else None
    if preset is None:
        rule = f"--machine {printable(path)}, preset: must be one of {', '.join((*MACHINES, *ALIASES))}"
        raise ProfileError(f"{rule}, found {'nothing' if name is None else shorten(name)}.\n{_FORMAT}")
    for key, value in found.items():
        check_figure(f"--machine {printable(path)}, {key}", value, bounds[key])
    return preset, found


def _repeated_key(text: str) -> str | None:
    """Return which key a refused file gives twice, which tomllib does not name; None if no key is given twice."""
    twice = [key for key, count in Counter(_KEY.findall(text)).items() if count > 1]
    return f"the key {shorten(twice[0])} occurs twice" if twice else None


def check_figure(key: str, value: object, figure: _Bounds) -> None:
    """Raise ``ProfileError`` unless ``value`` is a number inside the bounds of ``figure``."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and figure.low <= value <= figure.high and (isinstance(value, int) or not figure.whole)):  # type: ignore[operator]
        kind = "a whole number" if figure.whole else "a number"
        rule = f"{key}: must be {kind} from {figure.low:g} to {figure.high:g}, found {shorten(value)}"
        raise ProfileError(f"{rule}.\nGive the {figure.meaning}, within these bounds.")


def list_machines() -> None:
    """Print the presets with their figures."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    headers = ("preset", "GPU", "GPU GB", "peak TFLOPS", "link GB/s", "peers GB/s", "network GB/s")
    for header in (*headers, "cores", "host GB/s", "host GB"):
        table.add_column(header, justify="left" if header in ("preset", "GPU") else "right", no_wrap=True)
    for preset in MACHINES.values():
        profile = preset.profile(1)
        assert profile.gpu_memory_bytes is not None
        figures = (
            profile.gpu_memory_bytes / GB,
            preset.peak_flops / 1e12,
            profile.rate("h2d_bytes_per_s") / GB,
            preset.peer_bytes_per_s / GB,
            preset.network_bytes_per_s / GB,
            preset.cores,
            preset.host_bytes_per_s / GB,
            preset.host_memory_bytes / GB,
        )
        table.add_row(preset.name, preset.gpu, *(f"{figure:,.4g}" for figure in figures))
    console = Console(width=140)
    console.print(table)
    names = ", ".join(f"{alias} is {name}" for alias, name in ALIASES.items())
    console.print(
        f"\nLink, peers and network are per GPU and direction, cores and host per node. {names}.\nSources:",
        highlight=False,
    )
    for preset in MACHINES.values():
        console.print(f"  {preset.name}: {preset.source}", highlight=False, markup=False, soft_wrap=True)
