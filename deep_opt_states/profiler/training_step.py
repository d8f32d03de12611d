"""Train a few layers with stock ZeRO-3 for some steps, and measure what its host and its ``step()`` take.

An engine needs a process group of the accelerator and leaves threads and memory behind, so each rank measures in a
process of its own, which this module also is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from deep_opt_states.profiler.probes import ProbeError, slowest
from deep_opt_states.profiler.ranks import Ranks, call_on_all_ranks, free_port
from perf_model.prediction.hardware import TRAINING_QUANTITIES, Measurement

TIMEOUT_S = 180.0
"""The time after which a process is ended: its start, the kernels of DeepSpeed that it builds, and its steps."""

WARM_UPS, STEPS = 3, 7
"""DeepSpeed records the order of modules in its first steps."""


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The layers of one engine, and the tokens of its one sequence."""

    width: int
    tokens: int
    layers: int = 8


SMALL, LARGE, MANY_TOKENS = (
    {"cuda": Layers(width=256, tokens=128), "cpu": Layers(width=64, tokens=16)},
    {"cuda": Layers(width=2048, tokens=128), "cpu": Layers(width=512, tokens=16)},
    {"cuda": Layers(width=4096, tokens=8192, layers=2), "cpu": Layers(width=512, tokens=512, layers=2)},
)
"""The sizes by accelerator. The host limits the small layers, ``step()`` of the large ones depends on their parameters,
and products with many tokens limit the accelerator."""


def measure_training(ranks: Ranks) -> dict[str, Measurement]:
    """Return ``TRAINING_QUANTITIES`` of the slowest rank, waived with the reason if one fails. This is a collective."""
    port = ranks.gather(free_port())[0]
    try:
        found = slowest(ranks.gather(call_on_all_ranks(ranks, lambda: _measure_in_process(ranks, port))))
    except ProbeError as error:
        return dict.fromkeys(TRAINING_QUANTITIES, Measurement(waived=str(error)))
    return {name: Measurement(samples=(found[name],)) for name in TRAINING_QUANTITIES}


def _measure_in_process(ranks: Ranks, port: int) -> dict[str, float]:
    # The store of torchrun's agent listens at another port than the new group's.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    own = {"RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.size), "MASTER_PORT": str(port)}
    environ = {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", **inherited, **own}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "measured.json"
        command = [sys.executable, "-m", __name__, str(path)]
        try:
            # DeepSpeed prints dozens of lines on stdout, and its compilers also do.
            run = subprocess.run(
                command, env=environ, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise ProbeError(f"training a few layers took more than {TIMEOUT_S:.0f} s") from None
        if run.returncode != 0:
            last = (run.stderr.strip() or "no message").splitlines()[-1]
            raise ProbeError(f"training a few layers with DeepSpeed failed ({last})")
        measured: dict[str, float] = json.loads(path.read_text())
    implausible = [
        f"{name} {value:.3g}"
        for name, value in measured.items()
        if not TRAINING_QUANTITIES[name].low <= value <= TRAINING_QUANTITIES[name].high
    ]
    if implausible:
        raise ProbeError(f"implausible: {', '.join(implausible)}; other work on this machine disturbs the steps")
    return measured


@dataclass(frozen=True, kw_only=True)
class MeasuredSteps:
    """The median seconds of the phases of one engine's steps, with the sizes of its model."""

    modules: int
    numel: int
    forward_s: float
    backward_s: float
    step_s: float


def measure_here() -> dict[str, float]:
    """Return the quantities, measured by engines in this process, one after the other."""
    from deepspeed.accelerator import get_accelerator

    name = "cpu" if get_accelerator().device_name() == "cpu" else "cuda"
    sizes = MANY_TOKENS[name]
    alone, small, large = _train(SMALL[name]), _train(SMALL[name], offloads=True), _train(LARGE[name], offloads=True)
    many = _train(sizes)
    scores = 2 * sizes.layers * sizes.width * sizes.tokens
    # Each rank updates its part.
    param_s = int(os.environ["WORLD_SIZE"]) * max(1e-12, large.step_s - small.step_s) / (large.numel - small.numel)
    fixed_s = small.step_s - param_s * small.numel / int(os.environ["WORLD_SIZE"])
    return {
        "training_flops_per_s": 6 * sizes.tokens * (many.numel + scores) / (many.forward_s + many.backward_s),
        "module_forward_s": alone.forward_s / alone.modules,
        "module_backward_s": alone.backward_s / alone.modules,
        "module_gradients_s": max(0.0, small.backward_s - alone.backward_s) / alone.modules,
        "module_step_s": max(0.0, fixed_s) / alone.modules,
        "stock_step_params_per_s": 1 / param_s,
    }


def make_layers(sizes: Layers) -> Any:
    """Return decoder-like layers, each with attention and a feed-forward, which map [1, tokens, width] to a loss."""
    import torch
    from torch import nn

    class DecoderLayer(nn.Module):
        """A layer with four matrices and two norms."""

        def __init__(self) -> None:
            super().__init__()
            width = sizes.width
            self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
            self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = (*x.shape[:-1], sizes.width // 64, 64)
            q, k, v = (each.view(heads).transpose(1, 2) for each in self.qkv(self.attention_norm(x)).chunk(3, dim=-1))
            attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
            changed: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
            return changed

    return nn.Sequential(*(DecoderLayer() for _ in range(sizes.layers)))


def _train(sizes: Layers, *, offloads: bool = False) -> MeasuredSteps:
    """Return the times of steps with a fresh engine."""
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    # The accelerator's own Adam would have to be compiled, and its time is not measured here.
    params = {"lr": 1e-4} if offloads else {"lr": 1e-4, "torch_adam": True}
    offload = {"offload_optimizer": {"device": "cpu"}} if offloads else {}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": params},
        "zero_optimization": {"stage": 3, **offload},
    }
    accelerator = get_accelerator()
    model = make_layers(sizes)
    # Modules with parameters, without the model itself.
    modules = sum(any(True for _ in module.parameters()) for module in model.modules()) - 1
    numel = sum(param.numel() for param in model.parameters())
    engine, *_ = deepspeed.initialize(model=model, config=config)
    x = torch.randn(1, sizes.tokens, sizes.width, dtype=torch.bfloat16, device=engine.device)

    def now() -> float:
        accelerator.synchronize()
        return time.perf_counter()

    times: list[tuple[float, float, float]] = []
    for _ in range(WARM_UPS + STEPS):
        start_s = now()
        loss = engine(x).float().pow(2).mean()
        forward_s = now()
        engine.backward(loss)
        backward_s = now()
        engine.step()
        times.append((forward_s - start_s, backward_s - forward_s, now() - backward_s))
    engine.destroy()
    accelerator.empty_cache()
    forward, backward, step = (median(samples) for samples in zip(*times[WARM_UPS:], strict=True))
    return MeasuredSteps(modules=modules, numel=numel, forward_s=forward, backward_s=backward, step_s=step)


def main() -> None:
    """Measure, and write the quantities as JSON to the file that the command line names."""
    import deepspeed

    deepspeed.init_distributed()
    Path(sys.argv[1]).write_text(json.dumps(measure_here()))


if __name__ == "__main__":
    main()
