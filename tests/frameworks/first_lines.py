"""Train with one framework and the empty block in a process of its own, and keep the output that a user sees.

first_lines.py FRAMEWORK FOLDER   the output after the imports is written to FOLDER/screen
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from transformers import Trainer

from tests.frameworks.trl_trainers import DEEPSPEED, LORA, dpo, llama, sft
from tests.frameworks.whole_runs import (
    AXOLOTL_WITHOUT_ITS_KEY,
    Sentences,
    auto_config,
    engine,
    run_accelerate,
    trainer,
)
from tests.software_gpu.published_configs.published import LLAMA_FACTORY, MS_SWIFT
from tests.zero.process_group import end_process

SCREEN = "screen"

EMPTY_BLOCK: dict[str, Any] = {}
CONFIG = {**DEEPSPEED, "deep_optimizer_states": EMPTY_BLOCK}


def train(make: Callable[[Path], Trainer], folder: Path) -> None:
    """Train all steps of the Trainer that ``make`` returns for this folder."""
    make(folder).train()


def dpo_with_reference(folder: Path) -> Trainer:
    """Return a DPO trainer with a reference model, which is an engine without an optimizer."""
    return dpo(folder, reference=llama(), deepspeed=CONFIG)


def train_actor(_: Path) -> None:
    """Train a step of an actor as OpenRLHF makes it."""
    actor = engine(llama(), EMPTY_BLOCK)
    sentences = Sentences(0, 100)
    for index in range(actor.gradient_accumulation_steps()):
        tokens = sentences[index]["input_ids"][None]
        actor.backward(actor(input_ids=tokens, labels=tokens).loss)
        actor.step()


FRAMEWORKS: dict[str, Callable[[Path], Any]] = {
    "Trainer": partial(train, partial(trainer, auto_config(), EMPTY_BLOCK)),
    "TRL SFT": partial(train, partial(sft, deepspeed=CONFIG)),
    "TRL SFT with LoRA": partial(train, partial(sft, peft=LORA, deepspeed=CONFIG)),
    "DPO": partial(train, dpo_with_reference),
    "DPO with LoRA": partial(train, partial(dpo, peft=LORA, deepspeed=CONFIG)),
    "Accelerate": partial(run_accelerate, EMPTY_BLOCK),
    "LLaMA-Factory": partial(train, partial(trainer, LLAMA_FACTORY, EMPTY_BLOCK)),
    "axolotl": partial(train, partial(trainer, AXOLOTL_WITHOUT_ITS_KEY, EMPTY_BLOCK)),
    "ms-swift": partial(train, partial(trainer, MS_SWIFT, EMPTY_BLOCK)),
    "OpenRLHF": train_actor,
}


def main() -> None:
    """Train with the framework that the command line names."""
    _, framework, folder = sys.argv
    # Native code writes to the descriptors, too.
    with (Path(folder) / SCREEN).open("wb") as screen:
        for descriptor in (sys.stdout.fileno(), sys.stderr.fileno()):
            os.dup2(screen.fileno(), descriptor)
    FRAMEWORKS[framework](Path(folder) / "checkpoints")
    end_process()


if __name__ == "__main__":
    main()
