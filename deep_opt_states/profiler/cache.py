"""Keep quick profiles in the user's cache folder, by fingerprint, so that only the first training run measures."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deep_opt_states.device.interface import Device
from deep_opt_states.device.kernels.adam import AdamKernel
from deep_opt_states.device.kernels.triton_import import triton_version
from deep_opt_states.files import replace_file
from deep_opt_states.profiler.adam_kernels import CpuAdamFactory, training_cpu_adam, training_gpu_adam
from deep_opt_states.profiler.measure import implausible_quantities, measure
from deep_opt_states.profiler.method import QUICK, ProbeEffort
from deep_opt_states.profiler.provenance import describe, fingerprint, smallest_node
from deep_opt_states.profiler.ranks import Ranks, call_on_all_ranks
from perf_model.prediction.hardware import HardwareProfile, ProfileError


def quick_profile(
    device: Device[Any] | None,
    ranks: Ranks,
    log: Callable[[str], None],
    note: Callable[[str], None],
    *,
    threads: int,
    cores: Sequence[int] = (),
    cpu_adam: CpuAdamFactory = training_cpu_adam,
    device_adam: Callable[[], AdamKernel] = training_gpu_adam,
    effort: ProbeEffort = QUICK,
) -> HardwareProfile:
    """Return rank 0's cached profile of an equal machine, or one that all ranks measure now; the same on all ranks.

    This is a collective. ``log`` and ``note`` are called on rank 0 only: ``note`` with the path of a cached profile,
    which can be logged later. The other parameters and the errors raised are those of ``measure``; the cache itself
    raises nothing. A profile with implausible samples is used, and not cached: the next training run measures again,
    perhaps without other load on the machine.
    """
    node = smallest_node(ranks, os.environ)

    def look_up() -> tuple[Path | None, str | None]:
        if ranks.rank > 0:
            return None, None
        names = map(_name, (type(device), cpu_adam, device_adam))
        # Triton's version is included so that a quantity waived without Triton is measured after its installation.
        works_with = " ".join([*names, triton_version(), "pinned threads" if cores else ""])
        provenance = describe(on_accelerator=device is not None, node=node, threads=threads)
        path = cached_path(fingerprint(provenance, node, effort, ranks.size, works_with), os.environ)
        return path, _read(path)

    path, found = call_on_all_ranks(ranks, look_up)
    found = ranks.gather(found)[0]
    if found is not None:
        profile = HardwareProfile.from_json(found)
        if ranks.rank == 0:
            note(f"Hardware profile of {profile.provenance.date}, read from {path}.")
        return profile
    if ranks.rank == 0:
        log("There is no hardware profile for this machine yet: measuring a quick one.")
    profile = measure(device, ranks, effort, threads=threads, cores=cores, cpu_adam=cpu_adam, device_adam=device_adam)
    if ranks.rank == 0:
        _store(profile, path, log)
    return profile


def cached_path(fingerprint: str, environ: Mapping[str, str]) -> Path | None:
    """Return the path of the cached profile with this fingerprint, or None for a user without a home folder."""
    # By the XDG specification, a relative path must be ignored.
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            return None
    return base / "deep_opt_states" / f"{fingerprint}.json"


def _read(path: Path | None) -> str | None:
    """Return the text of the profile, or None if there is no profile that can be used."""
    if path is None:
        return None
    try:
        return HardwareProfile.read(path).to_json()
    except ProfileError:
        return None


def _store(profile: HardwareProfile, path: Path | None, log: Callable[[str], None]) -> None:
    if path is None:
        log("The hardware profile is not cached: this user has no home folder, and XDG_CACHE_HOME is not set.")
        return
    if implausible := implausible_quantities(profile):
        log(
            f"The hardware profile is not cached, and the next start measures again: {', '.join(implausible)} had "
            f"implausible samples. Is there other load on this machine? deep-opt-states profile shows every quantity."
        )
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, profile.to_json())
    except OSError as error:
        log(f"The hardware profile is not cached: {error}. Set XDG_CACHE_HOME to a folder that can be written.")


def _name(definition: Any) -> str:
    return f"{definition.__module__}.{definition.__qualname__}"
