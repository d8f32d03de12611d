"""Keep quick profiles in the user's cache folder, by fingerprint, so that only the first training run measures."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from deep_opt_states.device.interface import Device
from deep_opt_states.files import replace_file
from deep_opt_states.host import machine
from deep_opt_states.profiler.profile import IMPLAUSIBLE, QUICK, ProbeEffort, describe, measure
from deep_opt_states.profiler.ranks import Ranks, call_on_all_ranks, ranks_by_node
from deep_opt_states.waiting import waiting
from perf_model.prediction.hardware import VERSION, HardwareProfile, ProfileError, Provenance

METHOD = 10
"""The version of the method. Increase it when a probe measures something else, to discard cached profiles."""


def quick_profile(
    device: Device[Any] | None,
    ranks: Ranks,
    log: Callable[[str], None],
    note: Callable[[str], None],
    *,
    threads: int,
    cores: Sequence[int] = (),
    effort: ProbeEffort = QUICK,
) -> HardwareProfile:
    """Return rank 0's cached profile of an equal machine, or one that all ranks measure now, the same on all ranks.

    This is a collective, and raises the same errors as ``measure``. On rank 0, ``note`` is called with the source of
    the profile, and ``log`` if it is not cached. A profile with implausible samples is not cached.
    """
    on_node = max(map(len, ranks_by_node(ranks, os.environ)))

    def look_up() -> tuple[Path | None, str | None]:
        if ranks.rank > 0:
            return None, None
        # A quantity that was waived without Triton is measured after its installation.
        works_with = f"{type(device).__qualname__} {triton_version()} {'pinned threads' if cores else ''}"
        here = describe(on_accelerator=device is not None, ranks_on_node=on_node, threads=threads)
        path = cached_path(fingerprint(here, effort, ranks.size, works_with), os.environ)
        return path, _read(path)

    path, found = ranks.gather(call_on_all_ranks(ranks, look_up))[0]
    if found is not None:
        profile = HardwareProfile.from_json(found)
        if ranks.rank == 0:
            note(f"Hardware profile of {profile.provenance.date}, read from {path}.")
        return profile
    with waiting("measuring a quick hardware profile") if ranks.rank == 0 else nullcontext():
        profile = measure(device, ranks, effort, threads=threads, cores=cores)
    if ranks.rank == 0:
        note("A quick hardware profile was measured.")
        _store(profile, path, log)
    return profile


def triton_version() -> str:
    """Return the version of Triton, or an empty string if it is not installed."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""


def fingerprint(provenance: Provenance, effort: ProbeEffort, world_size: int, works_with: str) -> str:
    """Return a hash of everything that may change the measured values: hardware, limits, software, ranks and method."""
    gpu = machine.gpu() if provenance.gpu else None
    facts: dict[str, Any] = {
        # Equal nodes with a common home directory share their profiles.
        "provenance": asdict(replace(provenance, date="", host="")),
        "world_size": world_size,
        "host_memory_bytes": machine.memory().usable_bytes,
        "last_level_cache_bytes": machine.last_level_cache_bytes(),
        "gpu_memory_bytes": gpu.total_memory if gpu else None,
        "works_with": works_with,
        "effort": asdict(effort),
        "versions": [VERSION, METHOD],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def cached_path(fingerprint: str, environ: Mapping[str, str]) -> Path | None:
    """Return the path of the cached profile with this fingerprint, or None for a user without a home folder."""
    # The XDG specification requires that a relative path is ignored.
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            return None
    return base / "deep_opt_states" / f"{fingerprint}.json"


def _read(path: Path | None) -> str | None:
    try:
        return None if path is None else HardwareProfile.read(path).to_json()
    except ProfileError:
        return None


def _store(profile: HardwareProfile, path: Path | None, log: Callable[[str], None]) -> None:
    waivers = {name: found.waived or "" for name, found in profile.measurements.items()}
    implausible = [name for name, why in waivers.items() if why.startswith(IMPLAUSIBLE)]
    if path is None:
        log("The hardware profile is not cached: this user has no home folder, and XDG_CACHE_HOME is not set.")
    elif implausible:
        log(
            f"The hardware profile is not cached, and the next start measures again: {', '.join(implausible)} had "
            f"implausible samples. Is there other load on this machine? deep-opt-states profile shows every quantity."
        )
    else:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, profile.to_json())
        except OSError as error:
            log(f"The hardware profile is not cached: {error}. Set XDG_CACHE_HOME to a folder that can be written.")
