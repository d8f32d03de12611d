"""Train models of libraries that are combined with ZeRO-3, with stock and with the plugin, and print the differences.

Arguments: any number of names of ``MODELS``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from tests.launch import answer
from tests.zero.parity.case import STRIDE_2
from tests.zero.parity.training import Block, Record, collect, differences
from tests.zero.process_group import process_group

VOCABULARY, WIDTH, HEADS = 97, 32, 4
Batch = tuple[torch.Tensor, torch.Tensor]


class Causal(torch.nn.Module):
    """A Hugging Face causal language model that maps tokens of shape [batch, sequence] to its loss."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


def llama(layers: int = 2) -> torch.nn.Module:
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=56,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(shape)


def lora() -> torch.nn.Module:
    return Causal(get_peft_model(llama(), LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.0)))


class Ulysses(torch.nn.Module):
    """Attention over a sequence that is split over the ranks. ``tokens`` are those of this rank's part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        qkv = self.qkv(x).view(*tokens.shape, 3, HEADS, WIDTH // HEADS).unbind(2)
        attention = DistributedAttention(attend, groups._get_sequence_parallel_group(), scatter_idx=2, gather_idx=1)
        x = attention(*(part.contiguous() for part in qkv), 0).reshape(x.shape)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


def attend(*qkv: torch.Tensor) -> torch.Tensor:
    """Return the causal attention of query, key and value, each of shape [batch, sequence, heads, head width]."""
    heads_first = (part.transpose(1, 2) for part in qkv)
    return torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2).contiguous()


def train(make_model: Callable[[], torch.nn.Module], block: Block, backend: str) -> Record:
    torch.manual_seed(0)
    model = make_model()
    world_size = dist.get_world_size()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.1,
        "bf16": {"enabled": True},
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "sub_group_size": 2000 // world_size,
            "stage3_param_persistence_threshold": 100,
        },
        **({"sequence_parallel_size": world_size, "data_parallel_size": 1} if make_model is Ulysses else {}),
        **({} if block is None else {"deep_optimizer_states": block}),
    }
    trainable = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, config=config)
    if backend:
        engine.compile(backend=backend)
    record = Record(optimizer_class=type(engine.optimizer).__name__)
    losses = record.numbers["loss"] = []
    norms = record.numbers["norm"] = []
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        tokens = torch.randint(0, VOCABULARY, (2, 16), generator=generator)
        loss = engine(tokens, tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
    collect(engine.optimizer, record)
    engine.destroy()
    return record


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {
    "transformers": (lambda: Causal(llama()), ""),
    "peft": (lora, ""),
    "traced by torch.compile": (lambda: Causal(llama(layers=1)), "eager"),
    # Each layer is compiled anew, which takes long.
    "torch.compile": (lambda: Causal(llama(layers=1)), "inductor"),
    "ulysses": (Ulysses, ""),
}
"""A function that makes the model, and the backend of ``torch.compile``, which is not called if the name is empty."""


def main(*names: str) -> None:
    for name in names:
        make_model, backend = MODELS[name]
        stock = train(make_model, None, backend)
        ours = train(make_model, STRIDE_2, backend)
        found = {
            "name": name,
            "classes": [stock.optimizer_class, ours.optimizer_class],
            "sub_groups": len(ours.numbers["step"]),
            "norms": stock.numbers["norm"],
            "differences": differences(stock, ours),
        }
        answer(found)


if __name__ == "__main__":
    with process_group():
        main(*sys.argv[1:])
