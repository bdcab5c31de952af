"""Which attention over the pool runs, and what is refused with which words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.kernels import dispatch, paged_attention_cpu, paged_attention_triton
from millrace.kernels.dispatch import paged_attention, store_kv
from millrace.kernels.paged_attention import new_pool, paged_attention_plain, store_kv_plain
from millrace.kernels.paged_attention_torch import paged_attention_torch
from tests.close import close_fp32
from tests.kernels.paged_pools import Case, random_case


def test_tokens_that_were_stored_are_attended_to() -> None:
    case = random_case(0, [9, 20, 1])
    pool = new_pool(*case.pool[0].shape, dtype=torch.float32, device=torch.device("cpu"))
    store_kv(case.key_TJK, case.value_TJK, *pool, case.rows.slot_T)
    options: dict[str, Any] = {"scale": 0.5, "window": 7, "softcap": 2.0}
    actual = paged_attention(case.query_THK, *pool, case.rows, **options)
    close_fp32(actual, paged_attention_plain(*case.arguments(), **options), atol=3e-6)


@pytest.mark.parametrize(
    ("device", "checked", "functions"),
    [
        ("cpu", False, (paged_attention_cpu.store_kv, paged_attention_cpu.paged_attention)),
        ("cuda", True, (paged_attention_triton.store_kv, paged_attention_triton.paged_attention)),
        ("cuda", False, (store_kv_plain, paged_attention_torch)),
        ("meta", False, (store_kv_plain, paged_attention_torch)),
    ],
)
def test_the_device_of_the_pool_says_which_runs(
    device: str,
    checked: bool,
    functions: tuple[Callable[..., Any], ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "is_checked", lambda kernel, device: checked)
    like = type("Like", (), {"device": torch.device(device)})()
    assert dispatch._paged(like) == functions


def test_shapes_pass_through_on_a_device_without_a_kernel() -> None:
    meta = torch.device("meta")
    pool = new_pool(4, 2, 8, 6, dtype=torch.float32, device=meta)
    with pytest.raises(ValueError, match="query_THK is on cpu, but the pool is on meta"):
        paged_attention(torch.zeros(3, 4, 6), *pool, random_case(0, [3]).rows, scale=1.0)


def attend(case: Case, **changes: Any) -> Tensor:
    options: dict[str, Any] = {"scale": 1.0} | {
        name: changes.pop(name) for name in ("window", "softcap", "chunk") if name in changes
    }
    rows = replace(case.rows, **changes.pop("rows", {}))
    case = replace(case, **changes)
    return paged_attention(case.query_THK, *case.pool, rows, **options)


@pytest.mark.parametrize("limits", [{"window": 1}, {"softcap": 0.5}, {"chunk": 1}])
def test_the_least_limits_are_taken(limits: dict[str, Any]) -> None:
    case = random_case(3, [5, 9])
    plain = paged_attention_plain(*case.arguments(), scale=1.0, **limits)
    close_fp32(attend(case, **limits), plain, atol=3e-6)
    assert not torch.equal(plain, paged_attention_plain(*case.arguments(), scale=1.0))


KEY, VALUE = new_pool(4, 2, 8, 6, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"pool": (KEY[0], VALUE[0])},
            r"key_PJSK has shape \(2, 8, 6\) and value_PJSK \(2, 8, 6\); expected",
        ),
        ({"pool": (KEY, VALUE[:, :1])}, r"value_PJSK \(4, 1, 8, 6\); expected four dimensions each"),
        ({"pool": (KEY, VALUE.double())}, "value_PJSK is torch.float64, but key_PJSK is torch.float32"),
        ({"pool": (KEY, VALUE.to("meta"))}, "value_PJSK is meta, but key_PJSK is cpu"),
        ({"query_THK": torch.zeros(3, 4, 6, device="meta")}, "query_THK is on meta, but the pool is on cpu"),
        ({"query_THK": torch.zeros(3, 4, 6, requires_grad=True)}, "query_THK requires a gradient, which"),
        (
            {"query_THK": torch.zeros(3, 24)},
            r"query_THK has shape \(3, 24\); expected heads in multiples of 2",
        ),
        (
            {"query_THK": torch.zeros(3, 3, 6)},
            r"shape \(3, 3, 6\); expected heads in multiples of 2 and width 6",
        ),
        (
            {"query_THK": torch.zeros(3, 4, 5)},
            r"shape \(3, 4, 5\); expected heads in multiples of 2 and width 6",
        ),
        ({"window": 0}, "window is 0; it is positive, or None for none"),
        ({"softcap": -1.0}, "softcap is -1.0; it is positive"),
        ({"chunk": 0}, "chunk is 0; it is positive"),
        ({"softcap": float("nan")}, "softcap is nan; it is positive"),
        (
            {"rows": {"block_BC": torch.zeros(1, 2, dtype=torch.int64)}},
            r"block_BC is torch.int64 of shape \(1, 2\) on cpu; expected torch.int32 of shape \(1, 2\)",
        ),
        (
            {"rows": {"block_BC": torch.zeros(1, dtype=torch.int32)}},
            r"block_BC is torch.int32 of shape \(1,\) on cpu; expected torch.int32 of shape \(1, 1\) on cpu",
        ),
        ({"rows": {"start_B": torch.zeros(1)}}, r"start_B is torch.float32 of shape \(1,\) on cpu; expected"),
        (
            {"rows": {"first_B": torch.zeros(2, dtype=torch.int64)}},
            r"first_B is torch.int64 of shape \(2,\) on cpu; expected torch.int64 of shape \(1,\) on cpu",
        ),
        (
            {"rows": {"count_B": torch.zeros(1, dtype=torch.int64, device="meta")}},
            r"count_B is torch.int64 of shape \(1,\) on meta; expected torch.int64 of shape \(1,\) on cpu",
        ),
    ],
)
def test_attention_refuses(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        attend(random_case(0, [3]), **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"key_TJK": torch.zeros(4, 2, 6)},
            r"key_TJK has shape \(4, 2, 6\); expected \(3, 2, 6\): tokens of",
        ),
        ({"key_TJK": torch.zeros(3, 2, 5)}, r"key_TJK has shape \(3, 2, 5\); expected \(3, 2, 6\)"),
        ({"value_TJK": torch.zeros(3, 1, 6)}, r"value_TJK has shape \(3, 1, 6\); expected \(3, 2, 6\)"),
        ({"value_TJK": torch.zeros(3, 2, 6, requires_grad=True)}, "value_TJK requires a gradient, which"),
        ({"slot_T": torch.zeros(3, 1, dtype=torch.int64)}, r"slot_T is torch.int64 of shape \(3, 1\) on cpu"),
        (
            {"slot_T": torch.zeros(3, dtype=torch.int32)},
            r"slot_T is torch.int32 of shape \(3,\) on cpu; expected",
        ),
        ({"slot_T": torch.full((3,), 32)}, "slot_T holds 32; the pool has 4 blocks of 8 slots"),
        ({"value_PJSK": VALUE[:3]}, r"value_PJSK \(3, 2, 8, 6\); expected four"),
    ],
)
def test_storing_refuses(changes: dict[str, Any], words: str) -> None:
    arguments: dict[str, Tensor] = {
        "key_TJK": torch.zeros(3, 2, 6),
        "value_TJK": torch.zeros(3, 2, 6),
        "value_PJSK": VALUE.clone(),
        "slot_T": torch.arange(3),
    }
    arguments["key_PJSK"] = new_pool(4, 2, 8, 6, dtype=torch.float32, device=torch.device("cpu"))[0]
    with pytest.raises(ValueError, match=words):
        store_kv(**arguments | changes)
