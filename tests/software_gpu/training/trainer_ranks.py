"""Train a small Llama with Hugging Face's Trainer on the CPU accelerator and on the device, and print the differences.

The argument is a folder. The Trainer trains, evaluates, saves and resumes by its own code. Attention is not fused,
because the CPU's fused kernel has other bits.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

from tests.launch import answer
from tests.software_gpu.hugging_face import keep_process_group, trainer_on_device
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import LAZY
from tests.zero.parity.case import STRIDE_2
from tests.zero.parity.training import Block, Record, collect, differences

VOCABULARY, CONTEXT = 61, 16
STEPS, SAVE_EVERY = 4, 2


class RandomTokens(Dataset[dict[str, torch.Tensor]]):
    """A dataset of random sequences, each the same whenever it is read."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, VOCABULARY, (CONTEXT,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def config(block: Block) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "sub_group_size": 4_000,
            "reduce_bucket_size": 10_000,
            "stage3_prefetch_bucket_size": 10_000,
            "stage3_param_persistence_threshold": 100,
        },
        **({} if block is None else {"deep_optimizer_states": block}),
    }


def train(block: Block, folder: Path, resume_from: Path | None = None) -> Record:
    """Train with the Trainer, from the start or from a checkpoint, and return the record."""
    # Create the arguments before the model: with them, the model is partitioned while it is created.
    arguments = TrainingArguments(
        output_dir=str(folder),
        deepspeed=config(block),
        bf16=True,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        max_steps=STEPS,
        save_steps=SAVE_EVERY,
        eval_strategy="steps",
        eval_steps=SAVE_EVERY,
        logging_steps=1,
        dataloader_num_workers=1,
        use_cpu=get_accelerator().device_name() == "cpu",
        report_to="none",
        disable_tqdm=True,
    )
    torch.manual_seed(17)
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(shape, attn_implementation="eager")
    trainer = Trainer(model=model, args=arguments, train_dataset=RandomTokens(), eval_dataset=RandomTokens())
    trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
    engine = trainer.model_wrapped
    record = Record(optimizer_class=type(engine.optimizer).__name__)
    for key in ("loss", "eval_loss", "grad_norm", "learning_rate"):
        record.numbers[key] = [float(logged[key]) for logged in trainer.state.log_history if key in logged]
    collect(engine.optimizer, record)
    engine.destroy()
    return record


def main(folder: Path) -> None:
    keep_process_group()
    saved = {name: folder / name for name in ("stock", "plugin")}
    on_cpu = {
        "from the start": train(None, saved["stock"]),
        "resumed": train(None, folder / "resumed", saved["stock"] / f"checkpoint-{SAVE_EVERY}"),
    }

    def answer_with(name: str, start: str, record: Record) -> None:
        answer({"name": name, "class": record.optimizer_class, "differences": differences(on_cpu[start], record)})

    with plugged(LAZY), trainer_on_device():
        answer_with("stock on the device", "from the start", train(None, folder / "stock on the device"))
        answer_with("plugin on the device", "from the start", train(STRIDE_2, saved["plugin"]))
        from_stock = train(STRIDE_2, folder / "from stock", saved["stock"] / f"checkpoint-{SAVE_EVERY}")
        answer_with("plugin on the device, from stock on the CPU", "resumed", from_stock)
    from_plugin = train(None, folder / "from plugin", saved["plugin"] / f"checkpoint-{SAVE_EVERY}")
    answer_with("stock on the CPU, from the plugin on the device", "resumed", from_plugin)


if __name__ == "__main__":
    with software_process_group():
        main(Path(sys.argv[1]))
