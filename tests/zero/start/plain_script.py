"""Train as a user's script, which does not mention any plugin: only its JSON config does."""

from __future__ import annotations

import sys

import deepspeed
import torch

from tests.zero.process_group import end_process


def train(config: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(3):
        x = torch.randn(2, 8, device=engine.device, dtype=torch.bfloat16)
        engine.backward(engine(x).float().square().mean())
        engine.step()
    # Several ranks share the output, so write the line at once.
    sys.stdout.write(f"trained with {type(engine.optimizer).__name__}\n")
    end_process()


if __name__ == "__main__":
    train(sys.argv[1])
