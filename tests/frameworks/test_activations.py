"""Compare the predicted activations with those that PyTorch's tracker finds for the Llama of Transformers.

The tensors are fake: no memory is allocated and no arithmetic is done, so that the model has the size of a real one.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoModelForCausalLM, LlamaConfig

from perf_model.training_run.decoder import llama
from perf_model.training_run.job import Job
from perf_model.training_run.model import ModelShape
from perf_model.training_run.training_memory import TrainingMemory
from tests.tiers import thorough

TOLERANCE = 0.05

SEQUENCE = 2048

SIZES = {"layers": 2, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "intermediate": 14336, "vocab": 64}
WIDE = llama("layers of Llama-3-8B", **SIZES)
"""Layers as in Llama-3-8B. Attention is not fused: fake tensors have no flash attention."""


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """A model, and how it is trained."""

    shape: ModelShape = WIDE
    recompute: bool = True


TRACKED = {
    "logits": Tracked(shape=llama("logits of Llama-3-8B", **{**SIZES, "vocab": 128_256})),
    "layers": Tracked(),
    "kept": Tracked(recompute=False),
}


def tracked_bytes(case: Tracked) -> int:
    """Return the peak of activations and temporary tensors in forward and backward of one sequence."""
    shape = case.shape
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
        tie_word_embeddings=False,
    )
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.bfloat16)
        if case.recompute:
            model.gradient_checkpointing_enable()
        model.train()
        for param in model.parameters():
            # DeepSpeed takes the gradient as soon as it exists.
            param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
        inputs = torch.randint(0, shape.vocab, (1, SEQUENCE))
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            outputs = model(input_ids=inputs, labels=inputs)
            outputs.loss.backward()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
    return sum(size for kind, size in peak.items() if str(kind).endswith((".ACT", ".TEMP")))


@pytest.mark.parametrize("name", ["logits", thorough("layers"), thorough("kept")])
def test_activations_take_as_much_as_the_tracker_of_pytorch_finds(name: str) -> None:
    case = TRACKED[name]
    job = Job(
        shape=case.shape,
        world_size=1,
        ranks_per_node=1,
        micro_batch=1,
        sequence=SEQUENCE,
        recompute=case.recompute,
        attention="eager",
    )
    assert TrainingMemory(job).activation_bytes == pytest.approx(tracked_bytes(case), rel=TOLERANCE)
