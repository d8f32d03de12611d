"""Train with a published config on emulated H100s, with stock and with the plugin, and print what was measured.

Arguments: the name of the config, the number of GPUs of the node, and any number of blocks. Without blocks, the empty
block is trained. A block may have the key ``zero``, whose settings replace those of the config for this arm alone. Such
an arm is for exploring: with other sub-groups, no bits can be compared.
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from deepspeed.ops.adam import DeepSpeedCPUAdam

from tests.launch import answer
from tests.software_gpu.hugging_face import keep_process_group
from tests.software_gpu.published_configs.emulated_h100 import H100Run
from tests.software_gpu.published_configs.published import EMPTY_BLOCK, PUBLISHED
from tests.software_gpu.published_configs.training import Steps, TrainedArm, train
from tests.software_gpu.ranks import software_process_group
from tests.zero.parity.training import differences

STOCK_STEPS = Steps(untimed=7, warm_up=1, measured=3)
OUR_STEPS = Steps(untimed=0, warm_up=8, measured=3)
"""Both train equally many steps. Stock adapts to nothing, so its first steps need take no time. Ours plans again in the
backward of the sixth step; the next update loads the states of residents."""


def main(name: str, ranks: str, *blocks: str) -> None:
    keep_process_group()
    run = H100Run.scaled_for(int(ranks))
    published = PUBLISHED[name]
    config = run.scaled(published)
    # With axolotl's config, Accelerate keeps PyTorch's AdamW, for which the plugin has no kernel.
    keeps_adam = not published.get("zero_force_ds_cpu_optimizer", True)
    optimizer = DeepSpeedCPUAdam if keeps_adam else None
    answer({"arm": "machine", "scale": run.scale, "slowdown": run.slowdown, "memory_bytes": run.memory_bytes})
    with TemporaryDirectory() as folder:
        stock = train(run, config, Path(folder), STOCK_STEPS, optimizer=optimizer)
        answer({"arm": "stock", **_measured(stock)})
        for block in blocks or (EMPTY_BLOCK,):
            configured, same_sub_groups = _with_block(config, json.loads(block))
            arm = train(run, configured, Path(folder), OUR_STEPS, optimizer=optimizer)
            different = differences(stock.record, arm.record) if same_sub_groups else ["not compared"]
            ratio = min(stock.iteration_s) / min(arm.iteration_s)
            answer({"arm": block, **_measured(arm), "differences": different, "ratio": ratio})
        if keeps_adam:
            configured, _ = _with_block(config, {})
            answer({"arm": "optimizer of the Trainer", "error": _error(run, configured, Path(folder))})


def _with_block(config: dict[str, Any], block: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    zero = block.pop("zero", {})
    return {
        **config,
        "zero_optimization": {**config["zero_optimization"], **zero},
        "deep_optimizer_states": block,
    }, not zero


def _measured(arm: TrainedArm) -> dict[str, Any]:
    measured = {part.name: getattr(arm, part.name) for part in fields(arm) if part.name != "record"}
    return {
        "class": arm.record.optimizer_class,
        "losses": arm.record.numbers["loss"],
        **measured,
        "iteration_s": arm.iteration_s,
    }


def _error(run: H100Run, config: dict[str, Any], folder: Path) -> str:
    try:
        train(run, config, folder, OUR_STEPS, optimizer=None)
    except ValueError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    with software_process_group():
        main(*sys.argv[1:])
