"""Train one GPT with stock DeepSpeed and with the plugin, and compare every bit and the times.

Both variants start from the same seed and read the same batches. They are two engines in one process that train each
step in alternating order, because only such interleaved measurements give a fair ratio. A third variant, whose update
overlaps with the next forward, trains alone after them. This script does not import ``deep_opt_states``: the block in
the JSON config enables the plugin. It exits with 1 if any bit differs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
from common.byte_gpt import ByteGPT, Shape, StdlibText
from common.demo_report import DemoRecord, DemoRun, compare, print_report
from common.one_rank import be_the_only_rank_unless_launched
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.utils import set_log_level_from_string
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

EXAMPLES = Path(__file__).resolve().parent
OUTPUT = EXAMPLES.parent / "demo-output"
RUN, OVERLAPPED_RUN = OUTPUT / "at-once", OUTPUT / "overlapped"
PROFILE = OUTPUT / "profile.json"

SEED = 17
SHAPE = Shape()
STEPS = 60
WARM_UP_STEPS = 5
BLOCK: dict[str, Any] = {
    "placement": "fraction",
    "gpu_fraction": 0.5,
    "num_slots": 2,
    "profile": str(PROFILE),
    "report": str(OVERLAPPED_RUN),
}
SERIAL_BLOCK = {**BLOCK, "report": str(RUN), "overlap_backward": False, "overlap_forward": False}
"""The block for an update that ends with ``step()``. Otherwise it would overlap with the other engine's step."""
STOCK_CLASS = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
PLUGIN_CLASS = "deep_opt_states.zero.stage3.DeepOptimizerStates_Stage3"


def main() -> int:
    """Train all variants, print the comparison, and return the exit code: 1 if any bit differs."""
    console = Console()
    # DeepSpeed calls collectives by names that this PyTorch deprecates.
    warnings.filterwarnings("ignore", category=FutureWarning)
    # At level "warning", the learning rate schedules of DeepSpeed warn at creation that no step has been trained.
    set_log_level_from_string("error")
    measure_this_machine()
    be_the_only_rank_unless_launched()
    # One rank needs no collectives in shared memory. Do not build their kernel, and do not allocate their buffer of 66
    # MB in /dev/shm, which DeepSpeed never frees.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with console.status("building DeepSpeed's CPU Adam kernel (once, about a minute)"):
        CPUAdamBuilder().load(verbose=False)

    ds_config = json.loads((EXAMPLES / "ds_config.json").read_text())
    del ds_config["deep_optimizer_states"]
    stock = DemoVariant(make_engine(ds_config, STOCK_CLASS))
    plugin = DemoVariant(make_engine({**ds_config, "deep_optimizer_states": SERIAL_BLOCK}, PLUGIN_CLASS))
    console.print(f"stock:  {STOCK_CLASS}\nplugin: {PLUGIN_CLASS}", highlight=False)
    train([stock, plugin], "training both", console)
    overlapped = DemoVariant(make_engine({**ds_config, "deep_optimizer_states": BLOCK}, PLUGIN_CLASS))
    train([overlapped], "training overlapped, alone", console)

    run = DemoRun(
        stock=stock.record,
        plugin=plugin.record,
        timed=slice(WARM_UP_STEPS, STEPS),
        comparisons=compare(stock.record, plugin.record, stock.states(), plugin.states()),
        overlapped_comparisons=compare(stock.record, overlapped.record, stock.states(), overlapped.states()),
        numel=sum(param.ds_numel for param in plugin.engine.module.parameters()),
        plan=plugin.engine.optimizer.plan,
        accelerator=get_accelerator().device_name(),
        predicted_and_measured=plugin.engine.optimizer.report.comparison(),
        overlapped_predicted_and_measured=overlapped.engine.optimizer.report.comparison(),
    )
    for variant in (overlapped, plugin, stock):
        variant.engine.destroy()
    print_report(run, console)
    console.print("Measurements of the plugin, with timelines of the last updates, one page per variant:")
    for folder in (RUN, OVERLAPPED_RUN):
        subprocess.run([sys.executable, "-m", "deep_opt_states.cli", "report", str(folder)], check=True)
    torch.distributed.destroy_process_group()
    return 0 if run.bit_identical else 1


def measure_this_machine() -> None:
    """Write a hardware profile of this machine for this run.

    Without it, the plugin would use the cached profile of an earlier time. The load of the machine may have changed
    since then, but predictions are compared with the measurements of this run.
    """
    OUTPUT.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "deep_opt_states.cli", "profile", "--output", str(PROFILE)]
    subprocess.run(command, check=True)


def make_engine(ds_config: dict[str, Any], optimizer_class: str) -> Any:
    """Create an engine. Raise ``RuntimeError`` if its optimizer is not of exactly the class ``optimizer_class``.

    This check makes sure that each variant really is stock DeepSpeed or the plugin.
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
    return engine


@dataclass(frozen=True)
class DemoVariant:
    """An engine and its measurements."""

    engine: Any
    record: DemoRecord = field(default_factory=DemoRecord)

    def train_step(self, inputs: Tensor, targets: Tensor) -> None:
        """Train one step and record its times, its loss and its gradient norm."""
        engine, record = self.engine, self.record
        start_s = now_s()
        loss = engine(inputs.to(engine.device), targets.to(engine.device))
        engine.backward(loss)
        update_start_s = now_s()
        engine.step()
        end_s = now_s()
        record.step_s.append(end_s - start_s)
        record.update_s.append(end_s - update_start_s)
        record.losses.append(loss.item())
        record.norms.append(float(engine.get_global_grad_norm()))

    def states(self) -> dict[str, list[Tensor]]:
        """Return the weights and the optimizer states, with one flat tensor per sub-group."""
        optimizer = self.engine.optimizer
        masters = optimizer.fp32_partitioned_groups_flat
        return {
            "fp32 weights": [master.data for master in masters],
            "first moments": [optimizer.state[master]["exp_avg"] for master in masters],
            "second moments": [optimizer.state[master]["exp_avg_sq"] for master in masters],
            "bf16 weights": list(optimizer.fp16_partitioned_groups_flat),
        }


def now_s() -> float:
    """Wait for the accelerator and return the time."""
    get_accelerator().synchronize()
    return time.perf_counter()


def train(variants: Sequence[DemoVariant], title: str, console: Console) -> None:
    """Train all steps of the ``variants``, which alternate in who trains a step first."""
    text = StdlibText()
    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=STEPS, loss="")
        for step in range(STEPS):
            batch_size = variants[0].engine.train_micro_batch_size_per_gpu()
            inputs, targets = text.batch(seed=SEED, step=step, rank=0, batch_size=batch_size, context=SHAPE.context)
            for variant in variants if step % 2 == 0 else reversed(variants):
                variant.train_step(inputs, targets)
            progress.update(task, advance=1, loss=f"{variants[0].record.losses[-1]:.3f}")


if __name__ == "__main__":
    sys.exit(main())
