"""An engine with the decoupled writer cannot load the checkpoint that it has saved.

``torch.load`` is called without ``weights_only=False``. A config without the writer loads these checkpoints.
"""

import tempfile

import deepspeed
import torch

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "checkpoint": {"writer": {"type": "python", "decoupled": True}},
}

if __name__ == "__main__":
    model = torch.nn.Linear(8, 8)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    with tempfile.TemporaryDirectory() as folder:
        for tag in ("step1", "step2"):
            engine.backward(engine(torch.ones(1, 8)).sum())
            engine.step()  # commits the checkpoint of the step before
            engine.save_checkpoint(folder, tag=tag)
        try:
            engine.load_checkpoint(folder, tag="step1")
        except Exception as error:  # noqa: BLE001
            print(f"{type(error).__name__}: {str(error).partition('.')[0]}")
    engine.checkpoint_engine.cleanup()
