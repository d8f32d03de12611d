"""Run scenarios with stock or with the plugin. A scenario is a generator of named values that its caller sees."""

from __future__ import annotations

import copy
import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_local_optimizer_state

from tests.kernels.intercepted import before_each_update
from tests.zero.on_accelerator import on_accelerator
from tests.zero.parity.training import Block, real_numel, recorded, same

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
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x


class BehaviourVariant:
    def __init__(self, block: Block) -> None:
        self.block = block
        self.engines: list[Any] = []

    def config(self, **changes: Any) -> dict[str, Any]:
        """Return ``BASE`` with the keys of ``changes`` replaced, or removed if None."""
        changes["zero_optimization"] = {**BASE["zero_optimization"], **changes.get("zero_optimization", {})}
        config = {key: value for key, value in {**BASE, **changes}.items() if value is not None}
        return copy.deepcopy(config if self.block is None else {**config, "deep_optimizer_states": self.block})

    def engine(self, model: torch.nn.Module, arguments: dict[str, Any] | None = None, **changes: Any) -> Any:
        given = {"model_parameters": [param for param in model.parameters() if param.requires_grad]}
        given.update(arguments or {})
        engine, *_ = deepspeed.initialize(model=model, config=self.config(**changes), **given)
        self.engines.append(engine)
        return engine

    def finish(self) -> Seen:
        expected = "DeepSpeedZeroOptimizer_Stage3" if self.block is None else "DeepOptimizerStates_Stage3"
        for engine in self.engines:
            if engine.global_steps > 0:
                yield from final_states(engine)
            yield "in use", type(engine.optimizer).__name__ == expected
        self.close()

    def close(self) -> None:
        while self.engines:
            self.engines.pop().destroy()


def in_each(*blocks: dict[str, Any]) -> Callable[[Scenario], Scenario]:
    """Return a decorator for a scenario: the plugin runs it with each of ``blocks``, and stock once."""

    def decorate(scenario: Scenario) -> Scenario:
        @functools.wraps(scenario)
        def in_turn(variant: BehaviourVariant) -> Seen:
            if variant.block is None:
                seen = [*scenario(variant), *variant.finish()]
                yield from seen * len(blocks)
                return
            for variant.block in blocks:
                torch.manual_seed(5)
                yield from scenario(variant)
                yield from variant.finish()

        return in_turn

    return decorate


def seen(scenario: Scenario, block: Block) -> list[tuple[str, object]]:
    torch.manual_seed(5)
    variant = BehaviourVariant(block)
    try:
        return [*scenario(variant), *variant.finish()]
    finally:
        variant.close()


READING_S = 0.01
"""The time per range with which an update lasts longer than an engine reads the parameters that it is created for."""


def slow_updates(variant: BehaviourVariant, range_s: float = 0.004) -> AbstractContextManager[object]:
    """Let the plugin's updates last longer, by ``range_s`` for each range, so that the calls after them find one."""

    def sleep(_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(range_s)

    return nullcontext() if variant.block is None else before_each_update(sleep)


def inputs(step: int, dtype: torch.dtype = torch.bfloat16, rows: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return on_accelerator((2 * torch.randn(rows, WIDTH, generator=generator)).to(dtype))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return (output.float() ** 2).mean()


def train(engine: Any, steps: int = 3, dtype: torch.dtype = torch.bfloat16, first: int = 0) -> Seen:
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
    record = recorded(engine)
    yield from record.numbers.items()
    yield from record.tensors.items()


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 (both variants must raise the same)
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no exception was raised")


def unequal(expected: list[tuple[str, Any]], found: list[tuple[str, Any]]) -> list[str]:
    names = [name for name, _ in expected], [name for name, _ in found]
    if names[0] != names[1]:
        return [f"stock yields {len(names[0])} values, the plugin {len(names[1])}, or values with other names"]
    pairs = zip(expected, found, strict=True)
    return [f"{name}: stock {one}, found {other}" for (name, one), (_, other) in pairs if not same(one, other)][:5]
