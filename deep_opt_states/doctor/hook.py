"""Check whether ``import torch`` alone activates the hook in a fresh interpreter, and how long that takes."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deep_opt_states.doctor.finding import Finding, Status
from deep_opt_states.names import CONFIG_KEY, SWITCH

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""PyTorch's environment variable for all entry points of the group ``torch.backends``: enabled if unset or 1."""

TIMEOUT_S = 120

_IS_ACTIVE = """
import sys, torch
activation = sys.modules.get("deep_opt_states.activation")
print("active" if activation is not None and activation.is_active() else "not active")
"""

_COST = """
import time, torch
start = time.perf_counter()
from deep_opt_states.activation import activate
activate()
print(time.perf_counter() - start)
"""


@dataclass(frozen=True)
class AfterImport:
    """The state of a fresh interpreter after ``import torch``."""

    active: bool
    """Whether the hook is active."""
    message: str = ""
    """The last line about the plugin or an error on stderr: the reason if the hook is not active."""


def import_torch(environ: Mapping[str, str]) -> AfterImport:
    """Import torch in a fresh interpreter and return whether the hook is active in it."""
    command = [sys.executable, "-c", _IS_ACTIVE]
    child = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environ)
    lines = child.stderr.splitlines()
    messages = [line for line in lines if line.startswith("deep_opt_states") or "Error: " in line]
    return AfterImport(child.stdout.splitlines()[-1:] == ["active"], messages[-1] if messages else "")


def import_costs_s(environ: Mapping[str, str], num_runs: int = 5) -> list[float]:
    """Return the seconds that our entry point adds to ``import torch``, each measured in a fresh interpreter.

    Raise ``CalledProcessError`` if one of the interpreters fails.
    """
    # With the autoload off, torch does not call our entry point, so that it can be timed separately.
    env = {**environ, AUTOLOAD: "0"}
    command = [sys.executable, "-c", _COST]
    return [
        float(subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=env, check=True).stdout)
        for _ in range(num_runs)
    ]


def check_hook(after: AfterImport, autoload: str | None) -> Finding:
    """Check that the hook is active after ``import torch``. ``autoload`` is PyTorch's switch for entry points."""
    topic = "activation hook"
    if after.active:
        return Finding(topic, Status.OK, "active in a fresh interpreter after import torch: the JSON block is enough")
    if autoload not in (None, "1"):
        found = f'{AUTOLOAD}={autoload}; must be unset or 1, or "{CONFIG_KEY}" in the JSON is ignored'
        return Finding(
            topic, Status.FAIL, found, f"Unset {AUTOLOAD}, or import deep_opt_states in the training script."
        )
    found = "not active after import torch; must be active, or the JSON block is ignored"
    if after.message:
        remedy = (
            'Run python -c "import torch" to see the full error, and reinstall the package that it names with '
            "pip install --force-reinstall."
        )
        return Finding(topic, Status.FAIL, f"{found} ({after.message})", remedy)
    remedy = "Reinstall deep_opt_states with pip, which writes its entry point for PyTorch."
    return Finding(topic, Status.FAIL, found, remedy)


def check_cost(costs_s: Sequence[float]) -> Finding:
    """Return the time that our entry point adds to ``import torch``; it is always OK."""
    median, least, most = (1e3 * cost_s for cost_s in (statistics.median(costs_s), min(costs_s), max(costs_s)))
    found = f"{median:.1f} ms, median of {len(costs_s)} fresh interpreters ({least:.1f} to {most:.1f} ms)"
    return Finding("cost at import torch", Status.OK, found)


def check_switch(value: str | None) -> Finding:
    """Check the environment variable that switches the plugin off."""
    if value == "0":
        found = "0: the plugin is switched off, and stock DeepSpeed trains even if the JSON enables the plugin"
        return Finding(SWITCH, Status.WARN, found, f"Unset {SWITCH} to train with the plugin.")
    if value not in (None, "1"):
        found = f"{value!r} has no meaning; must be unset or 1 (on), or 0 (off)"
        return Finding(SWITCH, Status.WARN, found, f"Set {SWITCH}=0 to switch the plugin off, or unset it.")
    return Finding(SWITCH, Status.OK, "unset" if value is None else value)
