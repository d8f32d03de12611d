"""Choose the parity cases that each supported release of DeepSpeed and PyTorch is tried with."""

from __future__ import annotations

TRIED_TORCH = ("2.10.0", "2.11.0", "2.12.1", "2.14.1", "2.15.0")
"""The releases of PyTorch that ``make compat`` tries, besides the one that all other tests run with."""

GOLDEN = (
    "every placement",
    "planned, from a quick profile",
    "residents, clipping, reload in process",
    "rules by name, reload in process",
    "rules by name, one sub-group, two groups, fp32, resume",
    "one sub-group",
    "fp32, Adam, two groups, frozen, accumulation 3",
    "fp16, overflow, clipping",
    "beta powers over 60 steps",
    "groups with two betas",
    "groups with betas a, b, a",
    "betas changed by a scheduler",
    "accumulation managed by the caller",
    "reload in process, without the moments",
    "inf and nan norm, clipping",
    "inf and nan norm, no clipping, fp32",
    "a parameter without any gradient",
    "zero.Init, shared host memory",
    "offloaded parameters",
    "torch autocast",
    "resume",
    "2 ranks, clipping, accumulation 3, two groups",
    "2 ranks, resume, fp16",
    "2 ranks, fp32, offloaded parameters",
    "2 ranks, gradients summed in fp32",
    "2 ranks, ZeRO++ hpZ",
)

QUICK = ("residents, clipping, reload in process", "fp16, overflow, clipping", "groups with two betas")
"""The golden cases, all at one rank, that CI (``make test-oldest``) tries on the oldest release."""

EQUAL = ["equal"]
EQUAL_BUT_NAN = ["equal, except for the bits of NaN"]
"""The result of a case with an invalid norm, with which releases before 0.19.8 go on: all states become NaN.

PyTorch rounds a NaN to 16 bits in several ways, and the plugin in one.
"""

NORM_IS_CHECKED_SINCE = {"inf and nan norm, clipping": "0.19.8"}
SINCE = {"accumulation managed by the caller": "0.19.5"}
"""The first release that has what a case uses; an older one must refuse the case and name that release."""


def refused(since: str) -> list[str]:
    """Return the result of a case that is refused because DeepSpeed has it only ``since`` a release."""
    return [f"refused, since {since}"]


def world_size(name: str) -> int:
    return int(name[0]) if name[1:].startswith(" ranks") else 1
