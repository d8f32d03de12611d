"""Run scenarios with stock and with the plugin, and print for each the values that differ.

Arguments: any number of ``module`` or ``module.scenario`` of ``tests.zero.behaviour``, ``--states`` with the dtypes of
masters and moments in bf16 engines, and those of ``process_group_on_accelerator``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback

import torch
from deepspeed.accelerator import get_accelerator

from perf_model.schedule.host_layout import KEYS_OF_STATES
from tests.launch import answer
from tests.zero.behaviour.behaviour_variant import BASE, BehaviourVariant, Scenario, unequal
from tests.zero.on_accelerator import process_group_on_accelerator
from tests.zero.parity.training import Block

BLOCK = {"placement": "stride", "update_stride": 2}


def seen(scenario: Scenario, block: Block) -> list[tuple[str, object]]:
    """Return the values that the caller of the scenario sees with this config block."""
    torch.manual_seed(5)
    variant = BehaviourVariant(block)
    try:
        found = list(scenario(variant))
        found.append(("in use", variant.is_in_use()))
    finally:
        variant.close()
    return found


def run(scenario: Scenario) -> dict[str, object]:
    try:
        stock, ours = seen(scenario, None), seen(scenario, BLOCK)
    except Exception:  # noqa: BLE001 (the test shows it)
        return {"name": scenario.__name__, "seen": 0, "differences": [traceback.format_exc()]}
    return {"name": scenario.__name__, "seen": len(stock), "differences": unequal(stock, ours)[:5]}


def main(*names: str) -> None:
    # DeepSpeed requires instructions that this CPU may not have. PyTorch supports fp16 on every CPU.
    get_accelerator().is_fp16_supported = lambda: True
    parser = argparse.ArgumentParser()
    parser.add_argument("--states", choices=tuple(KEYS_OF_STATES), default="fp32")
    options, scenarios = parser.parse_known_args(names)
    BASE["bf16"].update(dict.fromkeys(KEYS_OF_STATES[options.states], True))
    for name in scenarios:
        module, _, chosen = name.partition(".")
        for scenario in importlib.import_module(f"tests.zero.behaviour.{module}").SCENARIOS:
            if chosen in ("", scenario.__name__):
                answer(run(scenario))


if __name__ == "__main__":
    with process_group_on_accelerator(sys.argv[1:]) as arguments:
        main(*arguments)
