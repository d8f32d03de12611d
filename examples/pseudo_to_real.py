"""Train a small GPT by Pseudo-to-Real and without it, and draw the losses.

The pseudo stage trains layers that share their parameters, ``delink`` gives each layer its own copy, and the real stage
goes on with the ordinary model. The other training has layers of its own from the first step. Both have the same seeds,
batches, number of steps and learning rates. The time is the CPU time of the process in training steps, so that other
load on the machine does not count.

python examples/pseudo_to_real.py
python examples/pseudo_to_real.py --quick
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import deepspeed
import torch
from common.byte_gpt import ByteGPT, Shape, StdlibText
from common.one_rank import be_the_only_rank_unless_launched, do_not_build_shared_memory_collectives
from deepspeed.utils import set_log_level_from_string

from deep_opt_states.sharing import share_layers

EXAMPLES = Path(__file__).resolve().parent
OUTPUT = EXAMPLES.parent / "demo-output" / "pseudo-to-real"

SHAPE = Shape(layers=8, width=64, heads=4, context=64)
EVALUATIONS = 12
EVALUATED_BATCHES = 4
EVALUATION_SEED = 10**6
"""The seed of the evaluated batches. They are of the same text, and no training run has this seed."""


@dataclass
class Curve:
    """The evaluated losses of one run, in nats per byte, with the step and the CPU seconds of training at each."""

    name: str
    seed: int
    steps: list[int] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def loss_at(self, cpu_s: float) -> float:
        """Return the loss after ``cpu_s`` seconds, interpolated between two evaluations."""
        for (first_s, first), (last_s, last) in pairwise(zip(self.cpu_s, self.losses, strict=True)):
            if first_s <= cpu_s <= last_s:
                return first + (last - first) * (cpu_s - first_s) / (last_s - first_s)
        return self.losses[-1]


def main() -> None:
    """Train all seeds, and write the losses as JSON and as a picture."""
    parser = argparse.ArgumentParser(description="Train by Pseudo-to-Real and without it, and draw the losses.")
    parser.add_argument("--steps", type=int, default=150, help="the steps of each training, both stages together")
    parser.add_argument("--shared", type=float, default=0.1, help="the part of the steps with shared layers")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the folder for losses.json and losses.png")
    parser.add_argument("--quick", action="store_true", help="train 24 steps with one seed")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.seeds = 24, 1
    # DeepSpeed calls collectives by names that this PyTorch deprecates.
    warnings.filterwarnings("ignore", category=FutureWarning)
    set_log_level_from_string("error")
    be_the_only_rank_unless_launched()
    do_not_build_shared_memory_collectives()

    args.output.mkdir(parents=True, exist_ok=True)
    curves: list[Curve] = []
    shared_steps = max(1, round(args.shared * args.steps))
    for seed in range(args.seeds):
        # The order alternates, because the speed of the machine may change.
        trainings: list[Callable[[], Curve]] = [
            partial(train_unshared, seed, args.steps),
            partial(train_pseudo_to_real, seed, args.steps, shared_steps),
        ]
        for training in trainings if seed % 2 == 0 else reversed(trainings):
            curve = training()
            curves.append(curve)
            print(
                f"{curve.name}, seed {seed}: {curve.losses[-1]:.4f} after {curve.cpu_s[-1]:.1f} CPU s",
                flush=True,
            )
            # Written after each training run, so that ending the program early leaves the losses.
            (args.output / "losses.json").write_text(json.dumps([asdict(curve) for curve in curves], indent=1))
    compare(curves)
    draw(curves, shared_steps, args.output / "losses.png")
    torch.distributed.destroy_process_group()


def make_engine(seed: int, *, shared: bool = False, **changes: Any) -> Any:
    """Return an engine of the model with the seed. The config of the other examples enables the plugin."""
    torch.manual_seed(seed)
    model = ByteGPT(SHAPE)
    if shared:
        share_layers(model, "blocks", scale="mean")
    config = {**json.loads((EXAMPLES / "ds_config.json").read_text()), "steps_per_print": 10**9, **changes}
    # Without kernels for bf16, CPUs compute faster in fp32.
    del config["bf16"]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def train_unshared(seed: int, steps: int) -> Curve:
    """Train all steps with layers of their own."""
    curve = Curve("unshared", seed)
    engine = make_engine(seed)
    train(engine, curve, range(steps), steps)
    engine.destroy()
    return curve


def train_pseudo_to_real(seed: int, steps: int, shared_steps: int) -> Curve:
    """Train ``shared_steps`` with shared layers, delink them, and train the other steps with the ordinary model."""
    curve = Curve("Pseudo-to-Real", seed)
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(seed, shared=True)
        train(engine, curve, range(shared_steps), steps)
        engine.save_checkpoint(folder, tag="shared")
        shared_loss = evaluate(engine)
        engine.destroy()

        convert = ["deepspeed.checkpoint.ds_to_universal", "--input_folder", f"{folder}/shared"]
        convert += ["--output_folder", f"{folder}/pseudo", "--num_extract_workers", "1", "--num_merge_workers", "1"]
        # The hook has divided the gradients of the shared layers, so their moments are copied.
        layers = ["--share", "blocks.0", "--into", f"blocks.{{1..{SHAPE.layers - 1}}}", "--moments", "copy"]
        delink = ["deep_opt_states.cli", "delink", f"{folder}/pseudo", f"{folder}/real", *layers]
        for command in (convert, delink):
            subprocess.run([sys.executable, "-m", *command], check=True, stdout=subprocess.DEVNULL)

        engine = make_engine(seed, checkpoint={"load_universal": True})
        engine.load_checkpoint(folder)
        if evaluate(engine) != shared_loss:
            raise RuntimeError(f"The delinked model must have the loss {shared_loss}, found {evaluate(engine)}.")
        train(engine, curve, range(shared_steps, steps), steps)
        engine.destroy()
    return curve


def train(engine: Any, curve: Curve, steps: range, all_steps: int) -> None:
    """Train the ``steps``, and evaluate every ``all_steps // EVALUATIONS`` steps. Evaluations count as no time."""
    text = StdlibText()
    every = max(1, all_steps // EVALUATIONS)
    cpu_s = curve.cpu_s[-1] if curve.cpu_s else 0.0
    for step in steps:
        batch_size = engine.train_micro_batch_size_per_gpu()
        batch = text.batch(seed=curve.seed, step=step, rank=0, batch_size=batch_size, context=SHAPE.context)
        # The time of this process includes the update on its worker thread.
        start_s = time.process_time()
        engine.backward(engine(*(tensor.to(engine.device) for tensor in batch)))
        engine.step()
        cpu_s += time.process_time() - start_s
        if (step + 1) % every == 0 or step + 1 == all_steps or step == steps[-1]:
            curve.steps.append(step + 1)
            curve.losses.append(evaluate(engine))
            curve.cpu_s.append(cpu_s)


def evaluate(engine: Any) -> float:
    """Return the mean loss of the evaluated batches, without training."""
    text = StdlibText()
    losses = []
    engine.eval()
    with torch.no_grad():
        for number in range(EVALUATED_BATCHES):
            batch = text.batch(seed=EVALUATION_SEED, step=number, rank=0, batch_size=16, context=SHAPE.context)
            losses.append(engine(*(tensor.to(engine.device) for tensor in batch)).item())
    engine.train()
    return mean(losses)


def compare(curves: Sequence[Curve]) -> None:
    """Print the last losses after the same number of steps and after the same CPU time."""
    by_seed = {(curve.name, curve.seed): curve for curve in curves}
    seeds = sorted({curve.seed for curve in curves})
    pairs = [(by_seed["unshared", seed], by_seed["Pseudo-to-Real", seed]) for seed in seeds]
    rows = {
        "unshared, all steps": [unshared.losses[-1] for unshared, _ in pairs],
        "Pseudo-to-Real, all steps": [real.losses[-1] for _, real in pairs],
        "difference, same steps": [real.losses[-1] - unshared.losses[-1] for unshared, real in pairs],
        "difference, same CPU time": [
            real.loss_at(end_s) - unshared.loss_at(end_s)
            for unshared, real in pairs
            for end_s in [min(unshared.cpu_s[-1], real.cpu_s[-1])]
        ],
        "CPU seconds, unshared": [unshared.cpu_s[-1] for unshared, _ in pairs],
        "CPU seconds, Pseudo-to-Real": [real.cpu_s[-1] for _, real in pairs],
    }
    for name, values in rows.items():
        spread = f" +- {stdev(values):.4f}" if len(values) > 1 else ""
        print(f"{name:<28} {mean(values):+.4f}{spread}   each: {', '.join(f'{value:.4f}' for value in values)}")


def draw(curves: Sequence[Curve], shared_steps: int, path: Path) -> None:
    """Draw the losses by step and by CPU time, with a line per seed."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    colours = {"unshared": "tab:blue", "Pseudo-to-Real": "tab:orange"}
    for curve in curves:
        style = {"color": colours[curve.name], "label": curve.name if curve.seed == 0 else None}
        by_step.plot(curve.steps, curve.losses, **style)
        by_time.plot(curve.cpu_s, curve.losses, **style)
    by_step.axvline(shared_steps, color="grey", linestyle=":", label="delinked")
    by_step.set(xlabel="steps", ylabel="evaluated loss, nats per byte")
    by_time.set(xlabel="CPU seconds in training steps")
    by_step.legend()
    figure.savefig(path, dpi=110)
    print(f"Written: {path}")


if __name__ == "__main__":
    main()
