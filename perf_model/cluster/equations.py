"""Compute the parameters, the operations and the training time of a GPT model (arXiv 2104.04473, section 5.1).

They are the paper's equations 2 to 4. ``ModelShape`` generalises equations 2 and 3 to other transformers; a test checks
that it gives the same numbers for the paper's.
"""

from __future__ import annotations


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
