"""Small heads with every quirk, and what the tests of the kernel over them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from millrace.kernels.token_logprob import Head, Supports

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.25},
    "double": {"scale": 2.0},
    "softcap": {"softcap": 0.8},
    "temperature": {"temperature": 0.7},
    "all": {"bias": True, "scale": 3.0, "softcap": 2.0, "temperature": 1.3},
}


def random_case(
    seed: int, dtype: torch.dtype, *, bias: bool = False, scale: float = 1.0, softcap: float | None = None
) -> tuple[Tensor, Head, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden_ND = torch.randn(13, 5, generator=generator, dtype=torch.float64)
    weight_VD = torch.randn(17, 5, generator=generator, dtype=torch.float64)
    bias_V = torch.randn(17, generator=generator, dtype=torch.float64)
    target_N = torch.randint(0, 17, (13,), generator=generator)
    hidden_ND, weight_VD, bias_V = (x.to(dtype).requires_grad_() for x in (hidden_ND, weight_VD, bias_V))
    return hidden_ND, Head(weight_VD, bias_V if bias else None, scale, softcap), target_N


def leaves(hidden_ND: Tensor, head: Head) -> list[Tensor]:
    return [hidden_ND, head.weight_VD] + ([] if head.bias_V is None else [head.bias_V])


def gradients(
    result: tuple[Tensor, ...],
    hidden_ND: Tensor,
    head: Head,
    *,
    lean: tuple[float, ...] = (1.0, -0.7),
    inputs: list[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Of an uneven mix of the results; one whose share is 0 is left out of the loss."""
    slope_N = torch.linspace(-1, 2, 13, dtype=result[0].dtype)
    parts = [(share * x_N * slope_N).sum() for share, x_N in zip(lean, result, strict=True) if share]
    return torch.autograd.grad(torch.stack(parts).sum(), inputs or leaves(hidden_ND, head))


def in_double(head: Head) -> Head:
    return Head(head.weight_VD.detach().double())


def random_reference(seed: int) -> tuple[Tensor, Head]:
    """Narrower than the policy, with a cap where the policy has none and a bias of its own."""
    generator = torch.Generator().manual_seed(100 + seed)
    hidden_ND, weight_VD, bias_V = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((13, 3), (17, 3), (17,))
    )
    return hidden_ND, Head(weight_VD, bias_V, 0.5, 4.0)


class Made(TorchDispatchMode):
    """How many elements the largest tensor that any operation gave back has, and how many had `size`."""

    def __init__(self, size: int = -1) -> None:
        super().__init__()
        self.size, self.largest, self.count = size, 0, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
                self.count += tensor.numel() == self.size
        return out


def random_support(seed: int, target_N: Tensor) -> Supports:
    """For each target the tokens it was drawn among, in any order: all of 17, itself alone, or some."""
    generator = torch.Generator().manual_seed(200 + seed)
    sizes = torch.randint(0, 18, target_N.shape, generator=generator)
    sizes[:3] = torch.tensor([0, 1, 17])
    lists = []
    for target, size in zip(target_N.tolist(), sizes.tolist(), strict=True):
        order = torch.randperm(17, generator=generator)
        order = torch.cat([torch.tensor([target]), order[order != target]])[:size]
        lists.append(order[torch.randperm(size, generator=generator)])
    return Supports(torch.cat(lists).int(), sizes)


def support_of(*lists: list[int]) -> Supports:
    """Supports written as lists; an empty one is the whole vocabulary."""
    counts = torch.tensor([len(one) for one in lists], dtype=torch.int64)
    return Supports(torch.tensor([token for one in lists for token in one], dtype=torch.int32), counts)


def one_by_one(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    support: Supports,
    policy: tuple[Tensor, Head],
    *others: tuple[Tensor, Head] | Tensor,
    temperature: float,
) -> tuple[Tensor, ...]:
    """What a plain twin says of each token alone, with heads that know no other words than its support.

    `others` are pairs of hidden states and a head, or targets, which are found among the support's words.
    """
    rows = []
    for n, words in enumerate(support.token_M.long().split(support.count_N.tolist())):
        words = words if len(words) else torch.arange(len(policy[1].weight_VD))
        given: list[Any] = []
        for one in (policy, *others):
            if isinstance(one, Tensor):
                given.append((words == one[n]).nonzero()[:, 0])
            else:
                hidden_ND, head = one
                bias_V = None if head.bias_V is None else head.bias_V[words]
                given += [hidden_ND[n : n + 1], Head(head.weight_VD[words], bias_V, head.scale, head.softcap)]
        result = function(*given, temperature=temperature)
        rows.append(result if isinstance(result, tuple) else (result,))
    return tuple(torch.cat(column) for column in zip(*rows, strict=True))


# Where a vocabulary of 17 is cut: unevenly, and with a shard of one row.
CUTS = {2: (0, 6, 17), 3: (0, 9, 10, 17)}


def shard(head: Head, cuts: tuple[int, ...], rank: int, group: Any) -> Head:
    """The rows of one rank, as leaves."""
    rows = slice(cuts[rank], cuts[rank + 1])
    weight_VD = head.weight_VD.detach()[rows].clone().requires_grad_()
    bias_V = None if head.bias_V is None else head.bias_V.detach()[rows].clone().requires_grad_()
    return replace(head, weight_VD=weight_VD, bias_V=bias_V, group=group, first_row=rows.start)
