"""Train whole runs as users of the frameworks have them, with stock and with the plugin, and report their results.

All runs share one process per rank, since imports take most of the time of a run.

    whole_runs.py FOLDER   each run saves its checkpoints in FOLDER/RUN/stock or FOLDER/RUN/plugin
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DummyOptim, DummyScheduler, InitProcessGroupKwargs
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_get_full_fp32_param
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, get_scheduler
from transformers.trainer_utils import get_last_checkpoint

from tests.frameworks.screen import begin_run
from tests.frameworks.trl_trainers import DEEPSPEED, SEED, begin, begin_program, engines, llama
from tests.launch import answer
from tests.software_gpu.published_configs.published import AUTO, AXOLOTL, LLAMA_FACTORY, MS_SWIFT, OPENRLHF
from tests.zero.process_group import end_process

HALF, STEPS = 2, 4
CONTEXT = 16
LEARNING_RATE = 0.3
"""It grows from almost zero to this value within all steps. Since random tokens cannot be predicted, the loss of the
evaluation grows, too, and the best model is that of an early step."""

PLACEMENTS = (
    {"placement": "stride", "update_stride": 2, "unit_size": 3_000},
    {"placement": "streamed", "unit_size": 2_000},
)
"""The plugin's blocks for both halves of a run. The checkpoint of the first half is resumed with the second block."""

Report = dict[str, Any]


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Random tokens of shape [CONTEXT], the same in every run; ``first`` selects other ones."""

    def __init__(self, first: int, length: int) -> None:
        self._first, self._length = first, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self._first + index)
        tokens = torch.randint(2, 258, (CONTEXT,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


class StopAfterHalf(TrainerCallback):
    """Stop as a user does who interrupts a run, so that the schedule is that of all steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step == HALF


def auto_config() -> dict[str, Any]:
    """Return a config in which the Trainer fills in all values that it can."""
    config = copy.deepcopy(DEEPSPEED)
    config.update(dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), AUTO))
    config["gradient_clipping"] = config["bf16"]["enabled"] = AUTO
    config["optimizer"]["params"] = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), AUTO)
    config["scheduler"]["params"].update(warmup_max_lr=AUTO, warmup_num_steps=AUTO)
    return config


def trainer(config: dict[str, Any], block: dict[str, Any], folder: Path, **changes: Any) -> Trainer:
    """Return a Trainer with accumulation, gradient checkpointing, evaluation and the best model loaded at the end."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        deepspeed=copy.deepcopy({**config, "deep_optimizer_states": block}),
        bf16=True,
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        learning_rate=LEARNING_RATE,
        warmup_steps=STEPS,
        max_steps=STEPS,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        report_to="none",
        disable_tqdm=True,
    )
    return Trainer(llama(), arguments, train_dataset=Sentences(0, 100), eval_dataset=Sentences(1000, 4), **changes)


def run_trainer(config: dict[str, Any], folder: Path, **changes: Any) -> Report:
    """Train the first half, resume it in a second Trainer with another placement, and evaluate the best model."""
    first = trainer(config, PLACEMENTS[0], folder, callbacks=[StopAfterHalf()], **changes)
    first.train()
    assert first.state.global_step == HALF
    second = trainer(config, PLACEMENTS[1], folder, **changes)
    second.train(resume_from_checkpoint=get_last_checkpoint(str(folder)))
    timed = ("runtime", "per_second")
    history = [
        {key: value for key, value in entry.items() if not key.endswith(timed)} for entry in second.state.log_history
    ]
    return {
        "steps": second.state.global_step,
        "history": history,
        "best": Path(second.state.best_model_checkpoint).name,
        "loss of the best": second.evaluate()["eval_loss"],
    }


def run_accelerate(block: dict[str, Any], folder: Path) -> Report:
    """Train with Accelerate, and generate text between the steps, while an update may be in flight."""
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config={**DEEPSPEED, "deep_optimizer_states": block}),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    model = llama()
    optimizer = DummyOptim(model.parameters())
    loader = DataLoader(Sentences(0, 100), batch_size=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, DummyScheduler(optimizer))
    losses, generated = [], []
    for step, batch in zip(range(STEPS), loader, strict=False):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        with torch.no_grad():
            prompt = torch.full((1, 2), 2 + step)
            # All ranks take part in every gather of parameters.
            tokens = accelerator.unwrap_model(model).generate(prompt, max_new_tokens=4, synced_gpus=True)
        generated.append(tokens.tolist())
    accelerator.save_state(str(folder))
    return {"losses": losses, "generated": generated}


def run_openrlhf(folder: Path) -> Report:
    """Train an actor and a critic in one process, and move the average of the actor's weights, as OpenRLHF does."""
    actor, critic = engine(llama(), PLACEMENTS[0]), engine(llama(SEED + 1), PLACEMENTS[1])
    average = {name: safe_get_full_fp32_param(param) for name, param in actor.module.named_parameters()}
    losses = []
    for step in range(STEPS):
        tokens = Sentences(0, 100)[2 * step + dist.get_rank()]["input_ids"][None]
        scores = critic(input_ids=tokens).logits.float().mean()
        loss = actor(input_ids=tokens, labels=tokens).loss * (1 + scores.detach())
        actor.backward(loss)
        actor.step()
        critic.backward((scores - loss.detach()).square())
        critic.step()
        losses.append([loss.item(), scores.item()])
        for name, param in actor.module.named_parameters():
            with GatheredParameters([param]):
                average[name] = 0.9 * average[name] + 0.1 * param.float()
    for name, trained in (("actor", actor), ("critic", critic)):
        trained.save_checkpoint(str(folder / name))
    return {"losses": losses, "average": sum(tensor.double().abs().sum().item() for tensor in average.values())}


def engine(model: torch.nn.Module, block: dict[str, Any]) -> DeepSpeedEngine:
    """Return an engine as OpenRLHF makes it: with parameters in groups, and with an optimizer of its own."""
    config = {
        **copy.deepcopy(OPENRLHF),
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": 2,
        "deep_optimizer_states": block,
    }
    decayed = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = DeepSpeedCPUAdam(groups, lr=1e-3, betas=(0.9, 0.95))
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=1, num_training_steps=10)
    return deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)[0]


CPU_ADAM = (DeepSpeedCPUAdam, {"lr": LEARNING_RATE})
"""The optimizer for the config of axolotl, which keeps the one that the Trainer creates. That is PyTorch's Adam unless
the script passes another, and the plugin refuses it (``software_gpu/published_configs/test_published_configs.py``)."""

AXOLOTL_WITHOUT_ITS_KEY = {key: value for key, value in AXOLOTL.items() if key != "zero_force_ds_cpu_optimizer"}
"""The remedy of ``docs/troubleshooting.md``: Accelerate replaces the optimizer that the Trainer creates."""

RUNS: dict[str, Callable[[Path], Report]] = {
    "Trainer": partial(run_trainer, auto_config()),
    "LLaMA-Factory": partial(run_trainer, LLAMA_FACTORY),
    "axolotl": partial(run_trainer, AXOLOTL, optimizer_cls_and_kwargs=CPU_ADAM),
    "axolotl without its key": partial(run_trainer, AXOLOTL_WITHOUT_ITS_KEY),
    "ms-swift": partial(run_trainer, MS_SWIFT),
    "Accelerate": partial(run_accelerate, PLACEMENTS[0]),
    "OpenRLHF": run_openrlhf,
}


def main() -> None:
    """Train every run with both variants, and answer with a report of each."""
    folder = begin_program()
    for name, run in RUNS.items():
        for variant in ("stock", "plugin"):
            begin_run(name, variant)
            begin(plugin=variant == "plugin")
            report = run(folder / name / variant)
            optimizers = sorted({type(created.optimizer).__name__ for created in engines})
            answer({"run": name, "variant": variant, "optimizers": optimizers, "report": report})
    end_process()


if __name__ == "__main__":
    main()
