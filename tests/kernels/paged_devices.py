"""A paged forward as another device lays it out."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from millrace.kernels.paged_attention import new_pool
from tests.kernels.paged_pools import Case


def moved(case: Case, device: str, pool_dtype: torch.dtype | None = None) -> Case:
    """The same tokens there, in a pool of that device's layout."""

    def there(tensor: Tensor) -> Tensor:
        return tensor.to(device)

    sizes = *case.pool[0].shape, case.pool[1].shape[3]
    dtype = case.pool[0].dtype if pool_dtype is None else pool_dtype
    pool = new_pool(*sizes, dtype=dtype, device=torch.device(device))
    for new, old in zip(pool, case.pool, strict=True):
        new.copy_(old)
    given = {field.name: getattr(case.rows, field.name) for field in fields(case.rows)}
    rows = {name: there(value) for name, value in given.items() if isinstance(value, Tensor)}
    tokens = {name: there(getattr(case, name)) for name in ("query_THK", "key_TJK", "value_TJK")}
    return replace(case, pool=pool, rows=replace(case.rows, **rows), **tokens)
