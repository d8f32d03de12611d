"""List computations that models and optimizers train with, for a comparison of the device with the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Result = torch.Tensor | Iterable[Any]


class OperatorInputs:
    """The inputs of a computation on a device: the same numbers on every device."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = device, dtype
        self.leaves: list[torch.Tensor] = []
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, grad: bool = True) -> torch.Tensor:
        """Return normally distributed numbers, as a leaf of autograd unless ``grad`` is off."""
        leaf = torch.randn(shape, generator=self._generator).to(self.dtype).to(self.device).requires_grad_(grad)
        self.leaves.append(leaf)
        return leaf

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=self._generator).to(self.device)

    def mask(self, *shape: int) -> torch.Tensor:
        return self.integers(2, *shape).bool()


def attention(x: OperatorInputs) -> Result:
    query, key, value = x(2, 3, 8, 4), x(2, 3, 8, 4), x(2, 3, 8, 4)
    scores = query @ key.transpose(-1, -2) / 2.0
    causal = torch.ones(8, 8, dtype=torch.bool, device=x.device).triu(1)
    return scores.masked_fill(causal, float("-inf")).softmax(-1) @ value


def attention_of_pytorch(x: OperatorInputs) -> Result:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(x(2, 3, 8, 4), x(2, 3, 8, 4), x(2, 3, 8, 4), is_causal=True)


def in_place(x: OperatorInputs) -> Result:
    tensor = x(4, 6) * 1
    tensor.mul_(2).add_(x(4, 6)).clamp_(-2, 2).div_(3)
    tensor[1].zero_()
    tensor[:, 2:4].copy_(x(4, 2))
    tensor.masked_fill_(x.mask(4, 6), 0.5)
    return tensor


def written_through_views(x: OperatorInputs) -> Result:
    whole = x(6, 8, grad=False)
    whole.t()[2:5].mul_(3)
    whole.view(-1)[5:17].add_(1)
    whole.unfold(1, 2, 3)[:, :, 0].neg_()
    torch.add(whole[:, ::2], 1, out=whole[:, 1::2])
    return whole


def out_arguments(x: OperatorInputs) -> Result:
    empty, sized = torch.empty(0, dtype=x.dtype, device=x.device), torch.empty(4, dtype=x.dtype, device=x.device)
    values = x(4, grad=False)
    indices = torch.empty(0, dtype=torch.int64, device=x.device)
    torch.abs(values, out=empty)
    torch.mul(values, 2, out=sized)
    torch.nonzero(values > 0, out=indices)
    return empty, sized, indices


def foreach(x: OperatorInputs) -> Result:
    tensors = [x(3, 4, grad=False), x(5, grad=False), x(2, 2, grad=False)]
    others = [x(3, 4, grad=False), x(5, grad=False), x(2, 2, grad=False)]
    torch._foreach_mul_(tensors, 0.9)
    torch._foreach_add_(tensors, others, alpha=0.1)
    torch._foreach_addcdiv_(tensors, others, torch._foreach_add(torch._foreach_abs(others), 1.0), -0.5)
    return tensors, torch._foreach_norm(tensors), torch._foreach_sqrt(torch._foreach_abs(others))


def optimizers(x: OperatorInputs) -> Result:
    results = []
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad):
        weight = torch.nn.Parameter(x(6, 5, grad=False))
        # For tensors of accelerators, the default is another order of the operations.
        optimizer = kind([weight], lr=0.1, foreach=False)
        for _ in range(2):
            (weight.float() ** 2).sum().backward()
            torch.nn.utils.clip_grad_norm_([weight], 1.0)
            optimizer.step()
            optimizer.zero_grad()
        results.append(weight.detach())
    return results


def random_numbers(x: OperatorInputs) -> Result:
    options = {"dtype": x.dtype, "device": x.device}
    drawn = [torch.rand(5, 7, **options), torch.randn(40, **options), torch.randint(9, (5,), device=x.device)]
    tensor = torch.empty(6, 4, **options)
    drawn += [tensor.normal_(1, 2).clone(), tensor.uniform_().clone(), tensor.bernoulli_(0.3).clone()]
    drawn += [tensor.t().normal_().clone(), tensor[:, 1:3].uniform_().clone(), torch.rand_like(tensor)]
    drawn += [torch.randperm(10, device=x.device), torch.bernoulli(torch.rand(9, **options))]
    drawn += [
        torch.multinomial(torch.rand(5, device=x.device), 3),
        torch.nn.init.trunc_normal_(torch.empty(8, **options)),
    ]
    drawn += [torch.nn.init.kaiming_uniform_(torch.empty(5, 3, **options)), tensor.exponential_().clone()]
    return drawn


def dropout(x: OperatorInputs) -> Result:
    return (
        F.dropout(x(8, 9), 0.1),
        F.dropout(x(8, 9), 0.7),
        F.dropout(x(4), 1.0),
        F.dropout(x(4), 0.5, training=False),
        F.dropout(x(5) * 1, 0.3, inplace=True),
        F.alpha_dropout(x(8), 0.2),
        F.dropout1d(x(2, 3, 4), 0.5),
    )


def shapes_without_elements(x: OperatorInputs) -> Result:
    return (
        x(0, 3) @ x(3, 2),
        x(0).sum(),
        torch.cat([x(0, 4), x(2, 4)]),
        F.relu(x(0)),
        x(3, 0).mean(1),
        x(0, 5).softmax(1),
    )


def second_derivatives(x: OperatorInputs) -> Result:
    leaf = x(5)
    return torch.autograd.grad((leaf.sin() ** 2 * leaf).sum(), leaf, create_graph=True)


def mixed_dtypes(x: OperatorInputs) -> Result:
    half, single = x(4, 4), x(4, 4).float()
    return (
        half + single,
        half * 2.5,
        half * x.integers(5, 4, 4),
        torch.where(x.mask(4, 4), half, 0.0),
        half.double() - single,
    )


CASES: dict[str, Callable[[OperatorInputs], Result]] = {
    "matmul": lambda x: (x(4, 5) @ x(5, 6), x(3, 4, 5) @ x(5, 2), x(4, 5) @ x(5), x(5) @ x(5), x(2, 3, 4) @ x(2, 4, 3)),
    "transposed matmul": lambda x: (
        x(5, 4).t() @ x(6, 5).t(),
        torch.baddbmm(x(2, 3, 3), x(2, 3, 4), x(2, 4, 3)),
        x(3, 4).mv(x(4)),
    ),
    "addmm": lambda x: (torch.addmm(x(3), x(4, 5), x(5, 3)), torch.addmm(x(4, 3), x(4, 5), x(5, 3), beta=0.5, alpha=2)),
    "linear": lambda x: (
        F.linear(x(3, 7, 5), x(4, 5), x(4)),
        F.linear(x(5), x(4, 5)),
        F.bilinear(x(3, 4), x(3, 5), x(2, 4, 5)),
    ),
    "einsum": lambda x: (torch.einsum("bij,bkj->bik", x(2, 3, 4), x(2, 5, 4)), torch.outer(x(3), x(4))),
    "embedding": lambda x: (
        F.embedding(x.integers(9, 3, 4), x(9, 5)),
        F.embedding(x.integers(9, 6), x(9, 5), padding_idx=2),
    ),
    "embedding bag": lambda x: F.embedding_bag(x.integers(9, 3, 4), x(9, 5), mode="mean"),
    "layer norm": lambda x: (
        F.layer_norm(x(4, 8), (8,), x(8), x(8)),
        F.layer_norm(x(4, 8), (8,)),
        F.layer_norm(x(2, 3, 4), (3, 4)),
    ),
    "rms norm": lambda x: (
        F.rms_norm(x(4, 8), (8,), x(8), 1e-6),
        x(4, 8) * torch.rsqrt(x(4, 8).pow(2).mean(-1, keepdim=True) + 1),
    ),
    "group and batch norm": lambda x: (
        F.group_norm(x(2, 4, 5), 2, x(4), x(4)),
        F.batch_norm(x(6, 3), None, None, x(3), x(3), True),
    ),
    "softmax": lambda x: (
        x(4, 9).softmax(-1),
        x(4, 9).log_softmax(0),
        F.softmax(x(2, 3, 4), 1, dtype=torch.float32),
        x(5, 4).logsumexp(1),
    ),
    "cross entropy": lambda x: (
        F.cross_entropy(x(6, 9), x.integers(9, 6)),
        F.cross_entropy(x(6, 9), x.integers(9, 6), ignore_index=2, label_smoothing=0.1),
        F.nll_loss(x(6, 9), x.integers(9, 6), x(9, grad=False).abs(), reduction="none"),
    ),
    "other losses": lambda x: (
        F.mse_loss(x(5), x(5)),
        F.l1_loss(x(5), x(5), reduction="sum"),
        F.smooth_l1_loss(x(5), x(5)),
        F.binary_cross_entropy_with_logits(x(5), x(5, grad=False).sigmoid()),
        F.kl_div(x(3, 4).log_softmax(1), x(3, 4).softmax(1), reduction="batchmean"),
        F.cosine_similarity(x(3, 8), x(3, 8)),
    ),
    "activations": lambda x: [
        f(x(4, 9))
        for f in (F.gelu, F.silu, F.relu, F.elu, F.softplus, F.leaky_relu, F.hardswish, F.mish, F.sigmoid, F.tanh)
    ],
    "gated activations": lambda x: (
        F.gelu(x(4, 9), approximate="tanh"),
        F.glu(x(4, 8)),
        F.silu(x(4, 9)) * x(4, 9),
        F.softmax(x(4, 4).relu(), -1),
    ),
    "attention": attention,
    "attention of PyTorch": attention_of_pytorch,
    "convolutions": lambda x: (
        F.conv1d(x(2, 3, 9), x(4, 3, 3), x(4), padding=1),
        F.conv2d(x(2, 3, 8, 8), x(4, 3, 3, 3), x(4), stride=2),
        F.conv_transpose2d(x(1, 2, 4, 4), x(2, 3, 2, 2)),
    ),
    "pooling": lambda x: (
        F.max_pool2d(x(1, 2, 6, 6), 2),
        F.avg_pool2d(x(1, 2, 6, 6), 2),
        F.adaptive_avg_pool2d(x(1, 2, 6, 6), 3),
        F.interpolate(x(1, 2, 4, 4), scale_factor=2),
    ),
    "padding": lambda x: (
        F.pad(x(3, 4), (1, 2)),
        F.pad(x(1, 3, 4), (1, 1), "reflect"),
        x(3, 4).roll(1, 0),
        x(3, 4).flip(1),
    ),
    "reductions": lambda x: [
        *(f(x(4, 600)) for f in (torch.sum, torch.mean, torch.amax, torch.std, torch.norm)),
        *(f(x(4, 6), 1) for f in (torch.sum, torch.mean, torch.argmax, torch.cumsum, torch.prod, torch.amin)),
        x(40, 50).norm(dim=0),
        x(30).norm(float("inf")),
        x(5, 5).trace(),
        x(4, 6).max(1),
        torch.linalg.vector_norm(x(7, 8), 3),
    ],
    "comparisons": lambda x: (
        x(5) > 0,
        x(5).eq(x(5)),
        torch.isfinite(x(5)).all(),
        x(5).isnan().any(),
        x(5).sign(),
        torch.maximum(x(5), x(5)),
    ),
    "pointwise": lambda x: [
        f(x(5, 5).abs() + 1)
        for f in (torch.exp, torch.log, torch.sqrt, torch.rsqrt, torch.reciprocal, torch.erf, torch.cos, torch.floor)
    ],
    "arithmetic": lambda x: (
        x(4, 1) + x(3),
        x(4) - 2,
        3 / (x(4).abs() + 1),
        x(4) ** 3,
        torch.addcmul(x(4), x(4), x(4), value=0.3),
        torch.lerp(x(4), x(4), 0.3),
    ),
    "scalars of the host": lambda x: (
        x(4) * torch.tensor(2.5),
        torch.where(x.mask(4), x(4), torch.tensor(0.0)),
        x(4).clamp(torch.tensor(-1.0)),
        x(4) + torch.tensor(3),
    ),
    "indexing": lambda x: (
        x(6, 5)[x.integers(6, 4)],
        x(6, 5)[:, x.integers(5, 2, 2)],
        x(6, 5)[x.mask(6, 5)],
        x(6, 5)[1:4, ::2],
        x(6)[None, :, None],
        x(6, 5)[torch.tensor([0, 3])],
        x(6, 5).index_select(1, x.integers(5, 3)),
        x(6, 5).gather(1, x.integers(5, 6, 2)),
        x(6, 5).take(x.integers(30, 4)),
    ),
    "writes by index": lambda x: (
        x(6, 5).index_add(0, x.integers(6, 3), x(3, 5)),
        x(6, 5).scatter(1, x.integers(5, 6, 1), 2.0),
        x(6, 5).scatter_add(0, x.integers(6, 2, 5), x(2, 5)),
        torch.index_put(x(6, 5), (x.integers(6, 3),), x(5), accumulate=True),
        x(6, 5).index_fill(0, x.integers(6, 2), 1.0),
        x(6, 5).masked_scatter(x.mask(6, 5), x(30)),
    ),
    "joining and splitting": lambda x: (
        torch.cat([x(2, 3), x(4, 3)]),
        torch.stack([x(3), x(3)], 1),
        x(7, 2).split(3),
        x(6, 4).chunk(2, 1),
        x(4, 3).unbind(),
        torch.hstack([x(2, 2), x(2, 1)]),
    ),
    "views": lambda x: (
        x(4, 6).view(8, 3),
        x(4, 6).t().reshape(-1),
        x(2, 3, 4).permute(2, 0, 1),
        x(3, 1).expand(3, 5),
        x(4, 4).diagonal(),
        x(4, 6).narrow(1, 2, 3),
        x(3, 4).unsqueeze(1).squeeze(),
        x(6).repeat(2, 2),
        x(2, 3).repeat_interleave(2, 1),
        x(4, 6).unflatten(1, (2, 3)),
        x(8).as_strided((3, 2), (2, 1)),
    ),
    "non-contiguous": lambda x: (
        x(4, 6).t() * 2,
        x(4, 6)[:, ::2].exp(),
        (x(4, 6).t() @ x(4, 3)).t().contiguous(),
        x(6, 4).t().softmax(0),
        x(2, 3, 4).transpose(0, 2).sum(1),
    ),
    "triangles and masks": lambda x: (
        x(5, 5).tril(),
        x(5, 5).triu(1),
        x(5, 5).masked_fill(x.mask(5, 5), -1e4),
        x(5, 5).masked_select(x.mask(5, 5)),
    ),
    "sorting": lambda x: (
        x(4, 9).sort(1),
        x(20).topk(5),
        x(9).argsort(descending=True),
        x(9).nonzero(),
        x.integers(4, 12).unique(return_counts=True),
        x(9).kthvalue(3),
        torch.searchsorted(x(9, grad=False).sort()[0], x(3, grad=False)),
    ),
    "factories": lambda x: [
        torch.arange(7, device=x.device),
        torch.linspace(0, 1, 5, device=x.device),
        torch.eye(3, device=x.device, dtype=x.dtype),
        torch.full((2, 3), 1.5, device=x.device),
        torch.zeros_like(x(3)),
        torch.ones(2, 2, dtype=x.dtype, device=x.device),
        torch.tensor([[1.5, 2]], device=x.device),
        torch.tril_indices(3, 3, device=x.device),
        F.one_hot(x.integers(4, 5), 4),
        x(3).new_full((2,), 4.0),
    ],
    "conversions": lambda x: (
        x(5).float(),
        x(5).to(torch.bfloat16),
        x(5).half(),
        x(5).long(),
        x(5).type_as(x(5)),
        x(5).clone(),
        x(5).double().to(x.dtype),
    ),
    "in-place": in_place,
    "written through views": written_through_views,
    "out= arguments": out_arguments,
    "foreach": foreach,
    "optimizers": optimizers,
    "random numbers": random_numbers,
    "dropout": dropout,
    "shapes without elements": shapes_without_elements,
    "mixed dtypes": mixed_dtypes,
    "linear algebra": lambda x: (
        torch.linalg.inv(x(3, 3).float() + 3 * torch.eye(3, device=x.device)),
        torch.linalg.qr(x(4, 3).float())[1],
        torch.linalg.solve(x(3, 3).float(), x(3).float()),
    ),
    "second derivatives": second_derivatives,
    "sums of segments": lambda x: torch.segment_reduce(
        x(9, 1), "sum", offsets=torch.tensor([0, 4, 4, 9], device=x.device), unsafe=True
    ),
}
