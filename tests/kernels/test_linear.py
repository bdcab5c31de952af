from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from millrace.kernels import linear as module
from millrace.kernels import product_cpu
from millrace.kernels.linear import invariant_linear, linear, pack
from tests.close import close_bf16, close_fp32, close_fp64

ONEDNN = torch.backends.mkldnn.is_available()
needs_onednn = pytest.mark.skipif(not ONEDNN, reason="this build of torch has no oneDNN")


def inputs(seed: int, *sizes: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """x, a weight of about unit gain, a bias; sizes are M, D, N."""
    num_rows, width, out = sizes
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, width, generator=generator)
    weight = torch.randn(out, width, generator=generator) / width**0.5
    bias = torch.randn(out, generator=generator)
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product goes to oneDNN."""
    for name in ("PRODUCT", "WEIGHT", "RECORDED_PRODUCT"):
        monkeypatch.setattr(module, name, 1)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_values_and_slopes_equal_those_of_torch(seed: int, with_bias: bool) -> None:
    x, weight, bias = inputs(seed, 6, 5 + seed, 7)
    x = x.view(2, 3, -1)
    leaves = [x, weight, bias][: 2 + with_bias]
    for leaf in leaves:
        leaf.requires_grad_()
    ours, plain = linear(*leaves), F.linear(*leaves)
    if ONEDNN:
        assert type(ours.grad_fn).__name__ == "_LinearBackward"
    slope = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(seed))
    close_fp32(ours.detach(), plain.detach())
    expected = torch.autograd.grad(plain, leaves, slope)
    for one, other in zip(torch.autograd.grad(ours, leaves, slope), expected, strict=True):
        close_fp32(one, other)
    with torch.no_grad():
        close_fp32(linear(*leaves), plain)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("trained", [0, 1, 2])
def test_only_what_is_trained_gets_a_slope(trained: int) -> None:
    leaves = list(inputs(0, 4, 5, 3))
    leaves[trained].requires_grad_()
    linear(*leaves).sum().backward()
    (expected,) = torch.autograd.grad(F.linear(*leaves).sum(), leaves[trained])
    grad = leaves[trained].grad
    assert grad is not None
    close_fp32(grad, expected)
    assert [leaf.grad is None for leaf in leaves] == [index != trained for index in range(3)]


@needs_onednn
@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((128, 128, 384), True),  # exactly 6 Mi
        ((128, 128, 383), False),
        ((1, 512, 512), True),  # a weight of exactly 256 Ki
        ((1, 512, 511), False),
        ((128, 64, 768), True),
        ((127, 64, 768), False),
    ],
)
def test_products_go_to_onednn_from_a_certain_size_on(
    sizes: tuple[int, int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    own = module._onednn
    monkeypatch.setattr(module, "_onednn", lambda *given: calls.append(1) or own(*given))
    x, weight, bias = inputs(0, *sizes)
    close_fp32(linear(x, weight, bias), F.linear(x, weight, bias), atol=1e-5)
    assert bool(calls) is expected


@needs_onednn
@pytest.mark.parametrize(("num_rows", "expected"), [(2048, True), (2047, False)])
def test_with_a_gradient_only_large_products_go_to_onednn(num_rows: int, expected: bool) -> None:
    x, weight, _ = inputs(0, num_rows, 128, 128)  # 32 Mi at 2,048 rows
    ours = linear(x, weight.requires_grad_())
    assert (type(ours.grad_fn).__name__ == "_LinearBackward") is expected
    close_fp32(ours.detach(), F.linear(x, weight).detach(), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_packed_weight_gives_the_same_product(dtype: torch.dtype) -> None:
    x, weight, bias = inputs(0, 9, 40, 24, dtype=dtype)
    packed = product_cpu.pack(weight)
    close = {torch.float32: close_fp32, torch.bfloat16: close_bf16, torch.float64: close_fp64}[dtype]
    close(linear(x, weight, bias, packed=packed), F.linear(x, weight, bias))
    # It is the packed weight that is read.
    close(linear(x, torch.zeros_like(weight), packed=packed), F.linear(x, weight))
    # Where a gradient is recorded, it is the weight itself.
    trained = torch.zeros_like(weight).requires_grad_()
    assert float(linear(x, trained, packed=packed).detach().abs().max()) == 0.0
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x.float(), weight.float() * 0, packed=packed).dtype == torch.bfloat16


def test_weights_are_packed_where_that_is_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    _, weight, _ = inputs(0, 1, 7, 8)
    monkeypatch.setattr(product_cpu, "FEATURES", {"fma", "avx2"})
    packed = pack(weight)
    assert packed is not None and (packed.num_inputs, packed.num_outputs) == (7, 8)
    # An odd number of inputs cannot be read in pairs.
    for width, odd in ((7, True), (9, True), (8, False), (10, False)):
        weight_ND = torch.zeros(8, width, dtype=torch.bfloat16)
        assert (pack(weight_ND) is None) is odd
    assert pack(weight.to("meta")) is None
    assert pack(weight.half()) is None
    monkeypatch.setattr(product_cpu, "FEATURES", {"neon"})
    assert pack(weight) is None


@pytest.mark.usefixtures("small")
def test_what_onednn_does_not_do_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_onednn", None)  # would fail if called
    x, weight, bias = inputs(0, 3, 4, 5, dtype=torch.float64)
    close_fp64(linear(x, weight, bias), x @ weight.T + bias)
    x, weight, bias = inputs(0, 3, 4, 5, dtype=torch.bfloat16)
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
    x, weight, bias = inputs(0, 3, 4, 5)
    assert linear(x.to("meta"), weight.to("meta")).shape == (3, 5)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear(x, weight[:, :3])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    close_fp32(linear(x, weight, bias), x @ weight.T + bias)
    close_fp32(invariant_linear(x, weight, bias), x @ weight.T + bias)


def test_no_row_gives_no_row() -> None:
    _, weight, bias = inputs(0, 1, 512, 512)
    assert linear(torch.zeros(0, 512), weight, bias).shape == (0, 512)
    assert invariant_linear(torch.zeros(2, 0, 512), weight, bias).shape == (2, 0, 512)


@pytest.mark.slow_beyond(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("width", "out"), [(17, 5), (32, 48), (41, 37), (256, 64)])
def test_a_row_has_the_same_bits_whatever_the_batch(dtype: torch.dtype, width: int, out: int) -> None:
    """Other rows, any place, any number of rows, either number of threads."""
    row, weight, bias = inputs(0, 1, width, out, dtype=dtype)
    expected = invariant_linear(row, weight, bias)[0]
    numbers = torch.Generator().manual_seed(1)
    for num_rows in (1, 2, 3, 8, 31, 32, 33, 40, 64, 65, 70):
        x, _, _ = inputs(num_rows, num_rows, width, out, dtype=dtype)
        for place in {0, num_rows - 1, int(torch.randint(num_rows, (1,), generator=numbers))}:
            x[place] = row[0]
            with threads(2 if num_rows == 33 else 1):
                assert torch.equal(invariant_linear(x, weight, bias)[place], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("tile", [1, 3, 32])
def test_a_row_has_the_same_bits_wherever_it_lies_in_memory(dtype: torch.dtype, tile: int) -> None:
    x, weight, _ = inputs(0, 35, 24, 9, dtype=dtype)
    expected = invariant_linear(x, weight, tile=tile)
    memory = torch.zeros(35 * 24 + 8, dtype=dtype)
    for offset in range(1, 8):
        moved = memory[offset : offset + 35 * 24].view(35, 24)
        moved.copy_(x)
        assert torch.equal(invariant_linear(moved, weight, tile=tile), expected)
    held = torch.zeros(9 * 24 + 1, dtype=dtype)[1:].view(9, 24).copy_(weight)
    assert torch.equal(invariant_linear(x, held, tile=tile), expected)
    assert torch.equal(invariant_linear(x.T.contiguous().T, weight, tile=tile), expected)


@needs_onednn
@pytest.mark.parametrize("has", [True, False])
def test_bfloat16_goes_to_onednn_only_where_it_has_products_of_it(
    monkeypatch: pytest.MonkeyPatch, has: bool
) -> None:
    asked = []

    def onednn(x: Tensor, weight_ND: Tensor, bias_N: Tensor | None) -> Tensor:
        asked.append(x.dtype)
        return F.linear(x, weight_ND, bias_N)

    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has)
    monkeypatch.setattr(module, "_onednn", onednn)
    for dtype in (torch.float32, torch.bfloat16):
        ones = (torch.ones(shape, dtype=dtype) for shape in [(5, 24), (9, 24), (9,)])
        assert invariant_linear(*ones).tolist() == [[25.0] * 9] * 5
    assert asked == [torch.float32, *([torch.bfloat16] if has else [])]


@pytest.mark.parametrize("num_rows", [1, 31, 32, 33])
@pytest.mark.parametrize("tile", [1, 8, 32])
def test_tiles_give_the_ordinary_product_and_slopes(num_rows: int, tile: int) -> None:
    leaves = list(inputs(num_rows, num_rows, 19, 7))
    for leaf in leaves:
        leaf.requires_grad_()
    ours, plain = invariant_linear(*leaves, tile=tile), F.linear(*leaves)
    close_fp32(ours.detach(), plain.detach())
    with torch.no_grad():
        assert torch.equal(invariant_linear(*leaves, tile=tile), ours)
    slope = torch.randn(num_rows, 7, generator=torch.Generator().manual_seed(0))
    expected = torch.autograd.grad(plain, leaves, slope)
    for one, other in zip(torch.autograd.grad(ours, leaves, slope), expected, strict=True):
        close_fp32(one, other, atol=1e-5)


def test_what_comes_in_tiles_may_be_written_over() -> None:
    """As OLMo does with queries, keys and values."""
    x, weight = torch.ones(5, 4), torch.ones(3, 4, requires_grad=True)
    invariant_linear(x, weight, tile=2).clamp_(max=3.0).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [[0.0] * 4] * 3
    weight.grad = None
    invariant_linear(x, weight, tile=2).clamp_(max=5.0).sum().backward()
    assert weight.grad.tolist() == [[5.0] * 4] * 3


def test_whole_tiles_in_good_order_are_not_copied() -> None:
    x = torch.zeros(64, 16)
    assert module._laid_out(x, 32) is x
    assert module._laid_out(x, 33).shape == (66, 16)
    assert module._laid_out(x[:, :15].contiguous(), 32).shape == (64, 16)
    assert module._laid_out(x.double()[:, :15].contiguous(), 32).shape == (64, 16)
    assert module._laid_out(x.double()[:, :9].contiguous(), 32).shape == (64, 16)
    assert module._laid_out(x.double()[:, :7].contiguous(), 32).shape == (64, 8)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tile": 0}, "tile is 0; a tile must hold at least 1 row"),
        (
            {"weight_ND": torch.zeros(3, 5)},
            "x has shape (2, 4) and torch.float32, but weight_ND (3, 5) and torch.float32; "
            "the width and the dtype must be the same",
        ),
        (
            {"weight_ND": torch.zeros(3, 4, dtype=torch.float64)},
            "x has shape (2, 4) and torch.float32, but weight_ND (3, 4) and torch.float64; "
            "the width and the dtype must be the same",
        ),
    ],
)
def test_what_cannot_be_tiled_is_refused(given: dict, message: str) -> None:
    with pytest.raises(ValueError) as error:
        invariant_linear(torch.zeros(2, 4), **{"weight_ND": torch.zeros(3, 4), **given})
    assert str(error.value) == message
