"""Train a small Llama with Hugging Face's ``Trainer``, and resume from the last checkpoint if there is one.

deepspeed --num_accelerators 2 examples/hf_trainer.py --deepspeed_config examples/ds_config.json --output out/trainer
"""

from __future__ import annotations

import argparse
from pathlib import Path

from common.byte_llama import ByteWindows, byte_llama
from common.one_rank import be_the_only_rank_unless_launched
from deepspeed.accelerator import get_accelerator
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small Llama on the source code of Python's standard library.")
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--output", type=Path, required=True, help="the folder for checkpoints")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save_every", type=int, default=10)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the deepspeed launcher")
    args = parser.parse_args()

    be_the_only_rank_unless_launched()
    args.output.mkdir(parents=True, exist_ok=True)
    # Create the arguments before the model: with them, the model is partitioned while it is created.
    training = TrainingArguments(
        output_dir=str(args.output),
        deepspeed=args.deepspeed_config,
        # Values that the DeepSpeed config also has must be the same there, or "auto".
        bf16=True,
        per_device_train_batch_size=8,
        learning_rate=6e-4,
        adam_beta2=0.95,
        weight_decay=0.1,
        warmup_steps=10,
        max_steps=args.steps,
        save_steps=args.save_every,
        logging_steps=1,
        use_cpu=get_accelerator().device_name() == "cpu",
        report_to="none",
    )
    trainer = Trainer(model=byte_llama(), args=training, train_dataset=ByteWindows(10_000))
    trainer.train(resume_from_checkpoint=get_last_checkpoint(training.output_dir))


if __name__ == "__main__":
    main()
