from __future__ import annotations

import pytest
import torch
import xxhash

from millrace.transport.fingerprint import PIECE_BYTES, digest, fingerprint


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
    named = [("b", torch.ones(1)), ("a", torch.ones(2))]
    assert list(fingerprint(named).items()) == [("b", digest(named[0][1])), ("a", digest(named[1][1]))]


def test_the_digest_is_the_published_one() -> None:
    """XXH3-128 of the bytes, as the reference implementation prints it: the same on every machine."""
    assert digest(torch.tensor([], dtype=torch.uint8)) == xxhash.xxh3_128_hexdigest(b"torch.uint8 (0,) ")
    letters = torch.tensor(list(b"millrace"), dtype=torch.uint8)
    assert digest(letters) == xxhash.xxh3_128_hexdigest(b"torch.uint8 (8,) millrace")


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("num_bytes", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, 2 * PIECE_BYTES + 3])
def test_bytes_are_copied_on_the_way(num_bytes: int) -> None:
    sent = torch.randint(256, (num_bytes,), dtype=torch.uint8)
    memory = torch.full((num_bytes + 2,), 7, dtype=torch.uint8)
    assert digest(sent, memory[1:-1]) == digest(sent)
    assert digest(sent) == xxhash.xxh3_128_hexdigest(
        f"torch.uint8 ({num_bytes},) ".encode() + bytes(sent.tolist())
    )
    assert torch.equal(memory[1:-1], sent)
    assert memory[0] == memory[-1] == 7
