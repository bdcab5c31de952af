"""Tools of tests, named in worker processes as `tests.environments.tool_samples:NAME`."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any, Literal


def multiply(product: str) -> str:
    """Multiply two numbers.

    Args:
        product: such as 3*4
    """
    a, b = product.split("*")
    return f"={int(a) * int(b)};"


multiply.pure = True


async def wait(seconds: float, label: str = "") -> dict[str, Any]:
    """Wait, and return how many calls waited at once."""
    WAITING.append(label)
    at_once = len(WAITING)
    await asyncio.sleep(seconds)
    WAITING.remove(label)
    return {"at_once": at_once}


WAITING: list[str] = []


def count(numbers: list[int], kind: Literal["sum", "max"] = "sum", scale: int | None = None) -> int:
    """Count numbers.

    The second paragraph.

    Args:
        numbers: whole ones,
            any number of them
        kind: what to count
        scale: a factor: 1 if it is missing

    Returns:
        A number.
    """
    return (sum(numbers) if kind == "sum" else max(numbers)) * (scale or 1)


def fail(how: str) -> str:
    """Fail."""
    if how == "exit":
        sys.exit(3)
    if how == "hang":
        threading.Event().wait()
    if how == "die":
        import os

        os._exit(3)
    raise OSError(f"\x1b[31mno {how}\n" + "x" * 10_000)


def large(size: int) -> str:
    """Return a large text."""
    return "begin " + "x" * size + " end"


def undocumented(a: int) -> int:
    return a


def untyped(a) -> int:
    """Return it."""
    return a


def strange(a: threading.Event) -> None:
    """Take an object."""


def nowhere(a: Nowhere) -> None:  # noqa: F821
    """Take what is nowhere."""


def starred(*a: int) -> None:
    """Take any number."""


def half(digit: str) -> str:
    """Compare a digit with half of all."""
    if digit == "7":
        raise ValueError("seven")
    return "<" if int(digit) < 8 else "<<"
