"""Compute the memory that training takes without the optimizer.

Sources are DeepSpeed's ``runtime/zero/stage3.py``, ``partition_parameters.py`` and
``partitioned_param_coordinator.py``, and Hugging Face's Llama.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from perf_model.training_run.job import Job
from perf_model.training_run.micro_batch import PARAM_BYTES
from perf_model.training_run.model import LAST_PRODUCTS, layer_and_module, layer_in

CONTEXT_BYTES = 1_650_000_000
"""GPU memory of one process outside PyTorch's allocator, as the driver reported in a published run on one A100
(``act-output-13B-monitor-mem-single-GPU`` of github.com/mauryaavinash95/deep-optimizer-states-results)."""

COMMUNICATION_BYTES = 2_640_000_000
"""GPU memory of NCCL: the driver reported 4.29 GB outside PyTorch's allocator in the published runs on four H100s
(``act-output-20B-scale-twinflow``)."""

WORKSPACE_BYTES = 400_000_000
"""GPU memory of workspaces and tables. The published runs had 0.14 to 0.50 GiB allocated before forward besides
partitions, bucket and logits."""

CACHE_SHARE = 1.75
"""The bytes of PyTorch's cache at the peak, as a multiple of gathered parameters and gradients in flight. Memory is
reused on the stream that freed it, and only after DeepSpeed's other two streams have finished with it."""

NORM_BYTES, NORM_CHUNK = 8, 250_000_000
"""DeepSpeed computes norms in fp64, in chunks of so many elements (``_constant_buffered_norm2``)."""

SYSTEM_BYTES, RANK_BYTES = 7_300_000_000, 6_650_000_000
"""Host memory of the system, and of a process that trains on a GPU. Published logs have 13.0 GiB in use with one rank
(``act-output-13B-scale-gaps-scale-DP``) and 31.6 GiB with four (``act-output-20B-scale-twinflow``)."""

CPU_RANK_BYTES = 500_000_000
"""Host memory of a process that trains on the CPU, measured after importing DeepSpeed and Transformers."""

SCORE_BYTES: dict[str, tuple[int, int]] = {"flash": (0, 0), "fused_softmax": (2, 4), "eager": (6, 12)}
"""Bytes per attention score that a layer keeps for backward, and at the peak of backward. ``eager`` is the attention of
Transformers with softmax in fp32, and ``fused_softmax`` is Megatron-LM's without flash attention."""

LOGIT_BYTES, LOGIT_GRADIENT_BYTES = 14, 4
"""Bytes per logit in the backward of the loss (``transformers/loss/loss_utils.py``): three fp32 tensors and one in
bf16. When the gradient of the head's weight exists, the logits and their gradient are left, in bf16."""

BEFORE_FEED_FORWARD = ("input_layernorm", "self_attn", "attention", "attn", "ln_1")
TABLES = ("embed", "wte", "wpe")
NORM_BIASES = ("norm.bias", "layernorm.bias", "ln_1.bias", "ln_f.bias", "layer_norm.bias")
"""Parts of names of parameters: before the feed-forward, of tables, and of the biases that only LayerNorm has."""


def reserved_host_bytes(ranks: int, *, has_gpu: bool) -> int:
    """Return the bytes per node that a plan leaves to the system and to ``ranks`` processes."""
    # Weights that are loaded at start are on the GPU before the optimizer takes host memory, and are not counted.
    return SYSTEM_BYTES + RANK_BYTES * ranks if has_gpu else CPU_RANK_BYTES * ranks


@dataclass(frozen=True, kw_only=True)
class ZeroSizes:
    """The sizes in DeepSpeed's config with their defaults, in parameters of the whole model."""

    reduce_bucket: int = 500_000_000
    prefetch_bucket: int = 50_000_000
    max_live: int = 1_000_000_000
    persistence_threshold: int = 100_000


DEFAULT_SIZES = ZeroSizes()


@dataclass(frozen=True)
class TrainingMemory:
    """The GPU memory of one rank of ``job`` without the optimizer's states.

    Gradients that stay on the GPU belong to the plan. With recomputation, backward has all activations of one layer,
    and only the inputs of the layers before. Tensor-parallel ranks divide the heads and the feed-forward (arXiv
    2205.05198, section 4.2.1), and each has all logits, which AutoTP gathers.
    """

    job: Job
    sizes: ZeroSizes = DEFAULT_SIZES

    @property
    def gpu_bytes(self) -> int:
        """Return the bytes without which training fails."""
        return self.context_bytes + self.allocated_bytes

    @property
    def context_bytes(self) -> int:
        return CONTEXT_BYTES + WORKSPACE_BYTES + (COMMUNICATION_BYTES if self.job.world_size > 1 else 0)

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of PyTorch's cache at the peak. It frees them if an allocation fails, which takes time."""
        return round(CACHE_SHARE * (self.gathered_bytes + max(gradients for _, gradients in self.moments)))

    @cached_property
    def allocated_bytes(self) -> int:
        """Return the bytes of all tensors at the peak, which is in backward."""
        # The bucket of gradients has its full size for every model.
        bucket_bytes = PARAM_BYTES * self.sizes.reduce_bucket
        peak = max(self.activation_bytes, *map(sum, self.moments))
        return self.partition_bytes + bucket_bytes + self.gathered_bytes + peak

    @property
    def partition_bytes(self) -> int:
        return 0 if self.job.offload_param else PARAM_BYTES * self.job.padded_numel

    @property
    def gathered_bytes(self) -> int:
        """Return the bytes of gathered parameters, and of the buffer of one gather of several parameters.

        Gathers run ahead until ``max_live`` parameters are live, but the layer in use and the next one are always
        gathered. A single rank uses its partitions, unless they are in host memory.
        """
        if self.job.data_parallel == 1 and not self.job.offload_param:
            return 0
        shards, sizes = self.job.shards, self.sizes
        gathered = {name: numel for name, numel in shards.items() if numel > sizes.persistence_threshold}
        total = sum(gathered.values())
        layer = sum(numel for name, numel in gathered.items() if (layer_and_module(name) or ("",))[0] == 0)
        beyond_limit = 2 * max(gathered.values()) if layer > sizes.max_live else 0
        live, together = min(total, sizes.max_live + beyond_limit), min(total, sizes.prefetch_bucket)
        return PARAM_BYTES * (self.job.shard_numel - total + live + together)

    @cached_property
    def moments(self) -> list[tuple[int, int]]:
        """Return the bytes of activations and of gradients whenever backward has computed a parameter's gradient.

        If the bucket has no space for it, the gradients in the bucket are reduced first. If there are several, they are
        copied to a flat buffer (``reduce_scatter_coalesced``). With an offloaded optimizer, the largest partition is
        then copied back from the host, and to fp64 for its norm.
        """
        job, shared = self.job, self.job.shape.shared
        moments, filled, largest, count = [], 0, 0, 0

        def reduction_bytes() -> int:
            is_copied = count > 1 or filled > self.sizes.reduce_bucket or largest % job.data_parallel > 0
            partition = job.partition_numel(largest)
            return PARAM_BYTES * (filled * is_copied + partition) + NORM_BYTES * min(partition, NORM_CHUNK)

        # Autograd adds up the gradients of a shared layer over all its uses, the first of which is in the last layer.
        in_layers = {name for name in job.shards if shared is not None and layer_in(shared.path, name) is not None}
        unreduced_bytes = PARAM_BYTES * sum(job.trained(job.shards[name]) for name in in_layers)
        if unreduced_bytes:
            moments.append((self.in_feed_forward(job.shape.layers - 1), unreduced_bytes))
        for name, shard in reversed(job.shards.items()):
            numel = job.trained(shard)
            activations, gradient = self._at_gradient(name), PARAM_BYTES * numel
            if name in in_layers:
                gradient, unreduced_bytes = unreduced_bytes, unreduced_bytes - gradient
            if filled and filled + numel > self.sizes.reduce_bucket:
                gradient += reduction_bytes()
                filled, largest, count = 0, 0, 0
            moments.append((activations, gradient))
            filled, largest, count = filled + numel, max(largest, numel), count + 1
        return [*moments, (0, reduction_bytes())]

    @property
    def activation_bytes(self) -> int:
        """Return the peak of the activations: in the backward of the loss or of the last layer."""
        layers = self.job.shape.layers
        logits_bytes = LOGIT_BYTES * self._tokens * self.job.shape.vocab
        in_loss = self.kept_bytes(layers) + logits_bytes + (self._norm_bytes + 2) * self._elements
        return max(in_loss, self.in_feed_forward(layers - 1), self.in_attention(layers - 1))

    @cached_property
    def layer_bytes(self) -> int:
        saved, _ = SCORE_BYTES[self.job.attention]
        return self._attention_bytes(saved) + self._norm_bytes * self._elements + 2 * self._product_bytes

    def kept_bytes(self, layers: int) -> int:
        """Return the bytes of activations that so many layers keep for backward."""
        return layers * (2 * self._elements if self.job.recompute else self.layer_bytes)

    def in_feed_forward(self, layer: int) -> int:
        """Return the most activations in the backward of a layer's feed-forward."""
        return self._kept_before(layer) + self.layer_bytes + self._product_bytes + 4 * self._elements

    def in_attention(self, layer: int) -> int:
        """Return the activations in the backward of attention, when the feed-forward has freed its own."""
        _, peak = SCORE_BYTES[self.job.attention]
        return self._kept_before(layer) + self._attention_bytes(peak) + 4 * self._elements

    def _at_gradient(self, name: str) -> int:
        if (found := layer_and_module(name)) is None:
            logits_bytes = LOGIT_GRADIENT_BYTES * self._tokens * self.job.shape.vocab
            is_table = any(part in name for part in TABLES)
            return 0 if is_table else self.kept_bytes(self.job.shape.layers) + logits_bytes
        layer, module = found
        if module in BEFORE_FEED_FORWARD:
            return self.in_attention(layer)
        if any(part in name for part in LAST_PRODUCTS):
            # Gate and up have no gradients yet.
            return self.in_feed_forward(layer) - self._product_bytes + self._product_bytes // self._products
        # Both have gradients, and the four products are freed.
        return self.in_feed_forward(layer) - 2 * self._product_bytes

    def _kept_before(self, layer: int) -> int:
        return self.kept_bytes(layer + 1 if self.job.recompute else layer)

    @property
    def _tokens(self) -> int:
        return self.job.micro_batch * self.job.sequence

    @property
    def _elements(self) -> int:
        return self._tokens * self.job.shape.hidden

    @cached_property
    def _norm_bytes(self) -> int:
        # LayerNorm keeps input and output. RMSNorm keeps its input in fp32, and its output before and after the weight.
        return 4 if any(tensor.name.endswith(NORM_BIASES) for tensor in self.job.shape.tensors) else 8

    def _attention_bytes(self, score_bytes: int) -> int:
        """Return the bytes of norm, query, key, value and output, with ``score_bytes`` per score."""
        shape = self.job.shape
        # Without a flash kernel, keys and values are repeated for each head of the query.
        key_value_heads = shape.kv_heads if self.job.attention == "flash" else shape.heads
        # The widths of a model that was only counted are unknown: a GPT's are assumed.
        projections = 4 * shape.head_dim * (shape.heads + key_value_heads) or 8 * shape.hidden
        scores = score_bytes * shape.heads * self.job.sequence
        return self._norm_bytes * self._elements + self._tokens * ((projections + scores) // self.job.tensor_parallel)

    @cached_property
    def _products(self) -> int:
        names = (tensor.name for tensor in self.job.shape.tensors)
        return 2 if any("gate_proj" in name or "gate_up" in name for name in names) else 1

    @cached_property
    def _product_bytes(self) -> int:
        width = self.job.shape.intermediate or 4 * self.job.shape.hidden
        return 2 * self._tokens * self._products * -(-width // self.job.tensor_parallel)
