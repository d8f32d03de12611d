"""Test the examples with the launchers of their frameworks, and the predicted activations of a Llama."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoModelForCausalLM, LlamaConfig

from deep_opt_states.config import parse_config
from perf_model.schedule.placement import Placement
from perf_model.schedule.workload import Partition
from perf_model.training_run.decoder import llama
from perf_model.training_run.job import Job
from perf_model.training_run.training_memory import TrainingMemory
from perf_model.units import seconds
from tests.compat.frameworks.same_bits import differences, saved
from tests.launch import REPOSITORY, environment, free_port, run_ranks, run_together
from tests.tiers import thorough

EXAMPLES = REPOSITORY / "examples"
STOCK, PLUGIN = "DeepSpeedZeroOptimizer_Stage3", "DeepOptimizerStates_Stage3"
STEPS = 2
PLAN = r"\[deep_opt_states\] \d+ units, .* [1-9]\d* streamed"

DEEPSPEED = "{python} -m deepspeed.launcher.runner --master_port {port}"
LAUNCHERS = {
    # Without a launcher, but with a launcher's variables: the example would choose a port itself.
    "only rank": "env RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 LOCAL_SIZE=1 {python} {script} --deepspeed_config {config}",
    "accelerate": "{python} -m accelerate.commands.launch --use_deepspeed --num_processes {ranks}"
    " --main_process_port {port} --deepspeed_config_file {config} {script}",
    "Lightning": "{python} {script} --deepspeed_config {config} --devices {ranks}",
    "deepspeed": f"{DEEPSPEED} --num_accelerators {{ranks}} {{script}} --deepspeed_config {{config}}",
    "deepspeed on two nodes": f"{DEEPSPEED} --hostfile {{config}}.hosts --no_ssh --master_addr 127.0.0.1"
    " --node_rank {node} {script} --deepspeed_config {config}",
    "torchrun on two nodes": "{python} -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --master-addr 127.0.0.1"
    " --master-port {port} --node-rank {node} {script} --deepspeed_config {config}",
}
"""The commands with which users start a training script with their framework."""


def launch(launcher: str, script: str, ranks: int, folder: Path, block: bool = True) -> tuple[list[Any], str]:
    """Run the script with the examples' config, and return its answers and its output, without a traceback.

    The config has more sub-groups and fewer persistent parameters; without ``block`` it does not enable the plugin.
    """
    config = json.loads((EXAMPLES / "ds_config.json").read_text())
    config["zero_optimization"].update(sub_group_size=300_000, stage3_param_persistence_threshold=10_000)
    # The learning rate is positive from the first step on, so that the resumed parameters differ from the initial ones.
    config["scheduler"]["params"]["warmup_min_lr"] = 1e-4
    if not block:
        del config["deep_optimizer_states"]
    path, port = folder / "ds_config.json", free_port()
    path.write_text(json.dumps(config))
    path.with_name(f"{path.name}.hosts").write_text("node-0 slots=1\nnode-1 slots=1\n")
    values = {"python": sys.executable, "script": script, "config": path, "port": port, "ranks": ranks}
    nodes = (0, 1) if "{node}" in LAUNCHERS[launcher] else (0,)
    commands = [LAUNCHERS[launcher].format(**values, node=node).split() for node in nodes]
    # Ranks without a launcher read the port from the environment. GPUs are hidden, because frameworks would use them.
    env = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), CUDA_VISIBLE_DEVICES="")
    finished = run_together(commands, port, 560, [env] * len(commands))
    # The agent of torchrun logs a traceback if the agent of the other node, which has the store, ends before it. Return
    # codes are not checked, because PyTorch and Gloo sometimes abort when the interpreter exits.
    agent = "torch/distributed/elastic/agent/server/api.py"
    lines = [line for process in finished for line in process.output.splitlines() if agent not in line]
    output = "\n".join(lines)
    assert "Traceback" not in output, output[-5000:]
    return [answer for process in finished for answer in process.answers()], output


def check_checkpoints(found: Path, expected: Path) -> None:
    """Check that both folders have the same tensors, among them states of Adam."""
    stock = saved(expected)
    assert any("exp_avg_sq" in key for key in stock)
    assert differences(stock, saved(found)) == []


@pytest.mark.P1
@pytest.mark.P3
@pytest.mark.P4
@pytest.mark.parametrize(
    ("launcher", "example", "processes"),
    [
        ("accelerate", "accelerated.py", 1),
        ("Lightning", "with_lightning.py", 1),
        # ``software_gpu/training`` has the Trainer, too.
        pytest.param("only rank", "hf_trainer.py", 1, marks=pytest.mark.thorough),
        pytest.param("deepspeed on two nodes", "train.py --layers 2 --width 192", 2, marks=pytest.mark.thorough),
    ],
)
def test_the_plugin_updates_and_resumes_with_the_bits_of_stock(
    launcher: str, example: str, processes: int, tmp_path: Path
) -> None:
    """Compare checkpoints after half of the steps and after all steps, with updates that outlast ``step()``."""
    name, _, arguments = example.partition(" ")
    script = f"tests/frameworks/in_turn.py examples/{name} {tmp_path} {arguments}"
    answers, output = launch(launcher, script, 1, tmp_path)
    stock = {"run": "stock", "optimizer": STOCK, "steps": STEPS, "deferred": 0}
    plugin = {"run": "plugin", "optimizer": PLUGIN, "steps": STEPS, "deferred": STEPS}
    half = {"run": "resumed", "optimizer": PLUGIN, "steps": 1, "deferred": 1}
    assert answers == [[stock, plugin, half, half]] * processes, output[-5000:]
    check_checkpoints(tmp_path / "plugin", tmp_path / "stock")
    check_checkpoints(tmp_path / "resumed", tmp_path / "stock")


@pytest.mark.P3
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("launcher", "example"),
    [
        ("deepspeed", "train.py --layers 2 --width 192"),
        ("torchrun on two nodes", "train.py --layers 2 --width 192"),
        ("deepspeed", "hf_trainer.py"),
        ("accelerate", "accelerated.py"),
        ("Lightning", "with_lightning.py"),
    ],
)
def test_the_commands_of_the_readme_have_the_bits_of_stock_with_and_without_the_block(
    launcher: str, example: str, tmp_path: Path
) -> None:
    """Run the examples unchanged on two ranks, and resume in a process other than the one that saved."""

    def run(name: str, steps: int, block: bool = True) -> str:
        script = f"examples/{example} --output {tmp_path / name} --steps {steps} --save_every 1"
        return launch(launcher, script, 2, tmp_path, block)[1]

    assert "[deep_opt_states]" not in run("stock", STEPS, block=False)
    assert re.search(PLAN, run("resumed", 1))
    files = {file: file.stat().st_mtime_ns for file in tmp_path.glob("resumed/**/*_states.pt")}
    assert re.search(PLAN, run("resumed", STEPS))
    # A run that did not resume would have saved these files again.
    assert {file: file.stat().st_mtime_ns for file in files} == files
    check_checkpoints(tmp_path / "resumed", tmp_path / "stock")


def test_no_script_mentions_the_plugin_since_the_json_config_enables_it() -> None:
    scripts = {"accelerated.py", "demo.py", "hf_trainer.py", "pseudo_to_real.py", "train.py", "with_lightning.py"}
    configs = {"ds_config.json", "ds_config_tp.json", "mixture_of_experts.json"}
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == scripts | configs
    for name in scripts - {"demo.py", "pseudo_to_real.py"}:
        assert "deep_opt" not in (EXAMPLES / name).read_text(), name


def test_the_rules_for_a_mixture_of_experts_are_for_the_names_of_such_a_model() -> None:
    layer = [f"model.layers.0.{name}.weight" for name in ("self_attn.q_proj", "mlp.gate", "mlp.experts.0.up_proj")]
    names = ["model.embed_tokens.weight", *layer, "lm_head.weight"]
    config = parse_config(json.loads((EXAMPLES / "mixture_of_experts.json").read_text()))
    assert config is not None
    config.check_names(names)
    workload = config.workload([[Partition(name, 1024) for name in names]])
    assert [unit.fixed for unit in workload.units] == [None, None, Placement.CPU, Placement.RESIDENT]


@pytest.mark.thorough
def test_the_demo_finds_equal_bits_and_faster_emulated_iterations_and_draws_an_update() -> None:
    output = REPOSITORY / "demo-output"
    # Of an earlier run.
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "examples/demo.py"]
    finished = subprocess.run(command, cwd=REPOSITORY, env=environment(), text=True, capture_output=True, timeout=600)
    assert finished.returncode == 0, finished.stderr[-3000:]
    results = json.loads((output / "emulated.json").read_text())
    assert results["bit_identical"]
    # EMULATED seconds, of the machine whose rates are given: this is no timing of the machine that runs the test.
    stock_s, plugin_s = (median(results["arms"][name]["iteration_s"]) for name in ("stock", "plugin"))
    assert stock_s / plugin_s > 1
    assert re.search(r"[1-9]\d* streamed", results["plan"])
    assert (output / "timeline.png").read_bytes().startswith(b"\x89PNG")
    page = (Path(results["folder"]) / "report.html").read_text()
    assert '<p class="verdict">EMULATED: The update costs ' in page
    for shown in (page, finished.stdout):
        assert seconds(plugin_s) in shown


@pytest.mark.thorough
def test_the_trainer_trains_beside_autotp_with_its_config(tmp_path: Path) -> None:
    options = ["--deepspeed_config", "examples/ds_config_tp.json", "--output", str(tmp_path)]
    script = ["examples/hf_trainer.py", *options, "--steps", "2", "--save_every", "2"]
    first, second = run_ranks(2, script, timeout_s=300)
    assert first.returncode == second.returncode == 0, first.output[-3000:]
    assert re.search(PLAN, first.output)
    files = {path.name for path in (tmp_path / "checkpoint-2" / "global_step2").iterdir()}
    shards = {f"zero_pp_rank_0_mp_rank_{rank:02}_model_states.pt" for rank in range(2)}
    assert shards <= files, "each rank is the only one of its shard"


@pytest.mark.thorough
def test_the_pseudo_to_real_script_trains_both_ways_and_draws_the_losses(tmp_path: Path) -> None:
    """Check that it runs. It raises if the delinked model does not have the loss of the shared one."""
    (finished,) = run_ranks(1, ["examples/pseudo_to_real.py", "--quick", "--output", str(tmp_path)], timeout_s=300)
    assert finished.returncode == 0, finished.output[-3000:]
    curves = json.loads((tmp_path / "losses.json").read_text())
    assert [(curve["name"], curve["steps"][-1]) for curve in curves] == [("unshared", 24), ("Pseudo-to-Real", 24)]
    assert all(curve["losses"][-1] < curve["losses"][0] - 0.5 for curve in curves)
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


SIZES = {"layers": 2, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "intermediate": 14336, "vocab": 64}
# Layers as in Llama-3-8B. Attention is not fused: fake tensors have no flash attention.
SEQUENCE = {"world_size": 1, "ranks_per_node": 1, "micro_batch": 1, "sequence": 2048, "attention": "eager"}
JOBS = {
    "logits": Job(shape=llama("logits", **{**SIZES, "vocab": 128_256}), recompute=True, **SEQUENCE),
    "layers": Job(shape=llama("layers", **SIZES), recompute=True, **SEQUENCE),
}
JOBS["kept"] = replace(JOBS["layers"], recompute=False)


def tracked_bytes(job: Job) -> int:
    """Return the peak of activations and temporary tensors in forward and backward of one sequence."""
    shape = job.shape
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=job.sequence,
        use_cache=False,
        tie_word_embeddings=False,
    )
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.bfloat16)
        if job.recompute:
            model.gradient_checkpointing_enable()
        model.train()
        for param in model.parameters():
            # DeepSpeed takes the gradient as soon as it exists.
            param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
        inputs = torch.randint(0, shape.vocab, (1, job.sequence))
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            outputs = model(input_ids=inputs, labels=inputs)
            outputs.loss.backward()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
    return sum(size for kind, size in peak.items() if str(kind).endswith((".ACT", ".TEMP")))


@pytest.mark.parametrize("name", ["logits", thorough("layers"), thorough("kept")])
def test_activations_take_as_much_as_the_tracker_of_pytorch_finds(name: str) -> None:
    assert TrainingMemory(JOBS[name]).activation_bytes == pytest.approx(tracked_bytes(JOBS[name]), rel=0.05)
