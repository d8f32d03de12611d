"""Train one arm in this process, and write a record for each number of tokens as soon as it is measured.

``benchmarks/gpu/processes.py`` starts it with the arguments of a ``ArmJob`` as JSON.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import deep_opt_states  # noqa: F401 (activates where the package is not installed)
from benchmarks.gpu.arms import FSDP2, TORCHAO, ArmJob, Qwen3
from benchmarks.gpu.energy import joules
from benchmarks.harness.interleaved_runs import ADAPTING, SEED, WARM_UP
from benchmarks.harness.overrides import deterministic_algorithms, without_updates
from benchmarks.harness.variants import NO_OFFLOAD, OURS_STAGE_3, STAGE_3, Variant
from tests.launch import answer

TIMED, TIMED_WITHOUT_UPDATES = 5, 3
"""Iterations that count. Before those without updates comes one that does not, in which the last update ends."""

STATES = ("exp_avg", "exp_avg_sq")

SOFTWARE_GPU = "SOFTWARE_GPU"
"""The environment variable that, set to 1, tries a quick run on the software GPU of the tests."""


@dataclass
class StartedArm:
    """An arm as the three calls of a step, and a context in which ``step`` updates nothing, if there is one."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor], None]
    step: Callable[[], None]
    configuration: str
    without_updates: Callable[[], Any] | None = None
    digest: Callable[[], str] | None = None


def train(job: ArmJob) -> Iterator[dict[str, Any]]:
    """Yield the record of each number of tokens."""
    setting, variant = job.setting, job.variant
    ours = variant is not None and variant.block is not None
    with deterministic_algorithms() if job.deterministic else nullcontext():
        training = _with_engine(variant, setting) if variant is not None else PEERS[job.arm](setting)
        losses: list[float] = []
        for index, tokens in enumerate(job.tokens):
            get_accelerator().reset_peak_memory_stats()
            batches = _batches(setting.with_tokens(tokens))
            # Ours plans after its first steps. Runs whose bits are compared have as many steps.
            first = ADAPTING if ours or job.deterministic else WARM_UP
            warm_up = _iterate(training, batches, first if index == 0 else 1)
            timed = _iterate(training, batches, TIMED)
            losses += warm_up["losses"] + timed["losses"]
            record = {
                **timed,
                "tokens": tokens,
                "configuration": training.configuration,
                "losses": losses,
                "gpu_peak_bytes": get_accelerator().max_memory_allocated() or 0,
                # Linux counts kilobytes.
                "host_peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            }
            if job.deterministic:
                assert training.digest is not None
                record["digest"] = training.digest()
            elif training.without_updates is not None:
                # A job that is killed meanwhile keeps these times.
                yield record
                with training.without_updates():
                    _iterate(training, batches, 1)
                    record["without_updates_s"] = _iterate(training, batches, TIMED_WITHOUT_UPDATES)["iteration_s"]
            yield record


def _batches(setting: Qwen3) -> Iterator[torch.Tensor]:
    """Yield random tokens of the shape (micro-batch, context), which differ between ranks."""
    generator = torch.Generator().manual_seed(SEED + int(os.environ["RANK"]))
    while True:
        tokens = torch.randint(setting.vocabulary, (setting.micro_batch, setting.context), generator=generator)
        yield tokens.to(get_accelerator().current_device_name())


def _iterate(training: StartedArm, batches: Iterator[torch.Tensor], count: int) -> dict[str, Any]:
    """Train ``count`` iterations, and return their seconds by the host's clock and their losses.

    An iteration ends where the next one starts. The device is synchronized before the first and after the last one. If
    the GPU reports its energy, ``joules`` covers one iteration. ``phases_s`` lists forward, backward and
    ``step()``.
    """
    losses, phases_s, starts_s = [], [], []
    get_accelerator().synchronize()
    joules_before = joules()
    for _ in range(count):
        starts_s.append(time.perf_counter())
        batch = next(batches)
        moments_s = [time.perf_counter()]
        loss = training.forward(batch)
        moments_s.append(time.perf_counter())
        training.backward(loss)
        moments_s.append(time.perf_counter())
        training.step()
        moments_s.append(time.perf_counter())
        losses.append(loss.detach())
        phases_s.append(tuple(end - start for start, end in pairwise(moments_s)))
    get_accelerator().synchronize()
    starts_s.append(time.perf_counter())
    joules_after = joules()
    measured = {
        "iteration_s": [end - start for start, end in pairwise(starts_s)],
        "mean_s": (starts_s[-1] - starts_s[0]) / count,
        "phases_s": list(zip(*phases_s, strict=True)),
        "losses": [float(loss) for loss in losses],
    }
    if joules_before is not None and joules_after is not None:
        measured["joules"] = (joules_after - joules_before) / count
    return measured


def _with_engine(variant: Variant, setting: Qwen3) -> StartedArm:
    """Return the arm that trains by DeepSpeed's engine of ``variant``."""
    if not dist.is_initialized():
        # NCCL refuses two ranks on one GPU.
        shared = torch.cuda.is_available() and int(os.environ["WORLD_SIZE"]) > torch.cuda.device_count()
        deepspeed.init_distributed(dist_backend="gloo" if shared else None)
    model, config = _model(setting, torch.bfloat16), variant.config_for(setting)
    if variant is NO_OFFLOAD and os.environ.get(SOFTWARE_GPU) == "1":
        # DeepSpeed's FusedAdam needs a CUDA compiler.
        variant = replace(variant, inner_optimizer="AdamW")
        config["optimizer"]["params"]["torch_adam"] = True
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return StartedArm(
        forward=lambda batch: engine(input_ids=batch, labels=batch).loss,
        backward=engine.backward,
        step=engine.step,
        configuration=variant.verify(engine),
        # SuperOffload updates by functions of its own.
        without_updates=without_updates if variant.optimizer_class in (STAGE_3, OURS_STAGE_3) else None,
        digest=lambda: _digest(engine),
    )


def _model(setting: Qwen3, dtype: torch.dtype) -> Any:
    """Return the model with the parameters of the seed, on this process's device."""
    torch.manual_seed(SEED)
    with torch.device(get_accelerator().current_device_name()):
        return setting.model(dtype)


def _digest(engine: Any) -> str:
    """Return a hash of all fp32 states, the same on all ranks. A collective."""

    def states() -> Iterator[torch.Tensor]:
        for param in engine.module.parameters():
            yield deepspeed.utils.safe_get_full_fp32_param(param)
            for name in STATES:
                yield deepspeed.utils.safe_get_full_optimizer_state(param, name)

    def hashed(state: torch.Tensor) -> bytes:
        return hashlib.sha256(state.numpy().data).digest()

    # One core hashes 1 GB in a second, and the states of a billion parameters have 12 GB.
    with ThreadPoolExecutor() as threads:
        digests = threads.map(hashed, (state.detach().float().cpu().contiguous() for state in states()))
        return hashlib.sha256(b"".join(digests)).hexdigest()


def _fsdp2(setting: Qwen3) -> StartedArm:
    """Return the arm that trains by FSDP2, which keeps fp32 parameters and states on the host and computes in bf16."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    on_cuda = torch.cuda.is_available()
    if not dist.is_initialized():  # by the software GPU
        # The norm of the gradients is a tensor on the host.
        dist.init_process_group("cuda:nccl,cpu:gloo" if on_cuda else "gloo")
    model = _model(setting, torch.float32)
    policies: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=on_cuda),
        # init_device_mesh refuses the name of the software GPU.
        "mesh": DeviceMesh(get_accelerator().device_name(), list(range(dist.get_world_size()))),
    }
    for layer in model.model.layers:
        fully_shard(layer, **policies)
    fully_shard(model, **policies)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **_adam(setting))

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return _by_pytorch(
        model, step, "FSDP2 with CPUOffloadPolicy, fp32 parameters and states, torch.optim.AdamW (fused)"
    )


def _torchao(setting: Qwen3) -> StartedArm:
    """Return the arm that trains by torchao's optimizer, whose states have the dtype of the parameters."""
    from torchao.optim import CPUOffloadOptimizer  # type: ignore[import-not-found]

    model = _model(setting, torch.bfloat16)
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, fused=True, **_adam(setting))

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return _by_pytorch(model, step, "CPUOffloadOptimizer over torch.optim.AdamW (fused), bf16 states, no clipping")


def _by_pytorch(model: Any, step: Callable[[], None], configuration: str) -> StartedArm:
    return StartedArm(
        forward=lambda batch: model(input_ids=batch, labels=batch).loss,
        backward=torch.Tensor.backward,
        step=step,
        configuration=configuration,
    )


def _adam(setting: Qwen3) -> dict[str, Any]:
    """Return the hyperparameters of DeepSpeed's config."""
    params: dict[str, Any] = setting.config["optimizer"]["params"]
    return params


PEERS = {FSDP2: _fsdp2, TORCHAO: _torchao}


def main(arguments: str) -> None:
    """Train the job, and write its records."""
    job = ArmJob(**json.loads(arguments))
    if not job.deterministic:
        # The harness sets it for reproducible bits.
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    if torch.cuda.is_available():
        # DeepSpeed takes the GPU of this number. More ranks than GPUs share them.
        os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with ExitStack() as resources:
        if os.environ.get(SOFTWARE_GPU) == "1":
            from benchmarks.emulated.run import software_gpu

            resources.enter_context(software_gpu())
        for record in train(job):
            answer(record)


if __name__ == "__main__":
    main(sys.argv[1])
    # The threads and processes of some arms never end.
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    os._exit(0)
