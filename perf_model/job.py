"""``Job``: a training run as far as a plan depends on it: its memory beside the optimizer, forward and backward.

Everything is of one rank. Communication between GPUs is taken to be hidden under the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from perf_model.hardware import HardwareProfile
from perf_model.model import ModelError, ModelShape
from perf_model.workload import Workload

PARAM_BYTES = 2
"""bf16."""

MAX_LIVE_PARAMETERS = 1_000_000_000
REDUCE_BUCKET_SIZE = 500_000_000
"""DeepSpeed's defaults of ``stage3_max_live_parameters`` and ``reduce_bucket_size``."""

CUDA_CONTEXT_BYTES = 2**30
"""Of driver, cuBLAS and NCCL; an assumption."""

GRADIENT_DOWN_BYTES, GRADIENT_UP_BYTES = 6, 2
"""A parameter's gradient on its way to host memory (DESIGN 1): down, up, and down again as fp32."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """ZeRO-3 over ``world_size`` ranks; each trains ``micro_batch`` sequences of ``sequence`` tokens a step.

    ``recompute``: activations are recomputed in backward. Raises ``ModelError`` for a number below 1.
    """

    shape: ModelShape
    world_size: int
    ranks_per_node: int
    micro_batch: int
    sequence: int
    recompute: bool = True

    def __post_init__(self) -> None:
        for key in ("world_size", "ranks_per_node", "micro_batch", "sequence"):
            value = getattr(self, key)
            if value < 1:
                raise ModelError(f"{key}: must be at least 1, found {value}.\nCorrect --{key.replace('_', '-')}.")
        if self.world_size % self.ranks_of_a_node:
            raise ModelError(
                f"ranks_per_node: must divide the world size, {self.world_size}, found {self.ranks_per_node}.\n"
                f"Correct --ranks-per-node or --world-size."
            )

    def workload(self, sub_group_size: int) -> Workload:
        return Workload.of_parameters(self.shape.parameters(), self.world_size, sub_group_size)

    @property
    def ranks_of_a_node(self) -> int:
        return min(self.ranks_per_node, self.world_size)

    @property
    def tokens(self) -> int:
        """A step, over all ranks."""
        return self.world_size * self.micro_batch * self.sequence

    def forward_s(self, flops_per_s: float) -> float:
        return self.shape.forward_flops(self.micro_batch, self.sequence) / flops_per_s

    def backward_s(self, flops_per_s: float) -> float:
        """Recomputation included; without the gradients' way to host memory."""
        flops = self.shape.iteration_flops(self.micro_batch, self.sequence, self.recompute)
        return flops / flops_per_s - self.forward_s(flops_per_s)

    def gradients_s(self, numel: int, profile: HardwareProfile) -> float:
        """Seconds in which the gradients of a rank's ``numel`` parameters pass to host memory; backward hides them."""
        down, up = profile.get("d2h_bytes_per_s"), profile.get("h2d_bytes_per_s")
        if down is None or up is None:
            return 0.0
        return numel * max(GRADIENT_DOWN_BYTES / down, GRADIENT_UP_BYTES / up)

    def mfu(self, iteration_s: float, peak_flops: float) -> float:
        """Model FLOPs utilisation: forward and backward once, without recomputation, of the GPU's peak."""
        return self.shape.iteration_flops(self.micro_batch, self.sequence, recompute=False) / (iteration_s * peak_flops)

    @property
    def gpu_bytes(self) -> int:
        """The GPU's peak in training, beside all optimizer states."""
        numel = self.shape.numel
        partition_bytes = PARAM_BYTES * -(-numel // self.world_size)
        gathered_bytes = PARAM_BYTES * min(numel, MAX_LIVE_PARAMETERS) if self.world_size > 1 else 0
        bucket_bytes = PARAM_BYTES * min(numel, REDUCE_BUCKET_SIZE)
        return CUDA_CONTEXT_BYTES + partition_bytes + gathered_bytes + bucket_bytes + self._activation_bytes()

    def _activation_bytes(self) -> int:
        """16-bit activations of a transformer (arXiv 2205.05198, section 4.1), attention scores never stored.

        34 bytes a token and hidden unit in a layer; with recomputation 2 in every layer and one layer's all. Logits
        in 16 bit, and in fp32 with their gradient.
        """
        tokens = self.micro_batch * self.sequence
        layer_bytes = 34 * tokens * self.shape.hidden
        checkpoints_bytes = 2 * tokens * self.shape.hidden * self.shape.layers
        layers_bytes = layer_bytes + checkpoints_bytes if self.recompute else layer_bytes * self.shape.layers
        return layers_bytes + (2 + 4 + 4) * tokens * self.shape.vocab
