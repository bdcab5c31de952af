from __future__ import annotations

import pytest
import torch
import xxhash
from torch import Tensor

from millrace.transport.fingerprint import fingerprint


def digest(tensor: Tensor) -> str:
    return fingerprint([("weight", tensor)])["weight"]


def test_equal_tensors_have_equal_fingerprints_however_they_lie_in_memory() -> None:
    matrix = torch.arange(12.0).view(3, 4)
    assert digest(matrix) == digest(matrix.T.contiguous().T) == digest(matrix.clone().requires_grad_())
    assert len(digest(matrix)) == 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_one_bit_shows(dtype: torch.dtype) -> None:
    one, other = torch.ones(5, dtype=dtype), torch.ones(5, dtype=dtype)
    other.view(torch.uint8)[-1] ^= 1
    assert digest(one) != digest(other)


def test_shape_and_dtype_and_the_sign_of_zero_show() -> None:
    zeros = torch.zeros(4)
    others = [torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.zeros(5), -zeros]
    assert len({digest(tensor) for tensor in [zeros, *others]}) == 5


def test_scalars_and_empty_tensors_have_fingerprints() -> None:
    assert digest(torch.tensor(1.0)) != digest(torch.tensor([1.0])) != digest(torch.zeros(0))


def test_names_are_kept() -> None:
    assert list(fingerprint([("b", torch.ones(1)), ("a", torch.ones(1))])) == ["b", "a"]


def test_the_digest_is_the_published_one() -> None:
    """XXH3-128 of the bytes, as the reference implementation prints it: the same on every machine."""
    assert digest(torch.tensor([], dtype=torch.uint8)) == xxhash.xxh3_128_hexdigest(b"torch.uint8 (0,) ")
    letters = torch.tensor(list(b"millrace"), dtype=torch.uint8)
    assert digest(letters) == xxhash.xxh3_128_hexdigest(b"torch.uint8 (8,) millrace")
