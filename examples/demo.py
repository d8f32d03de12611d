"""Show that the plugin has stock DeepSpeed's bits, and how much faster an iteration is on an EMULATED machine.

First a small GPT is trained with both on the CPU accelerator, and every bit is compared. Then a GPT stands for a 20B
model on two H100s: it trains for real on the GPU in software of the tests, whose copies, kernels and updates take the
time that they would take on that machine. The script exits with 1 if any bit differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
from common.byte_gpt import ByteGPT, Shape, StdlibText
from common.demo_report import Comparison, DemoRecord, DemoSteps, compare, exactness_table, explanation, speed_table
from common.one_rank import be_the_only_rank_unless_launched, do_not_build_shared_memory_collectives
from deepspeed.utils import set_log_level_from_string
from rich.console import Console
from torch import Tensor

EXAMPLES = Path(__file__).resolve().parent
REPOSITORY = EXAMPLES.parent
OUTPUT = REPOSITORY / "demo-output"
ENVIRONMENT = dict(os.environ)
"""The environment of the processes that this script starts, which are ranks of no process group."""

SEED = 17
SHAPE = Shape(layers=4, width=256, heads=4, context=32)
STEPS = 20
STOCK_CLASS = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
PLUGIN_CLASS = "deep_opt_states.zero.stage3.DeepOptimizerStates_Stage3"

KERNELS = (
    "from deep_opt_states.device.kernels.choice import known_arithmetic; known_arithmetic()",
    "from tests.software_gpu.library import compile_library; compile_library()",
)
"""The programs that compile the kernels of the CPU update, and the GPU in software. They run at the same time."""


def main() -> int:
    """Train, print both tables and the verdict of the page, and return the exit code: 1 if any bit differs."""
    console = Console(highlight=False)
    steps = DemoSteps(console, count=4)
    with steps.step("Compile the kernels of the CPU update and the GPU in software: once, about a minute"):
        run_together([[sys.executable, "-c", program] for program in KERNELS])
    with steps.step(f"Train {STEPS} steps on the CPU with stock and with the plugin, and compare all bits"):
        comparisons = compare_bits()
    console.print(exactness_table(comparisons, STEPS))
    with steps.step("Train with stock and with the plugin on an EMULATED machine: a minute"):
        run_together([[sys.executable, "-m", "benchmarks.emulated.demonstration", "--output", str(OUTPUT)]])
    results = json.loads((OUTPUT / "emulated.json").read_text())
    console.print(speed_table(results))
    console.print(*explanation(results), sep="\n")
    with steps.step("Write the page of the run with the plugin: deep-opt-states report"):
        (written,) = run_together([[sys.executable, "-m", "deep_opt_states.cli", "report", results["folder"]]])
    console.print(f"{written}A picture of one update: {OUTPUT / 'timeline.png'}", soft_wrap=True)
    is_identical = all(comparison.differing == 0 for comparison in comparisons)
    return 0 if is_identical and results["bit_identical"] else 1


def run_together(commands: Sequence[Sequence[str]]) -> list[str]:
    """Run ``commands`` at the same time, and return their outputs. Raise ``RuntimeError`` if one fails."""
    running = [
        subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command in commands
    ]
    outputs = [process.communicate()[0] for process in running]
    for process, output in zip(running, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"{process.args} ended with {process.returncode}:\n{output}")
    return outputs


def compare_bits() -> list[Comparison]:
    """Train with stock and with the plugin on the CPU, and return the comparison of all bits."""
    # DeepSpeed calls collectives by names that this PyTorch deprecates.
    warnings.filterwarnings("ignore", category=FutureWarning)
    # At level "warning", the learning rate schedules of DeepSpeed warn at creation that no step has been trained.
    set_log_level_from_string("error")
    be_the_only_rank_unless_launched()
    do_not_build_shared_memory_collectives()
    config = json.loads((EXAMPLES / "ds_config.json").read_text())
    without_block = {key: value for key, value in config.items() if key != "deep_optimizer_states"}
    records = []
    for ds_config, optimizer_class in ((without_block, STOCK_CLASS), (config, PLUGIN_CLASS)):
        with engine_for(ds_config, optimizer_class) as engine:
            records.append(train(engine))
    torch.distributed.destroy_process_group()
    stock, plugin = records
    return compare(stock, plugin)


@contextmanager
def engine_for(ds_config: dict[str, Any], optimizer_class: str) -> Iterator[Any]:
    """Yield an engine. Raise ``RuntimeError`` if its optimizer is not of exactly the class ``optimizer_class``.

    This check makes sure that each engine really is stock DeepSpeed or the plugin.
    """
    torch.manual_seed(SEED)
    model = ByteGPT(SHAPE)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
    found = type(engine.optimizer)
    if f"{found.__module__}.{found.__qualname__}" != optimizer_class:
        raise RuntimeError(
            f"The optimizer must be {optimizer_class}, found {found.__module__}.{found.__qualname__}.\n"
            f"Unset DEEP_OPT_STATES in the environment, and install deep_opt_states in {sys.prefix}."
        )
    try:
        yield engine
    finally:
        engine.destroy()


def train(engine: Any) -> DemoRecord:
    """Train all steps, and return the losses, the gradient norms, and copies of the weights and states at the end."""
    text, losses, norms = StdlibText(), [], []
    batch_size = engine.train_micro_batch_size_per_gpu()
    for step in range(STEPS):
        inputs, targets = text.batch(seed=SEED, step=step, rank=0, batch_size=batch_size, context=SHAPE.context)
        loss = engine(inputs.to(engine.device), targets.to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
    return DemoRecord(losses=losses, norms=norms, states=states_of(engine.optimizer))


def states_of(optimizer: Any) -> dict[str, list[Tensor]]:
    """Return copies of the weights and the optimizer states, with one flat tensor per sub-group."""
    masters = optimizer.fp32_partitioned_groups_flat
    found = {
        "fp32 weights": [master.data for master in masters],
        "first moments": [optimizer.state[master]["exp_avg"] for master in masters],
        "second moments": [optimizer.state[master]["exp_avg_sq"] for master in masters],
        "bf16 weights": list(optimizer.fp16_partitioned_groups_flat),
    }
    return {name: [tensor.clone() for tensor in tensors] for name, tensors in found.items()}


if __name__ == "__main__":
    sys.exit(main())
