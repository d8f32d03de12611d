"""Check that Hugging Face's Trainer trains, evaluates, saves and resumes on the device bit-identically to the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelerate import PartialState
from deepspeed.accelerator import get_accelerator
from transformers import Trainer, TrainingArguments, training_args

from tests.ranks import ranks
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import LAZY
from tests.tiny_llama import VOCABULARY, tiny_llama
from tests.zero.parity.case import STRIDE_2, Case
from tests.zero.parity.training import Block, Record, assert_same_bits, collect

STEPS, SAVE_EVERY = 4, 2
AUTO = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "optimizer")


def train(block: Block, folder: Path, resume_from: Path | None = None) -> Record:
    config = Case(name="Trainer", blocks=(), sub_group_size=4000, schedule=False).ds_config(block)
    parameters = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    config |= {**dict.fromkeys(AUTO, "auto"), "optimizer": {"type": "AdamW", "params": parameters}}
    # Create the arguments before the model: with them, the model is partitioned while it is created.
    arguments = TrainingArguments(
        output_dir=str(folder),
        deepspeed=config,
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
    tokens = torch.randint(0, VOCABULARY, (32, 16), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": sequence, "labels": sequence} for sequence in tokens]
    model = tiny_llama(use_cache=False).model
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)
    trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
    engine = trainer.model_wrapped
    record = Record(optimizer_class=type(engine.optimizer).__name__)
    for key in ("loss", "eval_loss", "grad_norm", "learning_rate"):
        record.numbers[key] = [float(logged[key]) for logged in trainer.state.log_history if key in logged]
    collect(engine.optimizer, record)
    engine.destroy()
    return record


@contextmanager
def trainer_on_device() -> Iterator[None]:
    """Let ``Trainer`` train on the lazy device: Transformers and Accelerate know GPUs of other kinds only."""
    default = property(lambda _: torch.device(get_accelerator().current_device_name()))
    with (
        plugged(LAZY),
        mock.patch.object(PartialState, "default_device", default),
        mock.patch.object(training_args, "is_torch_bf16_gpu_available", return_value=True),
    ):
        yield


@pytest.mark.P1
@pytest.mark.P3
@pytest.mark.P4
@ranks(1, group=software_process_group)
def test_the_trainer_is_bit_identical_to_stock_on_the_cpu_also_after_a_checkpoint_of_the_other(tmp_path: Path) -> None:
    # Accelerate destroys the process group after each Trainer.
    PartialState.destroy_process_group = lambda *_: None
    saved = {name: tmp_path / name / f"checkpoint-{SAVE_EVERY}" for name in ("stock", "plugin")}
    from_start = train(None, tmp_path / "stock")
    resumed = train(None, tmp_path / "resumed", saved["stock"])
    with trainer_on_device():
        plugin = train(STRIDE_2, tmp_path / "plugin")
        from_stock = train(STRIDE_2, tmp_path / "from stock", saved["stock"])
    from_plugin = train(None, tmp_path / "from plugin", saved["plugin"])
    for expected, found in ((from_start, plugin), (resumed, from_stock), (resumed, from_plugin)):
        assert found.optimizer_class.startswith("DeepSpeed" if found is from_plugin else "DeepOptimizerStates")
        assert_same_bits(expected, found)
