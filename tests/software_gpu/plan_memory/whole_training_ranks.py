"""Train a small Llama on the device, with stock and with plans, and print the predicted and the allocated peak.

Arguments: the names of trainings, see ``TRAININGS``. Every rank prints one answer per training.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from deep_opt_states.zero.start import planning
from perf_model.prediction.memory import MemoryKind, TrainingSetup, reserved_by_the_runtime
from perf_model.training_run.decoder import llama
from perf_model.training_run.job import Job
from perf_model.training_run.model import ModelShape
from perf_model.training_run.training_memory import TrainingMemory, ZeroSizes
from tests.launch import answer
from tests.software_gpu import device
from tests.software_gpu.filled_gpu.growing_inputs import slow_profile
from tests.software_gpu.library import DEVICE_TYPE
from tests.software_gpu.plan_memory.plan_memory_ranks import Answer
from tests.software_gpu.plugged import plugged
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.settings import GIB, Settings
from tests.zero.parity.training import Block

WIDTHS = {"layers": 3, "hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "intermediate": 896, "vocab": 512}
LLAMA = llama("small Llama", **WIDTHS)

SIZES = ZeroSizes(reduce_bucket=500_000, prefetch_bucket=50_000, max_live=1_000_000, persistence_threshold=1000)
"""DeepSpeed's sizes, in about the ratio to the model that its defaults have to a model of some billion parameters."""

STEPS = 3
"""DeepSpeed gathers ahead from the third step on, when it has recorded the order of the parameters."""


@dataclass(frozen=True, kw_only=True)
class WholeTraining:
    """A training of ``shape`` with the config block ``block``, or with stock if it is None."""

    block: Block = None
    shape: ModelShape = LLAMA
    micro_batch: int = 2
    sequence: int = 64
    recompute: bool = True
    accumulation: int = 1
    sizes: ZeroSizes = field(default_factory=lambda: SIZES)

    @property
    def memory(self) -> TrainingMemory:
        """Return the prediction without the optimizer."""
        ranks = dist.get_world_size()
        job = Job(
            shape=self.shape,
            world_size=ranks,
            ranks_per_node=ranks,
            micro_batch=self.micro_batch,
            sequence=self.sequence,
            recompute=self.recompute,
            attention="eager",
        )
        return TrainingMemory(job, self.sizes)

    @property
    def config(self) -> dict[str, Any]:
        """Return DeepSpeed's config."""
        zero = {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "sub_group_size": 1_000_000,
            "reduce_bucket_size": self.sizes.reduce_bucket,
            "stage3_prefetch_bucket_size": self.sizes.prefetch_bucket,
            "stage3_max_live_parameters": self.sizes.max_live,
            "stage3_max_reuse_distance": self.sizes.max_live,
            "stage3_param_persistence_threshold": self.sizes.persistence_threshold,
        }
        return {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": zero,
            **({} if self.block is None else {"deep_optimizer_states": self.block}),
        }

    @property
    def llama(self) -> LlamaConfig:
        """Return the shape as Transformers describes it."""
        return LlamaConfig(
            vocab_size=self.shape.vocab,
            hidden_size=self.shape.hidden,
            intermediate_size=self.shape.intermediate,
            num_hidden_layers=self.shape.layers,
            num_attention_heads=self.shape.heads,
            num_key_value_heads=self.shape.kv_heads,
            max_position_embeddings=self.sequence,
            use_cache=False,
            tie_word_embeddings=False,
        )


STREAMED = {"placement": "streamed", "num_slots": 2}
DEEP = llama("deeper Llama", **{**WIDTHS, "layers": 6, "intermediate": 512})
WIDE = llama("wider Llama", **{**WIDTHS, "layers": 2, "hidden": 384, "heads": 6, "kv_heads": 6, "intermediate": 1024})

TRAININGS = {
    "stock": WholeTraining(),
    "stock, activations are kept": WholeTraining(recompute=False),
    "streamed": WholeTraining(block=STREAMED),
    "stock, more sequences": WholeTraining(micro_batch=6),
    "stock, more sequences, activations are kept": WholeTraining(micro_batch=6, recompute=False),
    "stock, deep": WholeTraining(shape=DEEP),
    "stock, wide": WholeTraining(shape=WIDE),
    "stock, a large bucket": WholeTraining(sizes=replace(SIZES, reduce_bucket=2_000_000)),
    "cpu": WholeTraining(block={"placement": "cpu"}),
    "streamed, activations are kept": WholeTraining(block=STREAMED, recompute=False),
    "streamed, accumulation": WholeTraining(block=STREAMED, accumulation=2),
    "deep, a stride": WholeTraining(shape=DEEP, block={"placement": "stride", "update_stride": 2}),
}
"""The trainings by name."""


def states_bytes(training: WholeTraining, optimizer: Any) -> int:
    """Return the bytes that the running plan reserves on the device.

    Staging buffers are left out: the prediction without the optimizer has as many bytes for stock's copies.
    """
    if training.block is None:
        return 0
    setup = TrainingSetup(accumulates=training.accumulation > 1)
    reserved = reserved_by_the_runtime(optimizer._running.plan, setup)
    return sum(tensors.count * tensors.each_bytes for tensors in reserved if tensors.kind is MemoryKind.ACCELERATOR)


def train(training: WholeTraining) -> Answer:
    """Return the predicted and the allocated peak of the last step."""
    gc.collect()
    device.empty_cache()
    before = device.memory_allocated()
    with (
        plugged(Settings(memory_bytes=4 * GIB)),
        mock.patch.object(planning, "quick_profile", return_value=slow_profile()),
    ):
        torch.manual_seed(17)
        model = AutoModelForCausalLM.from_config(training.llama, attn_implementation="eager")
        if training.recompute:
            model.gradient_checkpointing_enable()
        model.train()
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=training.config
        )
        inputs = torch.randint(0, training.shape.vocab, (training.micro_batch, training.sequence)).to(DEVICE_TYPE)
        for _ in range(STEPS):
            device.reset_peak_memory_stats()
            for _ in range(training.accumulation):
                loss = engine(input_ids=inputs, labels=inputs).loss
                engine.backward(loss)
                engine.step()
                del loss
        device.synchronize()
        allocated = device.max_memory_allocated() - before
        states = states_bytes(training, engine.optimizer)
        engine.destroy()
    return {"predicted": training.memory.allocated_bytes + states, "allocated": allocated, "states": states}


def main(names: list[str]) -> None:
    for name in names:
        answer({"name": name, **train(TRAININGS[name])})


if __name__ == "__main__":
    with software_process_group():
        main(sys.argv[1:])
