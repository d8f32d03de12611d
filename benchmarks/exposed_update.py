"""What is seen of the update with overlap off, in backward only, in forward only, and both; beside stock offload.

One model, one text, one seed; an engine an arm, which take turns of some iterations. A turn begins and ends at the same
point of an iteration, so that an update that goes on beside the next forward counts in its own arm, and all arms' bits
are compared at the end. Rows go to benchmarks/results/exposed_update.jsonl.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

import deep_opt_states  # noqa: F401 (activates where the package is not installed)
from benchmarks.cpu_adam import spread
from benchmarks.record import record
from deep_opt_states import machine
from examples.byte_gpt import ByteGPT, Shape, StdlibText
from examples.one_rank import be_the_only_rank_unless_launched
from perf_model.timeline import Phase, PhaseSpan, seconds_of

SEED = 17
STOCK = "stock"
ARMS = {
    STOCK: None,
    "no overlap": {"overlap_backward": False, "overlap_forward": False},
    "backward": {"overlap_backward": True, "overlap_forward": False},
    "forward": {"overlap_backward": False, "overlap_forward": True},
    "both": {"overlap_backward": True, "overlap_forward": True},
}
CLASSES = {True: "DeepSpeedZeroOptimizer_Stage3", False: "DeepOptimizerStates_Stage3"}


@dataclass
class Arm:
    """``exposed_s``: of each update, by the plugin's own events on the model's stream; of stock all of ``step()``."""

    name: str
    engine: Any
    steps: int = 0
    iteration_s: list[float] = field(default_factory=list)
    exposed_s: list[float] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)

    def watch(self) -> None:
        """From now on, what the plugin reports of its updates."""
        if self.name == STOCK:
            return
        report = self.engine.optimizer.report
        updated = report.updated

        def noted(phases: Sequence[PhaseSpan], timeline: Any) -> None:
            self.exposed_s.append(seconds_of(Phase.EXPOSED, phases))
            updated(phases, timeline)

        report.updated = noted

    def turn(self, text: StdlibText, iterations: int, context: int) -> None:
        """One iteration more than are timed: the first ends where the timing begins, after ``step()``."""
        engine = self.engine
        last_s = 0.0
        for number in range(1 + iterations):
            batch_size = engine.train_micro_batch_size_per_gpu()
            inputs, targets = text.batch(seed=SEED, step=self.steps, rank=0, batch_size=batch_size, context=context)
            loss = engine(inputs.to(engine.device), targets.to(engine.device))
            engine.backward(loss)
            start_s = now_s() if self.name == STOCK else 0.0
            engine.step()
            end_s = now_s()
            if number > 0:
                self.iteration_s.append(end_s - last_s)
                if self.name == STOCK:
                    self.exposed_s.append(end_s - start_s)
            last_s = end_s
            self.losses.append(loss.detach())
            self.steps += 1
        # The update ends in this arm's turn.
        _ = engine.optimizer.state


def now_s() -> float:
    """When the model's stream has done what it was given; an update on other streams goes on."""
    accelerator = get_accelerator()
    if not accelerator.is_synchronized_device():
        accelerator.current_stream().synchronize()
    return time.perf_counter()


def make_arm(name: str, shape: Shape, micro_batch: int, block: dict[str, Any], sub_group_size: int) -> Arm:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": sub_group_size,
            "offload_optimizer": {"device": "cpu"},
        },
    }
    switches = ARMS[name]
    if switches is not None:
        config["deep_optimizer_states"] = {**block, **switches}
    torch.manual_seed(SEED)
    model = ByteGPT(shape)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    assert type(engine.optimizer).__name__ == CLASSES[name == STOCK], "the arm is not what it is called"
    return Arm(name, engine)


def compare(arms: Sequence[Arm], context: int, turns: int, iterations: int) -> dict[str, Any]:
    """By arm."""
    text = StdlibText()
    for arm in arms:
        arm.turn(text, iterations, context)  # warms up
        arm.iteration_s.clear()
        arm.exposed_s.clear()
        arm.watch()
    for number in range(turns):
        for arm in arms if number % 2 else reversed(arms):
            arm.turn(text, iterations, context)
    stock = arms[0]
    stock_s = median(stock.iteration_s)
    return {
        arm.name: {
            "exposed_update_s": spread(arm.exposed_s),
            "iteration_s": spread(arm.iteration_s),
            "stock_iteration_over_its": spread([stock_s / its for its in arm.iteration_s]),
            "same_bits_as_stock": same_bits(stock, arm),
        }
        for arm in arms
    }


def same_bits(stock: Arm, arm: Arm) -> bool:
    """Of the losses, the master weights and the moments."""
    pairs = list(zip(stock.losses, arm.losses, strict=True))
    theirs, ours = stock.engine.optimizer, arm.engine.optimizer
    for one, other in zip(theirs.fp32_partitioned_groups_flat, ours.fp32_partitioned_groups_flat, strict=True):
        pairs.append((one, other))
        pairs += [(theirs.state[one][name], ours.state[other][name]) for name in ("exp_avg", "exp_avg_sq")]
    return all(torch.equal(one.cpu(), other.cpu()) for one, other in pairs)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exposed_update", description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--sub-group-size", type=int, default=25_000_000)
    parser.add_argument("--gpu-fraction", type=float, help="of the parameters streamed (default: planned)")
    parser.add_argument("--turns", type=int, default=3, help="timed, of each arm (default: 3)")
    parser.add_argument("--iterations", type=int, default=4, help="timed in a turn (default: 4)")
    options = parser.parse_args(arguments)
    be_the_only_rank_unless_launched()
    shape = Shape(layers=options.layers, width=options.width, heads=options.width // 64, context=options.context)
    block: dict[str, Any] = {}
    if options.gpu_fraction is not None:
        block = {"placement": "fraction", "gpu_fraction": options.gpu_fraction}
    arms = [make_arm(name, shape, options.micro_batch, block, options.sub_group_size) for name in ARMS]
    gpu = machine.gpu()
    row = {
        "gpu": None if gpu is None else gpu.name,
        "parameters": sum(its.ds_numel for its in arms[0].engine.module.parameters()),
        "micro_batch": options.micro_batch,
        "context": options.context,
        "plan": str(arms[-1].engine.optimizer.plan),
        "iterations": options.turns * options.iterations,
        "arms": compare(arms, options.context, options.turns, options.iterations),
    }
    for name, its in row["arms"].items():
        exposed_ms, iteration_ms = (its[key]["median"] * 1e3 for key in ("exposed_update_s", "iteration_s"))
        bits = "stock's bits" if its["same_bits_as_stock"] else "OTHER BITS THAN STOCK'S"
        print(f"{name:<10}  update exposed {exposed_ms:8.1f} ms   iteration {iteration_ms:8.1f} ms   {bits}")
    print(record("exposed_update", ("torch", "deepspeed"), row))
    for arm in arms:
        arm.engine.destroy()
    return 0 if all(its["same_bits_as_stock"] for its in row["arms"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
