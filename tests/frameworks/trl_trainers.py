"""Train a small model with each of TRL's trainers, with stock and with the plugin, and report the engines used.

All runs share one process per rank, since imports take most of the time of a run. The last run requests an optimizer
that the plugin refuses.

    trl_trainers.py FOLDER   each run saves a checkpoint in FOLDER/TRAINER/stock or FOLDER/TRAINER/plugin
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import wrapt
from accelerate.state import AcceleratorState, PartialState
from datasets import Dataset
from deepspeed.runtime.engine import DeepSpeedEngine
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer
from transformers.integrations import unset_hf_deepspeed_config
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from tests.fork_server import freeze_imported, import_all
from tests.launch import answer
from tests.zero.process_group import end_process

STEPS = 3
BATCH_SIZE = 2
WORLD_SIZE = 2
CONTEXT = 64
SEED = 11

DEEPSPEED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": BATCH_SIZE,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-3, "warmup_num_steps": 10}},
    "zero_optimization": {
        "stage": 3,
        # LoRA's parameters, too, form several sub-groups, and not all parameters are persistent.
        "sub_group_size": 1_000,
        "stage3_param_persistence_threshold": 1_000,
        "offload_optimizer": {"device": "cpu"},
    },
    "deep_optimizer_states": {"placement": "stride", "update_stride": 2},
}

Report = dict[str, Any]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are bytes, so that nothing is downloaded."""
    specials = ["<pad>", "<eos>"]
    tokens = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def llama(seed: int = SEED) -> LlamaForCausalLM:
    """Return a small Llama model with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=88,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def lines(count: int) -> list[str]:
    """Return lines of Python's standard library, which every machine has, as training data."""
    code = Path(argparse.__file__).read_text().splitlines()
    return [line.strip() for line in code if len(line.strip()) > 20][:count]


def texts() -> Dataset:
    """Return the training data of SFT."""
    return Dataset.from_dict({"text": lines(WORLD_SIZE * BATCH_SIZE * STEPS)})


def preferences() -> Dataset:
    """Return pairs that prefer a line to its reversal."""
    pairs = [(line[:10], line[10:]) for line in lines(WORLD_SIZE * BATCH_SIZE * STEPS)]
    return Dataset.from_list([{"prompt": left, "chosen": right, "rejected": right[::-1]} for left, right in pairs])


def arguments(output: Path) -> dict[str, Any]:
    """Return the arguments that all trainers share."""
    return {
        "output_dir": str(output),
        "deepspeed": copy.deepcopy(DEEPSPEED),
        "optim": "adamw_torch",
        "bf16": True,
        "use_cpu": True,
        "learning_rate": 1e-3,
        "weight_decay": 0.01,
        "warmup_steps": 10,
        "per_device_train_batch_size": BATCH_SIZE,
        "max_steps": STEPS,
        "save_steps": STEPS,
        "max_length": CONTEXT,
        "report_to": "none",
        "disable_tqdm": True,
    }


def sft(output: Path, peft: LoraConfig | None = None, **changes: Any) -> Trainer:
    """Return an SFT trainer."""
    config = SFTConfig(**{**arguments(output), **changes})
    return SFTTrainer(llama(), config, train_dataset=texts(), processing_class=byte_tokenizer(), peft_config=peft)


def dpo(
    output: Path,
    peft: LoraConfig | None = None,
    reference: LlamaForCausalLM | None = None,
    model: LlamaForCausalLM | str | None = None,
    **changes: Any,
) -> Trainer:
    """Return a DPO trainer."""
    return DPOTrainer(
        llama() if model is None else model,
        reference,
        DPOConfig(**{**arguments(output), **changes}),
        train_dataset=preferences(),
        processing_class=byte_tokenizer(),
        peft_config=peft,
    )


def dpo_without_reference(output: Path) -> Trainer:
    """Return a DPO trainer that loads the reference model itself: the model before training."""
    return dpo(output, model=saved_model(output))


def saved_model(output: Path) -> str:
    """Save the model before training next to ``output``, and return its path."""
    saved = output.parent / f"model of {output.name}"
    llama().save_pretrained(saved)
    return str(saved)


def grpo(output: Path) -> Trainer:
    """Return a GRPO trainer, which generates text with the model between its steps, while an update may be in flight.

    It loads the reference model itself.
    """
    config = {key: value for key, value in arguments(output).items() if key != "max_length"}
    return GRPOTrainer(
        saved_model(output),
        different_characters,
        GRPOConfig(**config, num_generations=2, max_completion_length=16, beta=0.1),
        train_dataset=preferences().select_columns("prompt"),
        processing_class=byte_tokenizer(),
    )


def different_characters(completions: list[str], **_: Any) -> list[float]:
    """Return the reward of each generated text: the number of its different characters."""
    return [float(len(set(text))) for text in completions]


def sft_with_optimizer(output: Path, optim: str, peft: LoraConfig | None = None) -> Trainer:
    """Return an SFT trainer that creates the optimizer and the scheduler itself, without the DeepSpeed config."""
    config = {key: value for key, value in DEEPSPEED.items() if key not in ("optimizer", "scheduler")}
    return sft(output, peft, deepspeed=copy.deepcopy(config), optim=optim)


LORA = LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")

TRAINERS: dict[str, Callable[[Path], Trainer]] = {
    "SFT": sft,
    "SFT with LoRA": lambda output: sft_with_optimizer(output, "adamw_torch", LORA),
    # The reference model has other parameters than the model, so that the loss depends on it from the first step on.
    "DPO": lambda output: dpo(output, reference=llama(SEED + 1)),
    "DPO without reference": dpo_without_reference,
    # The reference model is the model without its adapters.
    "DPO with LoRA": lambda output: dpo(output, LORA),
    "GRPO": grpo,
}


def run(name: str, variant: str, folder: Path) -> Report:
    """Train with stock or with the plugin, and report the engines and the steps."""
    begin(plugin=variant == "plugin")
    trainer = TRAINERS[name](folder / name / variant)
    trainer.train()
    engine, reference = trainer.model_wrapped, getattr(trainer, "ref_model", None)
    return {
        "trainer": name,
        "variant": variant,
        "engines": [type(other.optimizer).__name__ for other in engines],
        "reference": type(reference.optimizer).__name__ if reference in engines else None,
        "steps": engine.global_steps,
        "several sub-groups": len(engine.optimizer.fp16_groups) > 2,
    }


def try_adafactor(folder: Path) -> Report:
    """Train with Adafactor, and report the error."""
    begin(plugin=True)
    trainer = sft_with_optimizer(folder / "adafactor", "adafactor")
    try:
        trainer.train()
    except ValueError as error:
        return {"error": type(error).__name__, "message": str(error), "steps": trainer.state.global_step}
    return {"error": None}


def begin(plugin: bool) -> None:
    """Prepare a run: enable or disable the plugin, and forget the previous run."""
    os.environ["DEEP_OPT_STATES"] = "1" if plugin else "0"
    # Accelerate and Transformers cache the config.
    AcceleratorState._reset_state(reset_partial_state=True)
    unset_hf_deepspeed_config()
    engines.clear()


engines: list[DeepSpeedEngine] = []


@wrapt.patch_function_wrapper("deepspeed.runtime.engine", "DeepSpeedEngine.__init__")
def remember_engine(construct: Any, engine: Any, args: Any, kwargs: Any) -> None:
    """Construct the engine and record it in ``engines``."""
    construct(*args, **kwargs)
    engines.append(engine)


def begin_program() -> Path:
    """Prepare this process for several runs, and return the folder that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    # Accelerate destroys the process group after each run.
    PartialState.destroy_process_group = lambda *_: None
    # DeepSpeed collects garbage for each engine, which would otherwise go through all modules of these libraries.
    import_all()
    freeze_imported()
    return folder


def main() -> None:
    """Run all trainers, and answer with a report of each run."""
    folder = begin_program()
    for name in TRAINERS:
        for variant in ("stock", "plugin"):
            answer(run(name, variant, folder))
    answer(try_adafactor(folder))
    end_process()


if __name__ == "__main__":
    main()
