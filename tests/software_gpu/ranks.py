"""Prepare a process for training on the device alongside the CPU accelerator; run the tests of a module there.

A process can load the device once, and never unload it, so that no test runs on it in the process of pytest.
"""

from __future__ import annotations

import functools
import gc
import importlib
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import deepspeed
import pytest
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from hypothesis import core, settings

import tests.tiers  # noqa: F401 (registers the profiles of Hypothesis)
from tests.fork_server import freeze_imported
from tests.ranks import on_ranks, once
from tests.software_gpu import device
from tests.software_gpu.process_group import BACKEND, register_backend
from tests.software_gpu.settings import PLAIN
from tests.zero.process_group import end_process


@contextmanager
def software_process_group() -> Iterator[None]:
    """Run the block in a process group of all ranks for both devices, and end the process when it has succeeded."""
    device.register()
    register_backend()
    # DeepSpeed's CPU accelerator returns False on some CPUs, but trains fp16 on all of them.
    get_accelerator().is_fp16_supported = lambda: True
    freeze_imported()
    deepspeed.init_distributed(dist_backend=BACKEND)
    yield
    dist.destroy_process_group()
    end_process()


def on_device(body: Callable[[], None]) -> Callable[[], None]:
    @pytest.mark.xdist_group(f"{body.__module__} on the device")
    @functools.wraps(body)
    def test() -> None:
        if error := errors_of(body.__module__)[body.__name__]:
            pytest.fail(error, pytrace=False)

    test.body = body  # type: ignore[attr-defined]
    return test


@once
def errors_of(module: str) -> dict[str, str]:
    profile, seed = settings.get_current_profile_name(), core.global_force_seed
    # With the profile of "make stress", Hypothesis draws 20 times as many examples as in "make test".
    errors: dict[str, str] = on_ranks(
        1, run_bodies, module, profile, seed, group=software_process_group, timeout_s=1800
    )[0]
    return errors


def run_bodies(module: str, profile: str, seed: int | None) -> dict[str, str]:
    settings.load_profile(profile)
    core.global_force_seed = seed
    errors = {}
    for name, test in vars(importlib.import_module(module)).items():
        if hasattr(test, "body"):
            errors[name] = ""
            try:
                test.body()
                device.synchronize()
            except Exception:  # noqa: BLE001 (the test shows it)
                errors[name] = traceback.format_exc()
            PLAIN.apply()
            device.take_error()
            gc.collect()
    return errors
