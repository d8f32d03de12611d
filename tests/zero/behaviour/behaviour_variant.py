"""Run scenarios with stock or with the plugin. A scenario is a generator of named values that its caller sees."""

from __future__ import annotations

import copy
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_local_optimizer_state

from tests.kernels.intercepted import before_each_update
from tests.zero.on_accelerator import on_accelerator
from tests.zero.parity.training import Block, Record, collect, real_numel

Seen = Iterator[tuple[str, Any]]
"""Tensors, numbers and text, each with a name, in the same order for stock and for the plugin."""
Scenario = Callable[["BehaviourVariant"], Seen]

BLOCK = {"placement": "stride", "update_stride": 2}
WIDTH = 14

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 10**9,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "sub_group_size": 150,
        "stage3_param_persistence_threshold": 20,
        # DeepSpeed's default is a buffer of 2 GB in fp32 for each engine.
        "reduce_bucket_size": 100_000,
    },
}
FP32 = {"bf16": {"enabled": False}}
FP16 = {**FP32, "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}}
BY_DTYPE = {torch.bfloat16: {}, torch.float16: FP16, torch.float32: FP32}


class BehaviourNet(torch.nn.Module):
    """Linear layers; inputs and outputs have shape [batch, ``WIDTH``]."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x


class BehaviourVariant:
    """The engines of one scenario, with the plugin's config block, or of stock if ``block`` is None."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._engines: list[Any] = []

    @property
    def optimizers(self) -> list[Any]:
        """Return the plugin's optimizers of the engines; none of stock."""
        return [] if self._block is None else [engine.optimizer for engine in self._engines]

    def in_each(self, blocks: Sequence[dict[str, Any]], scenario: Callable[[BehaviourVariant, int], Seen]) -> Seen:
        """Yield what ``scenario(self, index)`` sees with the plugin's block of that index; stock runs it only once."""
        if self._block is None:
            seen = list(scenario(self, 0))
            for _ in blocks:
                yield from seen
            return
        for index, block in enumerate(blocks):
            self._block = block
            yield from scenario(self, index)

    def replace_block(self, block: dict[str, Any]) -> None:
        """Use another config block for the plugin."""
        if self._block is not None:
            self._block = block

    def config(self, **changes: Any) -> dict[str, Any]:
        """Return ``BASE`` with the keys of ``changes`` replaced, or removed if None.

        The keys of ``zero_optimization`` are replaced one by one.
        """
        config = copy.deepcopy(BASE)
        zero = changes.pop("zero_optimization", {})
        config.update(changes)
        config["zero_optimization"].update(zero)
        config = {key: value for key, value in config.items() if value is not None}
        if self._block is not None:
            config["deep_optimizer_states"] = self._block
        return config

    def engine(self, model: torch.nn.Module, arguments: dict[str, Any] | None = None, **changes: Any) -> Any:
        """Return a new engine. ``arguments`` are passed to ``deepspeed.initialize``, ``changes`` to ``config``."""
        given = {"model_parameters": [param for param in model.parameters() if param.requires_grad]}
        given.update(arguments or {})
        engine, *_ = deepspeed.initialize(model=model, config=self.config(**changes), **given)
        self._engines.append(engine)
        return engine

    def forget(self, engine: Any) -> None:
        """Drop the reference to ``engine``, which the scenario does not destroy."""
        self._engines.remove(engine)

    def is_in_use(self) -> bool:
        """Return whether every engine has the optimizer of this variant."""
        expected = "DeepSpeedZeroOptimizer_Stage3" if self._block is None else "DeepOptimizerStates_Stage3"
        return all(type(engine.optimizer).__name__ == expected for engine in self._engines)

    def close(self) -> None:
        for engine in self._engines:
            engine.destroy()


def run(scenario: Scenario) -> dict[str, Any]:
    """Return how many values the caller of the scenario sees, and those that differ between stock and the plugin."""
    try:
        stock, ours = seen(scenario, None), seen(scenario, BLOCK)
    except Exception:  # noqa: BLE001 (the test shows it)
        return {"seen": 0, "differences": [traceback.format_exc()]}
    return {"seen": len(stock), "differences": unequal(stock, ours)[:5]}


def seen(scenario: Scenario, block: Block) -> list[tuple[str, object]]:
    """Return the values that the caller of the scenario sees with this config block."""
    torch.manual_seed(5)
    variant = BehaviourVariant(block)
    try:
        found = list(scenario(variant))
        found.append(("in use", variant.is_in_use()))
    finally:
        variant.close()
    return found


def slow_updates(variant: BehaviourVariant) -> AbstractContextManager[object]:
    """Let the plugin's updates last longer than an engine takes to read the parameters that it is created for."""

    def sleep(_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.05)

    return before_each_update(sleep) if variant.optimizers else nullcontext()


def inputs(step: int, dtype: torch.dtype = torch.bfloat16, rows: int = 2) -> torch.Tensor:
    """Return this rank's inputs of that step, of shape [rows, ``WIDTH``]."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return on_accelerator((2 * torch.randn(rows, WIDTH, generator=generator)).to(dtype))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return (output.float() ** 2).mean()


def train(engine: Any, steps: int = 3, dtype: torch.dtype = torch.bfloat16, first: int = 0) -> Seen:
    """Train the steps from ``first`` on, and yield the loss and the counters of each."""
    for step in range(first, first + steps):
        loss = loss_of(engine(inputs(step, dtype)))
        engine.backward(loss)
        engine.step()
        yield "loss", loss.detach()
        yield from counters(engine)


def counters(engine: Any) -> Seen:
    yield "norm", float(engine.get_global_grad_norm() or 0.0)
    yield "applied", engine.was_step_applied()
    yield "skipped", engine.skipped_steps
    yield "global steps", engine.global_steps
    yield "loss scale", float(engine.optimizer.loss_scale)
    yield "micro step", engine.optimizer.micro_step_id
    yield "lr", engine.get_lr()


def gradients(engine: Any) -> Seen:
    for name, param in engine.module.named_parameters():
        grad = safe_get_full_grad(param)
        yield f"grad of {name}", None if grad is None else grad.clone()


def params(engine: Any) -> Seen:
    """Yield the full fp32 parameters, and the gathered ones that forward computes with."""
    for name, param in engine.module.named_parameters():
        full = safe_get_full_fp32_param(param)
        yield f"fp32 {name}", None if full is None else full.clone()
        with deepspeed.zero.GatheredParameters([param]):
            yield name, param.data.clone()


def moments(engine: Any) -> Seen:
    for name, param in engine.module.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            state = safe_get_local_optimizer_state(param, key)
            yield f"{key} of {name}", None if state is None else state.flatten()[: real_numel(param)].clone()


def final_states(engine: Any) -> Seen:
    """Yield all states, parameters and step counts at the end of a scenario."""
    record = Record()
    collect(engine.optimizer, record)
    yield from record.numbers.items()
    yield from record.tensors.items()


def raised(call: Callable[[], Any]) -> str:
    """Return the type and the message of the exception that ``call`` must raise."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 (both variants must raise the same)
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no exception was raised")


def unequal(expected: list[tuple[str, Any]], found: list[tuple[str, Any]]) -> list[str]:
    """Return one line for each value that is not equal to the bit."""
    names = [name for name, _ in expected], [name for name, _ in found]
    if names[0] != names[1]:
        return [f"stock yields {len(names[0])} values, the plugin {len(names[1])}, or values with other names"]
    pairs = zip(expected, found, strict=True)
    return [f"{name}: stock {one}, found {other}" for (name, one), (_, other) in pairs if not same(one, other)]


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal to the bit, and tensors on the same device."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
            return False
        return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))
    return type(one) is type(other) and repr(one) == repr(other)
