"""Define formulas of the Megatron paper (arXiv 2104.04473) that the predictions are compared with.

``gpt_numel`` to ``approximate_training_s`` are equations 2 to 4. ``ModelShape`` generalises equations 2 and 3 to other
transformers. Volumes are elements that one GPU sends; multiply by 2 for the bytes of 16-bit tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import sqrt

from perf_model.cluster.pipeline import bubble_share


def gpt_numel(layers: int, hidden: int, vocab: int, sequence: int) -> float:
    """Return the number of parameters of a GPT model with learned positions (section 5.1, equation 2)."""
    return 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocab + sequence) / (12 * layers * hidden))


def gpt_iteration_flops(layers: int, hidden: int, vocab: int, sequence: int, global_batch: int) -> float:
    """Return the operations of one iteration with activation recomputation (section 5.1, equation 3).

    The matrix products of the layers and of the logits are counted, over all GPUs.
    """
    flops = 96.0 * global_batch * sequence * layers * hidden**2
    return flops * (1 + sequence / (6 * hidden) + vocab / (16 * layers * hidden))


def training_s(tokens: float, tokens_per_iteration: float, flops: float, gpus: int, flops_per_s: float) -> float:
    """Return the seconds that training on ``tokens`` takes (section 5.1).

    An iteration has ``flops`` operations, and each GPU reaches ``flops_per_s``.
    """
    return tokens / tokens_per_iteration * flops / (gpus * flops_per_s)


def approximate_training_s(tokens: float, numel: float, gpus: int, flops_per_s: float) -> float:
    """Return the seconds that training on ``tokens`` takes, 8 T P / (n X) (section 5.1, equation 4).

    It is the limit of equation 3 for wide models. Six operations per parameter and token are those of forward and
    backward, and two are recomputation.
    """
    return 8 * tokens * numel / (gpus * flops_per_s)


def pipeline_elements(micro_batch: int, sequence: int, hidden: int) -> int:
    """Return the elements between two pipeline stages, per micro-batch and direction (section 3.2)."""
    return micro_batch * sequence * hidden


def scattered_pipeline_elements(micro_batch: int, sequence: int, hidden: int, tensor_parallel: int) -> float:
    """Return the same with the scatter/gather optimisation, by which each GPU sends a part (section 4.1)."""
    return pipeline_elements(micro_batch, sequence, hidden) / tensor_parallel


def tensor_parallel_elements(micro_batch: int, sequence: int, hidden: int, tensor_parallel: int) -> float:
    """Return the elements of the all-reduces of one layer per micro-batch, 8 b s h (t - 1) / t (section 3.2).

    Forward has two all-reduces, and so has backward. A ring all-reduce sends each element twice. Recomputation repeats
    those of forward, which this number does not contain.
    """
    share = (tensor_parallel - 1) / tensor_parallel
    return 8 * pipeline_elements(micro_batch, sequence, hidden) * share


def gradient_all_reduce_elements(numel: float, data_parallel: int) -> float:
    """Return the elements of the all-reduce of ``numel`` gradients, which runs once per iteration (section 3.3.1)."""
    return 2 * numel * (data_parallel - 1) / data_parallel


def zero3_elements(numel: float, data_parallel: int) -> float:
    """Return the elements that ZeRO-3 sends per micro-batch for a model of ``numel`` parameters.

    Parameters are gathered in forward and in backward, and gradients are reduced (arXiv 1910.02054, section 7.2.2).
    """
    return 3 * numel * (data_parallel - 1) / data_parallel


def activation_bytes(layers: int, checkpoints: float, input_bytes: float, intermediate_bytes: float) -> float:
    """Return the bytes of activations of a stage of ``layers`` layers with this number of checkpoints.

    ``input_bytes`` are those of the input of a layer, which a checkpoint stores, and ``intermediate_bytes`` those of
    all activations inside a layer, which are recomputed from one checkpoint to the next.
    """
    return checkpoints * input_bytes + layers / checkpoints * intermediate_bytes


def best_number_of_checkpoints(layers: int, input_bytes: float, intermediate_bytes: float) -> float:
    """Return the number of checkpoints with the least memory. It is at most one per layer in practice."""
    return sqrt(layers * intermediate_bytes / input_bytes)


def bubble_share_beside_data_parallel(gpus: int, data_parallel: int, batches: int) -> float:
    """Return the share of ``bubble_share`` without tensor parallelism, (n - d) / b' (section 3.3.1, figure 6).

    ``batches`` is b', the global batch divided by the micro-batch.
    """
    return (gpus - data_parallel) / batches


def scaled_throughput(throughput: float, stages: int, micro_batches: int, fewer_micro_batches: int) -> float:
    """Return the throughput per GPU if only the bubble changes, because each pipeline has fewer micro-batches.

    This is the effect of more GPUs on a fixed global batch (section 3.3.1). ``throughput`` was reached with
    ``micro_batches``.
    """
    return throughput * (1 + bubble_share(stages, micro_batches)) / (1 + bubble_share(stages, fewer_micro_batches))


def batch_s(sequences: int, micro_batch: int, stages: int, micro_batch_s: Callable[[int], float]) -> float:
    """Return the seconds of a batch of ``sequences`` per pipeline (section 3.4, equation 1), without communication.

    ``micro_batch_s`` returns the seconds of forward and backward of one stage for a micro-batch of a given size.
    """
    return (sequences / micro_batch + stages - 1) * micro_batch_s(micro_batch)


def best_micro_batch(sequences: int, stages: int, micro_batch_s: Callable[[int], float], sizes: Iterable[int]) -> int:
    """Return the one of ``sizes`` with which a batch takes the least time (section 3.4)."""
    return min(sizes, key=lambda size: batch_s(sequences, size, stages, micro_batch_s))
