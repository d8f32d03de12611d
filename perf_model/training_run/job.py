"""``Job``: a training run as far as a plan depends on it: its memory beside the optimizer, forward and backward.

Everything is of one rank. Communication between GPUs is taken to be hidden under the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from perf_model.prediction.hardware import HardwareProfile
from perf_model.schedule.placement import Placement
from perf_model.schedule.plan import UpdatePlan
from perf_model.schedule.workload import Workload
from perf_model.training_run.model import ModelError, ModelShape, require_integer

PARAM_BYTES = 2
"""bf16."""

MAX_LIVE_PARAMETERS = 1_000_000_000
REDUCE_BUCKET_SIZE = 500_000_000
"""DeepSpeed's defaults of ``stage3_max_live_parameters`` and ``reduce_bucket_size``."""

MOST_TOKENS = 10**7
"""Of a rank in a step; with any model, bytes stay below 2^63."""

CUDA_CONTEXT_BYTES = 2**30
"""Of driver, cuBLAS and NCCL; an assumption."""


@dataclass(frozen=True, kw_only=True)
class GradientPath:
    """Bytes of gradients that pass a rank's link in a backward."""

    down: int = 0
    up: int = 0

    @classmethod
    def of(cls, plan: UpdatePlan) -> GradientPath:
        """Ours: down to what the CPU updates, once; what is updated on the accelerator keeps its gradients there."""
        return cls(down=PARAM_BYTES * plan.numel(Placement.CPU))

    @classmethod
    def of_stock(cls, plan: UpdatePlan) -> GradientPath:
        """Every one goes down to the buffer that sums it, and up again; and down once more, as fp32, if its states are
        in host memory (``stage3.py``, ``partition_grads``). Twin-Flow's residents are beside their states."""
        numel = plan.workload.numel
        return cls(down=PARAM_BYTES * numel + 4 * (numel - plan.numel(Placement.RESIDENT)), up=PARAM_BYTES * numel)


@dataclass(frozen=True, kw_only=True)
class Job:
    """ZeRO-3 over ``world_size`` ranks; each trains ``micro_batch`` sequences of ``sequence`` tokens a step.

    ``recompute``: activations are recomputed in backward. Raises ``ModelError`` for an impossible number.
    """

    shape: ModelShape
    world_size: int
    ranks_per_node: int
    micro_batch: int
    sequence: int
    recompute: bool = True

    def __post_init__(self) -> None:
        most = {"world_size": 10**6, "ranks_per_node": 10**4, "micro_batch": 10**6, "sequence": MOST_TOKENS}
        for key, limit in most.items():
            require_integer(key, getattr(self, key), 1, limit, f"Correct --{key.replace('_', '-')}.")
        if self.micro_batch * self.sequence > MOST_TOKENS:
            rule = f"micro_batch: must be at most {MOST_TOKENS:,} tokens with these sequences, {self.sequence} each"
            raise ModelError(f"{rule}, found {self.micro_batch}.\nCorrect --micro-batch or --sequence.")
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

    def gradients_s(self, path: GradientPath, profile: HardwareProfile) -> float:
        """Seconds in which the gradients pass the link; backward hides them."""
        d2h, h2d, both = map(profile.get, ("d2h_bytes_per_s", "h2d_bytes_per_s", "both_bytes_per_s"))
        if d2h is None or h2d is None or both is None:
            return 0.0
        return max(path.down / d2h, path.up / h2d, (path.down + path.up) / both)

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
        return CUDA_CONTEXT_BYTES + partition_bytes + gathered_bytes + bucket_bytes + self.activation_bytes

    @property
    def activation_bytes(self) -> int:
        """16-bit activations of a transformer (arXiv 2205.05198, section 4.1), attention scores never stored.

        34 bytes a token and hidden unit in a layer; with recomputation 2 in every layer and one layer's all. Logits
        in 16 bit, and in fp32 with their gradient.
        """
        tokens = self.micro_batch * self.sequence
        layer_bytes = 34 * tokens * self.shape.hidden
        checkpoints_bytes = 2 * tokens * self.shape.hidden * self.shape.layers
        layers_bytes = layer_bytes + checkpoints_bytes if self.recompute else layer_bytes * self.shape.layers
        return layers_bytes + (2 + 4 + 4) * tokens * self.shape.vocab
