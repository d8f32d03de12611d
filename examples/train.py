"""Train a small GPT with DeepSpeed: an ordinary script, which leaves everything else to the JSON config.

python examples/train.py --deepspeed_config examples/ds_config.json
torchrun --nproc-per-node 2 examples/train.py --deepspeed_config examples/ds_config.json
deepspeed --num_accelerators 2 examples/train.py --deepspeed_config examples/ds_config.json

With --output it saves checkpoints, and resumes from the last one if there is one.
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
from common.byte_gpt import ByteGPT, Shape, StdlibText
from common.one_rank import be_the_only_rank_unless_launched


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT on the source code of Python's standard library.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", help="the folder for checkpoints; without it, none are saved")
    parser.add_argument("--save_every", type=int, default=10)
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--width", type=int, default=Shape.width)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the deepspeed launcher")
    args = deepspeed.add_config_arguments(parser).parse_args()

    be_the_only_rank_unless_launched()
    torch.manual_seed(args.seed)
    shape = Shape(layers=args.layers, width=args.width)
    model = ByteGPT(shape)
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    if args.output:
        # This loads nothing if no checkpoint has been saved yet.
        engine.load_checkpoint(args.output)

    text = StdlibText()
    for step in range(engine.global_steps, args.steps):
        inputs, targets = text.batch(
            seed=args.seed,
            step=step,
            rank=engine.global_rank,
            batch_size=engine.train_micro_batch_size_per_gpu(),
            context=shape.context,
        )
        loss = engine(inputs.to(engine.device), targets.to(engine.device))
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0:
            print(f"step {step:3}  loss {loss.item():.6f}", flush=True)
        if args.output and engine.global_steps % args.save_every == 0:
            engine.save_checkpoint(args.output)
    engine.destroy()


if __name__ == "__main__":
    main()
