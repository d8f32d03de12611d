"""Train a small Llama with Lightning's DeepSpeed strategy, and resume from the last checkpoint if there is one.

python examples/with_lightning.py --deepspeed_config examples/ds_config.json --output out/lightning --devices 2
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import lightning
import torch
from common.byte_llama import ByteWindows, byte_llama
from deepspeed.accelerator import get_accelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import Tensor
from torch.utils.data import DataLoader


class DeepSpeedOnCPU(DeepSpeedStrategy):
    """A DeepSpeed strategy for the CPU. Lightning's own strategy refuses all devices but CUDA, and needs an index."""

    def setup_environment(self) -> None:
        self.parallel_devices = [torch.device("cpu", index) for index in range(len(self.parallel_devices))]
        DDPStrategy.setup_environment(self)


class ResumableLoader(DataLoader[dict[str, Tensor]]):
    """A data loader that resumes at the batch at which it was saved.

    Lightning saves and restores every loader that has ``state_dict`` and ``load_state_dict``. A plain ``DataLoader``
    would start the text from the beginning.
    """

    batches = 0
    """The number of batches of this epoch that were returned so far."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for batch in islice(super().__iter__(), self.batches, None):
            self.batches += 1
            yield batch
        self.batches = 0

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


class ByteLlama(lightning.LightningModule):
    """The Llama of the examples, as a Lightning module."""

    def __init__(self) -> None:
        super().__init__()
        self.model = byte_llama()

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        loss = self.model(**batch).loss
        self.print(f"step {self.global_step + 1:3}  loss {loss.item():.6f}", flush=True)
        return loss

    def configure_optimizers(self) -> None:
        """Return no optimizer: the DeepSpeed config defines the optimizer and the scheduler."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small Llama on the source code of Python's standard library.")
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--output", type=Path, required=True, help="the folder for checkpoints")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save_every", type=int, default=10)
    parser.add_argument("--devices", type=int, default=1)
    args = parser.parse_args()

    checkpoints = ModelCheckpoint(
        args.output,
        "{step}",
        every_n_train_steps=args.save_every,
        save_top_k=-1,
        save_last="link",
        enable_version_counter=False,
    )
    on_cpu = get_accelerator().device_name() == "cpu"
    trainer = lightning.Trainer(
        accelerator="cpu" if on_cpu else "auto",
        devices=args.devices,
        strategy=(DeepSpeedOnCPU if on_cpu else DeepSpeedStrategy)(config=args.deepspeed_config),
        precision="bf16-true",
        max_steps=args.steps,
        callbacks=[checkpoints],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(ByteLlama(), ResumableLoader(ByteWindows(10_000), batch_size=8), ckpt_path="last")


if __name__ == "__main__":
    main()
