"""Argument validation for this package.

Each check raises ValueError with the argument's name and value; those of tensors, with the first bad index.
"""

from __future__ import annotations

from torch import Tensor


def require(holds: bool, name: str, value: object, demand: str) -> None:
    """Reject a setting that violates a condition: "low is 1.2; it must be at least 0 and below 1"."""
    if not holds:
        raise ValueError(f"{name} is {value}; it must be {demand}")


def check_shapes(**tensors: Tensor) -> None:
    """Reject tensors of different shapes: they would broadcast, or fail without a name."""
    (name, first), *others = tensors.items()
    for other, tensor in others:
        if tensor.shape != first.shape:
            raise ValueError(f"{other} has shape {tuple(tensor.shape)}, but {name} {tuple(first.shape)}")


def check_positive(**numbers: float) -> None:
    """Reject settings that are not above 0."""
    for name, number in numbers.items():
        require(number > 0, name, number, "above 0")


def check_finite(**tensors: Tensor | None) -> None:
    """Reject NaN and infinity; None is skipped. Reads each tensor once and synchronizes with the device."""
    for name, tensor in tensors.items():
        if tensor is not None:
            refuse(~tensor.isfinite(), tensor, name, "it must be finite")


def check_ids(count: int, **tensors: Tensor) -> None:
    """Reject numbers outside [0, count)."""
    for name, tensor in tensors.items():
        refuse((tensor < 0) | (tensor >= count), tensor, name, f"it must lie in [0, {count})")


def check_segments(num_segments: int, **tensors: Tensor) -> None:
    """Reject segments outside [0, num_segments) or out of order."""
    check_ids(num_segments, **tensors)
    for name, tensor in tensors.items():
        falls = tensor.diff(prepend=tensor[:1]) < 0
        refuse(falls, tensor, name, "it must not be below the segment before it")


def check_lengths(**tensors: Tensor) -> None:
    """Reject negative lengths."""
    for name, tensor in tensors.items():
        refuse(tensor < 0, tensor, name, "it must be at least 0")


def refuse(bad: Tensor, tensor: Tensor, name: str, rule: str) -> None:
    """Raise ValueError where `bad`, of the tensor's shape, holds anywhere: "NAME[INDEX] is VALUE; RULE"."""
    if bad.any():
        place = bad.nonzero()[0].tolist()
        raise ValueError(f"{name}{place} is {tensor[tuple(place)].item()}; {rule}")
