"""Check that libraries combined with ZeRO-3 give the bits of stock; ``test_refusals.py`` has those that are refused."""

from __future__ import annotations

from collections.abc import Callable

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups
from peft import LoraConfig, get_peft_model

from tests.ranks import on_ranks
from tests.tiny_llama import VOCABULARY, WIDTH, LossOfCausalModel, tiny_llama
from tests.zero.parity.case import STRIDE_2
from tests.zero.parity.training import Block, Record, assert_same_bits, collect

HEADS = 4


def lora() -> torch.nn.Module:
    return LossOfCausalModel(
        get_peft_model(tiny_llama().model, LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.0))
    )


class Ulysses(torch.nn.Module):
    """Attention over a sequence that is split over the ranks. ``tokens`` are those of this rank's part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
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
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
    collect(engine.optimizer, record)
    engine.destroy()
    return record


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "transformers": tiny_llama,
    "peft": lora,
    "traced by torch.compile": lambda: tiny_llama(num_hidden_layers=1),
    "torch.compile": lambda: tiny_llama(num_hidden_layers=1),
    "ulysses": Ulysses,
}
BACKENDS = {"traced by torch.compile": "eager", "torch.compile": "inductor"}
"""The backends of ``torch.compile``."""


@pytest.mark.promise("P1")
@pytest.mark.parametrize(
    ("names", "world_size"),
    [
        (("transformers", "peft", "traced by torch.compile"), 1),
        (("ulysses",), 2),
        # Each layer is compiled anew, which takes long.
        pytest.param(("torch.compile",), 1, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_models_of_libraries_train_to_the_bits_of_stock(names: tuple[str, ...], world_size: int) -> None:
    on_ranks(world_size, compare, names)


def compare(names: tuple[str, ...]) -> None:
    for name in names:
        stock, ours = (train(MODELS[name], block, BACKENDS.get(name, "")) for block in (None, STRIDE_2))
        assert stock.optimizer_class == "DeepSpeedZeroOptimizer_Stage3"
        assert ours.optimizer_class == "DeepOptimizerStates_Stage3"
        assert len(ours.numbers["step"]) >= 3
        assert any(norm > 0.1 for norm in stock.numbers["norm"]), "clipping was never active"
        assert_same_bits(stock, ours)
