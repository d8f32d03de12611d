"""Create engines that combine AutoEP with each kind of tensor parallelism, and answer with DeepSpeed's refusals."""

from __future__ import annotations

from typing import Any
from unittest import mock

import deepspeed
from deepspeed.module_inject.auto_ep_presets import base as auto_ep_presets

from tests.fork_server import import_all
from tests.launch import answer
from tests.zero.behaviour.experts import do_nothing, mixtral
from tests.zero.process_group import process_group
from tests.zero.tensor_parallel.layouts import MODEL_RANKS, SharedModel, layouts


def refusal(layout: SharedModel) -> str:
    """Return the error of an engine whose experts are divided between ranks that share a model."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "expert_parallel": {
            "enabled": True,
            "autoep_size": MODEL_RANKS,
            "preset_model": "mixtral",
            "use_grouped_mm": False,
        },
        "deep_optimizer_states": {},
        **layout.config,
    }
    model = mixtral()
    options = {} if layout.mpu is None else {"mpu": layout.mpu, "dist_init_required": False}
    try:
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, **options)
    except ValueError as error:
        return str(error)
    return ""


def main() -> None:
    with mock.patch.object(auto_ep_presets, "_install_instance_transformers_output_recorders", do_nothing):
        answer({name: refusal(layout) for name, layout in layouts().items()})


if __name__ == "__main__":
    import_all()
    with process_group():
        main()
