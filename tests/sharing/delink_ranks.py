"""Save, convert and delink checkpoints of shared layers, and load them into models with layers of their own.

The arguments are the part of this program to run, and a folder. ``save`` and ``load`` are run by several ranks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, cast

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from deep_opt_states.cli.main import main
from tests.launch import answer
from tests.sharing.shared_ranks import BLOCK, STEPS, SharingCase, make_model
from tests.sharing.stack_model import Stack, tokens
from tests.zero.on_accelerator import on_accelerator
from tests.zero.parity.training import Block, Record, collect, differences
from tests.zero.process_group import process_group

CASES = {
    "copy": SharingCase(layers=4, scale="mean"),
    "mean": SharingCase(layers=5, every=2, scale="sum", dtype="bf16"),
    "zero": SharingCase(layers=3, scale="sum"),
}
"""The cases by the rule for the moments."""
SAVED_BY = (1, 2)
"""The numbers of ranks that save."""
FILES = {"fp32": None, "exp_avg": 1, "exp_avg_sq": 2}
"""The files of a parameter by name: the power of L that the rule ``mean`` divides by."""


def evaluate(engine: Any) -> float:
    """Return the loss of a batch that is the same on every rank."""
    engine.eval()
    with torch.no_grad():
        loss = engine(on_accelerator(tokens(0, 10**6))).item()
    engine.train()
    return cast(float, loss)


def train(engine: Any, record: Record) -> None:
    """Train ``STEPS`` steps, and record losses and states."""
    losses = record.numbers.setdefault("loss", [])
    for step in range(STEPS):
        loss = engine(on_accelerator(tokens(dist.get_rank(), step)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    record.numbers["norm"] = [float(engine.get_global_grad_norm())]
    collect(engine.optimizer, record)


def make_engine(model: torch.nn.Module, case: SharingCase, block: Block, **changes: Any) -> Any:
    config = {**case.ds_config(block), **changes}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def save(folder: Path) -> None:
    """Train each case with shared layers and the plugin, save it, and write the loss of the evaluation."""
    with process_group():
        for name, case in CASES.items():
            root = folder / f"{name} {dist.get_world_size()}"
            engine = make_engine(make_model(case), case, BLOCK)
            train(engine, Record())
            engine.save_checkpoint(str(root))
            if dist.get_rank() == 0:
                (root / "loss.json").write_text(json.dumps(evaluate(engine)))
            else:
                evaluate(engine)
            engine.destroy()
        dist.barrier()


def delink(folder: Path) -> None:
    """Convert each checkpoint to a universal one, and delink it."""
    for moments, case in CASES.items():
        for world_size in SAVED_BY:
            delink_checkpoint(folder / f"{moments} {world_size}", moments, case)


def delink_checkpoint(root: Path, moments: str, case: SharingCase) -> None:
    """Convert the checkpoint in ``root`` to a universal one, and delink it. It is then the next one to be loaded."""
    options = ["--input_folder", str(root / f"global_step{STEPS}"), "--output_folder", str(root / "pseudo")]
    sys.argv[1:] = [*options, "--num_extract_workers", "1", "--num_merge_workers", "1"]
    ds_to_universal.main(ds_to_universal.parse_arguments())
    layers = ["--share", "model.layers.0", "--into", f"model.layers.{{1..{case.layers - 1}}}"]
    options = [*layers, "--every", str(case.every), "--moments", moments]
    assert main(["delink", str(root / "pseudo"), str(root / "real"), *options]) == 0


def expected_states(root: Path, moments: str, case: SharingCase) -> dict[tuple[str, str], torch.Tensor]:
    """Return the flat states of the delinked model by parameter and kind, from those of the shared one."""
    expected = {}
    for name, _ in Stack(case.layers).named_parameters():
        old, uses = name, 1
        if name.startswith("model.layers."):
            _, _, index, rest = name.split(".", 3)
            layer = int(index) % case.every
            old, uses = f"model.layers.{layer}.{rest}", len(range(layer, case.layers, case.every))
        for kind, power in FILES.items():
            tensor = torch.load(root / "pseudo" / "zero" / old / f"{kind}.pt").flatten()
            if power is not None and uses > 1 and moments != "copy":
                tensor = tensor / uses**power if moments == "mean" else torch.zeros_like(tensor)
            expected[name, kind] = tensor
    return expected


def load(folder: Path) -> None:
    """Load each delinked checkpoint with stock and with the plugin, and print what is not as it should be."""
    with process_group():
        for moments, case in CASES.items():
            for world_size in SAVED_BY:
                root = folder / f"{moments} {world_size}"
                records = []
                problems: list[str] = []
                for block in (None, BLOCK):
                    torch.manual_seed(99)
                    model = Stack(case.layers)
                    engine = make_engine(model, case, block, checkpoint={"load_universal": True})
                    path, _ = engine.load_checkpoint(str(root))
                    assert path is not None
                    assert engine.global_steps == STEPS
                    loss = json.loads((root / "loss.json").read_text())
                    problems += [] if evaluate(engine) == loss else [f"the loss with {block}"]
                    states = expected_states(root, moments, case)
                    for (name, kind), tensor in states.items():
                        param = model.get_parameter(name)
                        if kind == "fp32":
                            found = safe_get_full_fp32_param(param)
                        else:
                            found = safe_get_full_optimizer_state(param, kind)
                        if not torch.equal(found.flatten(), tensor):
                            problems.append(f"{kind} of {name} with {block}")
                    record = Record(optimizer_class=type(engine.optimizer).__name__)
                    train(engine, record)
                    engine.destroy()
                    records.append(record)
                stock, ours = records
                problems += differences(stock, ours)
                steps = stock.numbers["step"]
                answer(
                    {
                        "name": f"{moments}, saved by {world_size}",
                        "problems": problems,
                        "states": len(states),
                        "classes": [stock.optimizer_class, ours.optimizer_class],
                        "steps": [min(steps), max(steps)],
                    }
                )


if __name__ == "__main__":
    {"save": save, "delink": delink, "load": load}[sys.argv[1]](Path(sys.argv[2]))
