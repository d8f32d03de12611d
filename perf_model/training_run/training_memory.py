"""Compute the GPU memory that training takes without the optimizer: parameters, buckets, gradients and activations.

DeepSpeed's sizes are read from ``runtime/zero/stage3.py``, ``partition_parameters.py`` and
``partitioned_param_coordinator.py``. Parameters and gradients are in bf16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from perf_model.prediction.memory import SIXTEEN_BIT
from perf_model.training_run.activations import Activations
from perf_model.training_run.model import LAST_PRODUCTS, layer_and_module
from perf_model.training_run.shards import shard_numel

PARAM_BYTES = SIXTEEN_BIT.param
"""Bytes per parameter of a bf16 model, and per element of its gradients."""

CONTEXT_BYTES = 1_650_000_000
"""GPU memory that the driver, CUDA and the libraries of one process take outside PyTorch's allocator. The driver
reported it in a published run on one A100 (``act-output-13B-monitor-mem-single-GPU`` of
github.com/mauryaavinash95/deep-optimizer-states-results), 0.6 GB of it before the process began."""

COMMUNICATION_BYTES = 2_640_000_000
"""GPU memory that NCCL takes in addition where several ranks train: the driver reported 4.29 GB outside PyTorch's
allocator in the published runs on four H100s (``act-output-20B-scale-twinflow``)."""

WORKSPACE_BYTES = 400_000_000
"""GPU memory of workspaces for matrix products and of tables for masks and positions. The published runs had 0.14 to
0.50 GiB allocated before forward besides partitions, the bucket and the logits of the last iteration."""

CACHE_SHARE = 1.75
"""The bytes that PyTorch's cache holds at the peak, as a multiple of gathered parameters and gradients in flight.

DeepSpeed gathers, computes and reduces on three streams. The allocator reuses memory on the stream that freed it, and
not before other streams have finished with it. ``tests/model/test_training_memory.py`` compares the sum with all
published peaks.
"""


NORM_BYTES, NORM_CHUNK = 8, 250_000_000
"""DeepSpeed computes the norm of a partition in fp64, in chunks of so many elements (``_constant_buffered_norm2``)."""

BEFORE_FEED_FORWARD = ("input_layernorm", "self_attn", "attention", "attn", "ln_1")
TABLES = ("embed", "wte", "wpe")
"""Parts of the names of parameters, by the time at which backward computes their gradients."""


@dataclass(frozen=True, kw_only=True)
class ZeroSizes:
    """The sizes in DeepSpeed's config, in parameters of the whole model; by default its defaults."""

    reduce_bucket: int = 500_000_000
    prefetch_bucket: int = 50_000_000
    max_live: int = 1_000_000_000
    persistence_threshold: int = 100_000


DEFAULT_SIZES = ZeroSizes()


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """The GPU memory of one of ``world_size`` ranks that train with ZeRO-3, without the optimizer's states.

    Gradients that are accumulated on the GPU, or kept there for an update, belong to the plan. ``params_on_host``: the
    partitions of the parameters are in host memory. ``trainable_share`` of each parameter has gradients.
    """

    activations: Activations
    world_size: int
    params_on_host: bool = False
    trainable_share: float = 1.0
    sizes: ZeroSizes = DEFAULT_SIZES

    @property
    def gpu_bytes(self) -> int:
        """Return the bytes without which training fails: of the framework, and those allocated at the peak."""
        return self.context_bytes + self.allocated_bytes

    @property
    def context_bytes(self) -> int:
        """Return the bytes that the framework takes: outside PyTorch's allocator, and for its workspaces."""
        return CONTEXT_BYTES + WORKSPACE_BYTES + (COMMUNICATION_BYTES if self.world_size > 1 else 0)

    @property
    def cache_bytes(self) -> int:
        """Return the bytes that PyTorch's cache holds at the peak in addition.

        They are not needed: if an allocation fails, PyTorch gives them back and tries again, which takes time.
        """
        in_flight = max(gradients for _, gradients in self._moments())
        return round(CACHE_SHARE * (self.gathered_bytes + in_flight))

    @cached_property
    def allocated_bytes(self) -> int:
        """Return the bytes of all tensors at the peak, which is in backward."""
        peak = max(self.activations.peak_bytes, max(map(sum, self._moments())))
        return self.partition_bytes + self.bucket_bytes + self.gathered_bytes + peak

    @property
    def partition_bytes(self) -> int:
        """Return the bytes of this rank's partitions of the parameters."""
        return 0 if self.params_on_host else PARAM_BYTES * sum(self._partition(numel) for _, numel in self._parameters)

    @property
    def bucket_bytes(self) -> int:
        """Return the bytes of the bucket that gradients are copied to, which has its full size for every model."""
        return PARAM_BYTES * self.sizes.reduce_bucket

    @property
    def gathered_bytes(self) -> int:
        """Return the bytes of gathered parameters, and of the buffer of one gather of several parameters.

        Gathers run ahead until ``max_live`` parameters are live. If a layer has more, the one in use and the next one
        are gathered beyond that limit. Several small parameters are gathered together, and copied out of the buffer
        when the first of them is used. A single rank uses its partitions, unless they are in host memory.
        """
        if self._data_parallel == 1 and not self.params_on_host:
            return 0
        gathered = {name: numel for name, numel in self._parameters if numel > self.sizes.persistence_threshold}
        total = sum(gathered.values())
        persistent = sum(numel for _, numel in self._parameters) - total
        layer = sum(numel for name, numel in gathered.items() if (layer_and_module(name) or ("",))[0] == 0)
        beyond_limit = 2 * max(gathered.values()) if layer > self.sizes.max_live else 0
        live, together = min(total, self.sizes.max_live + beyond_limit), min(total, self.sizes.prefetch_bucket)
        return PARAM_BYTES * (persistent + live + together)

    def _moments(self) -> Iterator[tuple[int, int]]:
        """Yield the bytes of activations and of gradients whenever backward has computed a parameter's gradient.

        The gradient is copied to the bucket. If the bucket has no space for it, its gradients are reduced before:
        they are copied to a flat buffer (``reduce_scatter_coalesced``), unless there is one only. With an offloaded
        optimizer, the largest partition is then copied back from the host, and to fp64 for its norm.
        """
        filled, largest, count = 0, 0, 0
        shared = self.activations.shape.shared
        # Autograd adds up the gradients of a shared layer over all its uses, the first of which is in the last layer.
        unreduced_bytes = self._shared_gradient_bytes

        def reduction_bytes() -> int:
            is_copied = count > 1 or filled > self.sizes.reduce_bucket or largest % self._data_parallel > 0
            partition = self._partition(largest)
            norm_bytes = NORM_BYTES * min(partition, NORM_CHUNK)
            return PARAM_BYTES * (filled * is_copied + partition) + norm_bytes

        if unreduced_bytes:
            yield self.activations.in_feed_forward(self.activations.shape.layers - 1), unreduced_bytes
        for name, whole_numel in reversed(self._parameters):
            numel = trained_numel(whole_numel, self.trainable_share)
            activations, gradient = self._activations_at(name), PARAM_BYTES * numel
            if shared is not None and shared.has(name):
                gradient, unreduced_bytes = unreduced_bytes, unreduced_bytes - gradient
            if filled and filled + numel > self.sizes.reduce_bucket:
                yield activations, gradient + reduction_bytes()
                filled, largest, count = 0, 0, 0
            else:
                yield activations, gradient
            filled, largest, count = filled + numel, max(largest, numel), count + 1
        yield 0, reduction_bytes()

    @property
    def _shared_gradient_bytes(self) -> int:
        """Return the bytes of the gradients of layers that share their parameters, 0 if each layer has its own."""
        shared = self.activations.shape.shared
        if shared is None:
            return 0
        numels = (numel for name, numel in self._parameters if shared.has(name))
        return PARAM_BYTES * sum(trained_numel(numel, self.trainable_share) for numel in numels)

    def _activations_at(self, name: str) -> int:
        """Return the bytes of activations when the gradient of the parameter ``name`` exists."""
        found = layer_and_module(name)
        if found is None:
            is_table = any(part in name for part in TABLES)
            return 0 if is_table else self.activations.in_head
        layer, module = found
        if module in BEFORE_FEED_FORWARD:
            return self.activations.in_attention(layer)
        is_last = any(part in name for part in LAST_PRODUCTS)
        return (self.activations.after_last_product if is_last else self.activations.after_first_products)(layer)

    @cached_property
    def _parameters(self) -> list[tuple[str, int]]:
        """Return the parameters of which this rank has partitions: with tensor parallelism, shards of the model's."""
        tensor_parallel = self.activations.tensor_parallel
        parameters = self.activations.shape.parameters()
        return [(name, shard_numel(name, numel, tensor_parallel)) for name, numel in parameters]

    @property
    def _data_parallel(self) -> int:
        return self.world_size // self.activations.tensor_parallel

    def _partition(self, numel: int) -> int:
        return -(-numel // self._data_parallel)


def trained_numel(numel: int, trainable_share: float) -> int:
    """Return how many of ``numel`` parameters are trained, rounded up."""
    return numel if trainable_share == 1 else math.ceil(trainable_share * numel)
