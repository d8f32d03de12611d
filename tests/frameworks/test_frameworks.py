"""Test the examples with their frameworks' launchers: the JSON config alone enables the plugin, with stock's bits."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.frameworks.checkpoints import contents, differences
from tests.frameworks.in_turn import SAVE_EVERY, STEPS
from tests.frameworks.launchers import (
    Commands,
    accelerate,
    accelerate_ranks,
    deepspeed_nodes,
    deepspeed_ranks,
    launch,
    lightning,
    lightning_ranks,
    only_rank,
    torchrun_nodes,
)
from tests.launch import REPOSITORY, Finished

SMALL = ["--layers", "2", "--width", "192"]
PLUGIN = "DeepOptimizerStates_Stage3"

AGENT = "torch/distributed/elastic/agent/server/api.py"
"""The file of torchrun's agent, which begins the lines that the agent logs."""


@pytest.mark.parametrize(
    ("commands", "example", "arguments", "processes"),
    [
        pytest.param(deepspeed_nodes, "train.py", SMALL, 2, id="deepspeed on two nodes", marks=pytest.mark.thorough),
        # ``software_gpu/training/test_trainer.py`` has the Trainer, too.
        pytest.param(only_rank, "hf_trainer.py", [], 1, id="Trainer", marks=pytest.mark.thorough),
        pytest.param(accelerate, "accelerated.py", [], 1, id="accelerate launch"),
        pytest.param(lightning, "with_lightning.py", [], 1, id="Lightning"),
    ],
)
@pytest.mark.promise("P1", "P3", "P4")
def test_the_plugin_updates_and_resumes_with_the_bits_of_stock(
    commands: Commands, example: str, arguments: list[str], processes: int, tmp_path: Path
) -> None:
    """Compare checkpoints after half of the steps and after all steps, with updates that outlast ``step()``."""
    script = ["tests/frameworks/in_turn.py", f"examples/{example}", str(tmp_path), *arguments]
    config = write_config(tmp_path, auto=example == "hf_trainer.py")
    finished = launch(commands, script, config, timeout_s=560)
    answers = [answer for process in finished for answer in process.answers()]
    output = "\n".join(process.output for process in finished)
    stock = {"run": "stock", "optimizer": "DeepSpeedZeroOptimizer_Stage3", "steps": STEPS, "deferred": 0}
    plugin = {"run": "plugin", "optimizer": PLUGIN, "steps": STEPS, "deferred": STEPS}
    half = {"run": "resumed", "optimizer": PLUGIN, "steps": SAVE_EVERY, "deferred": SAVE_EVERY}
    assert answers == [[stock, plugin, half, half]] * processes, output[-5000:]
    assert_equal_checkpoints(tmp_path / "plugin", tmp_path / "stock")
    assert_equal_checkpoints(tmp_path / "resumed", tmp_path / "stock")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("commands", "example", "arguments"),
    [
        pytest.param(deepspeed_ranks, "train.py", SMALL, id="deepspeed"),
        pytest.param(torchrun_nodes, "train.py", SMALL, id="torchrun on two nodes"),
        pytest.param(deepspeed_ranks, "hf_trainer.py", [], id="Trainer"),
        pytest.param(accelerate_ranks, "accelerated.py", [], id="accelerate launch"),
        pytest.param(lightning_ranks, "with_lightning.py", [], id="Lightning"),
    ],
)
@pytest.mark.promise("P3")
def test_the_commands_of_the_readme_have_the_bits_of_stock_with_and_without_the_block(
    commands: Commands, example: str, arguments: list[str], tmp_path: Path
) -> None:
    """Run the examples unchanged on two ranks, and resume in a process other than the one that saved."""

    def run(name: str, steps: int, block: bool = True) -> str:
        folder = tmp_path / name
        script = [f"examples/{example}", *arguments, "--output", str(folder), "--steps", str(steps)]
        config = write_config(tmp_path, block=block)
        finished = launch(commands, [*script, "--save_every", str(SAVE_EVERY)], config, timeout_s=560)
        return output_of(finished)

    plan = r"\[deep_opt_states\] \d+ units, .* [1-9]\d* streamed"
    assert "[deep_opt_states]" not in run("stock", STEPS, block=False)
    assert re.search(plan, run("resumed", SAVE_EVERY))
    saved = {file: file.stat().st_mtime_ns for file in tmp_path.glob("resumed/**/*_states.pt")}
    assert re.search(plan, run("resumed", STEPS))
    # A run that did not resume would have saved these files again.
    assert {file: file.stat().st_mtime_ns for file in saved} == saved
    assert_equal_checkpoints(tmp_path / "resumed", tmp_path / "stock")


def output_of(finished: list[Finished]) -> str:
    """Return the output of the ranks, which must not have a traceback.

    Return codes are not checked, because PyTorch and Gloo sometimes abort when the interpreter exits. The agent of
    torchrun logs a traceback if the agent of the other node, which has the store, ends before it: its lines are left
    out.
    """
    lines = [line for process in finished for line in process.output.splitlines()]
    output = "\n".join(line for line in lines if AGENT not in line)
    assert "Traceback" not in output, output[-5000:]
    return output


def assert_equal_checkpoints(found: Path, expected: Path) -> None:
    stock_contents = contents(expected)
    assert len({re.search(r"\d+", key)[0] for key in stock_contents}) == STEPS // SAVE_EVERY
    assert any("exp_avg_sq" in key for key in stock_contents)
    assert differences(found, expected) == []


@pytest.mark.parametrize("example", ["train.py", "hf_trainer.py", "accelerated.py", "with_lightning.py"])
def test_no_example_mentions_the_plugin(example: str) -> None:
    assert "deep_opt" not in (REPOSITORY / "examples" / example).read_text()


def write_config(folder: Path, auto: bool = False, block: bool = True) -> str:
    """Write the examples' config with more sub-groups and fewer persistent parameters, and return its path.

    With ``auto``, the Trainer fills in all values that it can. Without ``block``, the plugin is not enabled.
    """
    config = json.loads((REPOSITORY / "examples" / "ds_config.json").read_text())
    zero = config["zero_optimization"]
    zero.update(sub_group_size=300_000, stage3_param_persistence_threshold=10_000)
    # The learning rate is positive from the first step on, so that the resumed parameters differ from the initial ones.
    config["scheduler"]["params"]["warmup_min_lr"] = 1e-4
    if auto:
        config.update(
            train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps="auto", gradient_clipping="auto"
        )
        config["bf16"]["enabled"] = "auto"
        config["optimizer"]["params"] = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
        config["scheduler"]["params"].update(warmup_max_lr="auto", warmup_num_steps="auto")
        buckets = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
        zero.update(dict.fromkeys(buckets, "auto"))
    if not block:
        del config["deep_optimizer_states"]
    path = folder / "ds_config.json"
    path.write_text(json.dumps(config))
    return str(path)
