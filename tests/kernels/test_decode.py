"""Layers in one call against the equations, and bit for bit against themselves whatever surrounds a row."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.kernels import decode
from millrace.kernels.decode import Layers, LayerWeights
from millrace.kernels.paged_attention import PagedRows, new_pool, paged_attention_plain, store_kv_plain
from millrace.kernels.product_cpu import pack
from millrace.models.attention import contiguous_rows
from tests.close import close_bf16, close_fp32

AS_PYTHON = os.environ.get("NUMBA_DISABLE_JIT") == "1"
compiled_only = pytest.mark.skipif(AS_PYTHON, reason="runs as Python, which takes too long for so much")

# Model width, query heads, key heads, head width, width of the feed-forward.
SIZES = [(10, 4, 2, 6, 14), (34, 3, 1, 8, 2), (2, 1, 1, 2, 40)]
NUM_BLOCKS, SIZE = 6, 5
# A row of three new tokens behind four known ones, one new token at the beginning, and one behind six.
ROWS = PagedRows(
    block_BC=torch.tensor([[2, 0], [5, 5], [1, 4]], dtype=torch.int32),
    start_B=torch.tensor([4, 0, 6]),
    first_B=torch.tensor([0, 3, 4]),
    count_B=torch.tensor([3, 1, 1]),
    slot_T=torch.tensor([14, 0, 1, 25, 21]),
    max_count=3,
    max_length=7,
)
LAST_B = torch.tensor([2, 3, 4])
EPS = (0.3, 0.01, 0.2)

Pool = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Layer:
    """A layer as a model has it: queries, keys, values, output, gate, up, down."""

    norms: tuple[Tensor, Tensor]
    head_norms: tuple[Tensor, Tensor] | None
    weights: list[Tensor]
    biases: list[Tensor] | None
    options: dict[str, Any]

    def packed(self) -> LayerWeights:
        some, biases = self.weights, self.biases
        products = pack(*some[:3]), pack(some[3]), pack(*some[4:6], gated=True), pack(some[6])
        cuts = (slice(0, 3), slice(3, 4), slice(4, 6), slice(6, 7))
        joined = tuple(None if biases is None else torch.cat(biases[cut]) for cut in cuts)
        return LayerWeights(self.norms, self.head_norms, EPS, products, joined, **self.options)

    def plain(
        self, x_TD: Tensor, angles: tuple[Tensor, Tensor], pool: Pool, rows: PagedRows, last_B: Tensor | None
    ) -> Tensor:
        """The equations, one after the other in float64, rounded where a product reads and where it adds."""
        dtype, heads = x_TD.dtype, [x.double() for x in self.head_norms or ()]
        cos_T1K, sin_T1K = (x.double()[:, None] for x in angles)
        normed_TD = normed(x_TD, self.norms[0], EPS[0]).to(dtype)
        width = cos_T1K.shape[-1]
        query, key, value = (self._product(n, normed_TD).unflatten(1, (-1, width)) for n in range(3))
        if heads:
            query, key = (normed(x, gain, EPS[2]) for x, gain in zip((query, key), heads, strict=True))
        query, key = (x * cos_T1K + half_turned(x) * sin_T1K for x in (query, key))
        store_kv_plain(key, value, *pool, rows.slot_T)
        found_TN = paged_attention_plain(query, *pool, rows, **self.options).flatten(1)
        if last_B is not None:
            x_TD, found_TN = x_TD[last_B], found_TN[last_B]
        x_TD = (x_TD.double() + self._product(3, found_TN.to(dtype))).to(dtype)
        normed_TD = normed(x_TD, self.norms[1], EPS[1]).to(dtype)
        gate_TF, up_TF = self._product(4, normed_TD), self._product(5, normed_TD)
        return (x_TD.double() + self._product(6, (gate_TF * gate_TF.sigmoid() * up_TF).to(dtype))).to(dtype)

    def _product(self, n: int, x_MD: Tensor) -> Tensor:
        y_MN = x_MD.double() @ self.weights[n].double().T
        return y_MN if self.biases is None else y_MN + self.biases[n].double()


def normed(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Of Llama's form, in float64: rounded to the dtype of x before the factors."""
    wide = x.double()
    return (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()).to(x.dtype).double() * gain.double()


def half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], -1)


def random_layer(
    seed: int, sizes: tuple[int, ...], dtype: torch.dtype, *, normed: bool, biased: bool, **options: Any
) -> Layer:
    generator = torch.Generator().manual_seed(seed)
    model, heads, keys, width, inner = sizes
    outs = [heads * width, keys * width, keys * width, model, inner, inner, model]
    ins = [model] * 3 + [heads * width] + [model] * 2 + [inner]

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return Layer(
        (drawn(model), drawn(model)),
        (drawn(width), drawn(width)) if normed else None,
        [drawn(out, size) / size**0.5 for out, size in zip(outs, ins, strict=True)],
        [drawn(out) for out in outs] if biased else None,
        {"scale": 0.7, **options},
    )


def random_input(
    seed: int, num_tokens: int, model: int, width: int, dtype: torch.dtype
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Hidden states; cosines and sines."""
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(num_tokens, model, generator=generator).to(dtype)
    angle_TK = (torch.randn(num_tokens, width // 2, generator=generator) * 3).repeat(1, 2)
    return x_TD, (angle_TK.cos().to(dtype), angle_TK.sin().to(dtype))


def random_pools(num: int, keys: int, width: int, dtype: torch.dtype, blocks: int = NUM_BLOCKS) -> list[Pool]:
    generator, found = torch.Generator().manual_seed(9), []
    for _ in range(num):
        pool = new_pool(blocks, keys, SIZE, width, dtype=dtype, device=torch.device("cpu"))
        for half in pool:
            half.copy_(torch.randn(half.shape, generator=generator))
        found.append(pool)
    return found


def check_equations(
    some: list[Layer], gain_D: Tensor | None, sizes: tuple[int, ...], rows: PagedRows, last_B: Tensor | None
) -> Tensor:
    """Hold layers against the equations; gives back what they made."""
    dtype, num_tokens = some[0].norms[0].dtype, len(rows.slot_T)
    x_TD, angles = random_input(len(some), num_tokens, sizes[0], sizes[3], dtype)
    blocks = int(rows.block_BC.max()) + 1
    pools, expected_pools = (random_pools(len(some), sizes[2], sizes[3], dtype, blocks) for _ in range(2))
    before = x_TD.clone()
    layers = Layers([layer.packed() for layer in some], gain_D, eps=0.05)
    y_WD = layers(x_TD, angles, pools, rows, last_B)
    assert torch.equal(x_TD, before)
    expected = x_TD
    for n, (layer, pool) in enumerate(zip(some, expected_pools, strict=True)):
        expected = layer.plain(expected, angles, pool, rows, last_B if n == len(some) - 1 else None)
    if gain_D is not None:
        expected = normed(expected, gain_D, 0.05)
    assert y_WD.dtype == dtype
    halves = [pair for pools in zip(pools, expected_pools, strict=True) for pair in zip(*pools, strict=True)]
    for one, other in [(y_WD, expected), *halves]:
        if dtype == torch.float32:
            close_fp32(one, other, rtol=2e-5, atol=2e-5)
        else:
            # A number that falls on the other side of a tie is carried through what follows.
            close_bf16(one, other, atol=0.06)
    return y_WD


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("limits", [{}, {"window": 3, "softcap": 1.5}])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_compute_their_equations(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    normed: bool,
    biased: bool,
    limits: dict[str, Any],
) -> None:
    # Where kernels run as Python, and only there, this cuts the work into parts.
    for name in ("PART_TOKENS", "PART_WORK", "PART_NORMED"):
        monkeypatch.setattr(decode, name, 1)
    monkeypatch.setattr(decode, "num_threads", lambda: 2)
    gain_D = torch.linspace(0.5, 2, sizes[0]).to(dtype)
    for seed, (num_layers, last, final) in enumerate(
        [(1, False, False), (1, True, False), (1, False, True), (3, False, False), (2, True, True)]
    ):
        some = [
            random_layer(10 * seed + n, sizes, dtype, normed=normed, biased=biased, **limits)
            for n in range(num_layers)
        ]
        check_equations(some, gain_D if final else None, sizes, ROWS, LAST_B if last else None)


@pytest.mark.slow_beyond(1)
@compiled_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_share_a_layer_and_change_no_bit(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Large enough that every step of it is cut into parts."""
    sizes, rows = (
        (512, 8, 2, 64, 300),
        contiguous_rows(torch.tensor([70, 1]), block_size=SIZE, device=torch.device("cpu")),
    )
    assert 71 * 512 // decode.PART_NORMED > 1 and 71 // decode.PART_TOKENS > 1
    some = [random_layer(n, sizes, dtype, normed=True, biased=True) for n in range(2)]
    found = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(decode, "num_threads", lambda threads=threads: threads)
        for last_B in (None, torch.tensor([69, 70])):
            found.append(check_equations(some, None, sizes, rows, last_B))
    assert torch.equal(found[0], found[2]) and torch.equal(found[0], found[4])
    assert torch.equal(found[1], found[3]) and torch.equal(found[1], found[5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_where_only_its_last_token_is_wanted(dtype: torch.dtype) -> None:
    some = [random_layer(n, SIZES[0], dtype, normed=True, biased=False).packed() for n in range(2)]
    layers = Layers(some, torch.linspace(0.5, 2, 10).to(dtype))
    x_TD, angles = random_input(0, 5, 10, 6, dtype)
    whole_pools = random_pools(2, 2, 6, dtype)
    whole_TD = layers(x_TD, angles, whole_pools, ROWS)
    pools = random_pools(2, 2, 6, dtype)
    assert torch.equal(layers(x_TD, angles, pools, ROWS, LAST_B), whole_TD[LAST_B])
    pools = random_pools(2, 2, 6, dtype)
    for b, tokens in enumerate((slice(0, 3), slice(3, 4), slice(4, 5))):
        row = replace(
            ROWS,
            block_BC=ROWS.block_BC[b : b + 1],
            start_B=ROWS.start_B[b : b + 1],
            first_B=torch.tensor([0]),
            count_B=ROWS.count_B[b : b + 1],
            slot_T=ROWS.slot_T[tokens],
        )
        given = x_TD[tokens], (angles[0][tokens], angles[1][tokens]), pools, row
        assert torch.equal(layers(*given), whole_TD[tokens])
        last = layers(*given, torch.tensor([tokens.stop - tokens.start - 1]))
        assert torch.equal(last, whole_TD[tokens][-1:])
    for pool, whole_pool in zip(pools, whole_pools, strict=True):
        assert all(torch.equal(half, whole) for half, whole in zip(pool, whole_pool, strict=True))


def small() -> tuple[Layers, Tensor, tuple[Tensor, Tensor]]:
    """Two layers, hidden states and angles."""
    some = [random_layer(n, SIZES[0], torch.float32, normed=False, biased=False).packed() for n in range(2)]
    return Layers(some), *random_input(0, 5, 10, 6, torch.float32)


def test_hidden_states_angles_and_tables_may_lie_anywhere() -> None:
    layers, x_TD, angles = small()
    expected = layers(x_TD, angles, random_pools(2, 2, 6, torch.float32), ROWS)
    spread = tuple(x.T.contiguous().T for x in (x_TD, *angles, ROWS.block_BC))
    rows = replace(
        ROWS,
        block_BC=spread[3],
        **{name: getattr(ROWS, name).repeat_interleave(2)[::2] for name in ("start_B", "first_B", "slot_T")},
    )
    assert not spread[0].is_contiguous() and not rows.slot_T.is_contiguous()
    found = layers(spread[0], spread[1:3], random_pools(2, 2, 6, torch.float32), rows)
    assert torch.equal(found, expected)


def test_a_token_without_a_slot_is_stored_nowhere() -> None:
    layers, x_TD, angles = small()
    pools, before = (random_pools(2, 2, 6, torch.float32) for _ in range(2))
    layers(x_TD, angles, pools, replace(ROWS, slot_T=torch.full((5,), -1)))
    for pool, known in zip(pools, before, strict=True):
        assert all(torch.equal(half, other) for half, other in zip(pool, known, strict=True))


def check_refused(message: str, pools: list[Pool] | None = None, **changes: Any) -> None:
    """An error with this message, and nothing is stored."""
    layers, x_TD, angles = small()
    x_TD = x_TD.to(changes.pop("dtype", torch.float32))
    angles = tuple(angle.to(changes.get("angles", torch.float32)) for angle in angles)
    last_B = changes.pop("last_B", None)
    changes.pop("angles", None)
    pools = pools or random_pools(2, 2, 6, torch.float32)
    before = [[half.clone() for half in pool] for pool in pools]
    with pytest.raises(ValueError, match=message):
        layers(x_TD, angles, pools, replace(ROWS, **changes), last_B)
    for pool, known in zip(pools, before, strict=True):
        assert all(torch.equal(half, other) for half, other in zip(pool, known, strict=True))


def test_what_is_not_there_is_refused_before_anything_is_stored() -> None:
    slot_T = ROWS.slot_T.clone()
    slot_T[2] = 30
    check_refused("slot_T holds 30; the pool has 6 blocks of 5 slots", slot_T=slot_T)
    message = r"row 1 has 1 queries at 5, the first at position 0, .* there are 5 queries and 6 blocks of 5"
    check_refused(message, first_B=torch.tensor([0, 5, 4]))
    block_BC = ROWS.block_BC.clone()
    block_BC[2, 1] = 6
    check_refused(r"row 2 .* blocks \[1, 6\]; there are 5 queries", block_BC=block_BC)
    check_refused(r"row 2 .* blocks \[1, 6\]; there are 5 queries", block_BC=block_BC, last_B=LAST_B)
    for last in (5, -1):
        message = rf"^last_B is \[2, 3, {last}\]; there are 5 tokens$"
        check_refused(message, last_B=torch.tensor([2, 3, last]))


def test_a_pool_that_lies_otherwise_is_refused() -> None:
    pools = random_pools(2, 2, 6, torch.float32)
    pools[1] = pools[1][0].contiguous(), pools[1][1]
    check_refused(r"the pool's keys have strides .* make it with new_pool", pools)


def test_two_dtypes_are_refused() -> None:
    message = "all must be float32, or all bfloat16"
    check_refused(rf"torch.bfloat16, torch.float32.*{message}", dtype=torch.bfloat16)
    check_refused(rf"torch.float32, torch.bfloat16.*{message}", angles=torch.bfloat16)
    check_refused(message, random_pools(2, 2, 6, torch.bfloat16))
    some = random_layer(0, SIZES[0], torch.float64, normed=False, biased=False).packed()
    x_TD, angles = random_input(0, 5, 10, 6, torch.float64)
    with pytest.raises(ValueError, match=message):
        Layers([some])(x_TD, angles, random_pools(1, 2, 6, torch.float64), ROWS)
