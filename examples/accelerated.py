"""Train a small Llama in a loop with Hugging Face's Accelerate, and resume from the last checkpoint if there is one.

accelerate launch --use_deepspeed --deepspeed_config_file examples/ds_config.json --num_processes 2 \
    examples/accelerated.py --output out/accelerate
"""

from __future__ import annotations

import argparse
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import DummyOptim, DummyScheduler, InitProcessGroupKwargs
from common.byte_llama import ByteWindows, byte_llama
from deepspeed.accelerator import get_accelerator
from torch.utils.data import DataLoader


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small Llama on the source code of Python's standard library.")
    parser.add_argument("--output", type=Path, required=True, help="the folder for checkpoints")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save_every", type=int, default=10)
    args = parser.parse_args()

    # On the CPU, Accelerate needs the backend. Without it, every process acts as the only one, and all read the same
    # batches.
    gloo = [InitProcessGroupKwargs(backend="gloo")] if get_accelerator().device_name() == "cpu" else []
    accelerator = Accelerator(kwargs_handlers=gloo)
    model = byte_llama()
    # The DeepSpeed config defines the optimizer and the scheduler.
    optimizer = DummyOptim(model.parameters())
    scheduler = DummyScheduler(optimizer)
    loader = DataLoader(ByteWindows(10_000), batch_size=8)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    saved = sorted(int(folder.name) for folder in args.output.glob("[0-9]*"))
    done = saved[-1] if saved else 0
    if done:
        accelerator.load_state(str(args.output / str(done)))
    for step, batch in enumerate(accelerator.skip_first_batches(loader, done), start=done + 1):
        if step > args.steps:
            break
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step:3}  loss {loss.item():.6f}", flush=True)
        if step % args.save_every == 0:
            accelerator.save_state(str(args.output / str(step)))
    accelerator.end_training()


if __name__ == "__main__":
    main()
