"""ZeRO-3 refuses a scalar parameter, and one that is not contiguous, by an error of PyTorch that does not name it."""

import deepspeed
import torch

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}


class OneParameter(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        values = {"scalar": torch.tensor(1.0), "transposed": torch.ones(4, 2).t(), "vector": torch.ones(8)}
        self.weight = torch.nn.Parameter(values[kind])


if __name__ == "__main__":
    deepspeed.init_distributed()
    for with_init in (True, False):
        for kind in ("vector", "scalar", "transposed"):
            try:
                with deepspeed.zero.Init(config_dict_or_path=CONFIG, enabled=with_init):
                    model = OneParameter(kind)
                deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
                print(f"zero.Init {with_init}, {kind}: accepted")
            except RuntimeError as error:
                print(f"zero.Init {with_init}, {kind}: {type(error).__name__}: {error}")
