"""How the two sides of a judge process write to each other: one JSON value a line, ASCII only.

What the worker writes is numbered and signed with a key that only the two sides know, since what it runs
could write into its pipe, too.

JSON alone would turn tuples into lists and number keys into text, and some reasoning-gym tasks compare
tuples. So a row that JSON changes travels with its containers named.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from hmac import compare_digest
from typing import Any

_DIGEST_BYTES = 16


def encode_line(value: Any) -> bytes:
    """One line of the protocol; a line break inside a text is escaped."""
    return json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n"


def seal(key: bytes, number: int, value: Any) -> bytes:
    """A line that `unseal` takes as the one of this number, from 0; it cannot be made without the key."""
    line = encode_line(value)
    return _digest(key, number, line[:-1]) + b" " + line


def unseal(key: bytes, number: int, line: bytes) -> Any:
    """The value of a line without its end.

    Raises:
        ValueError: it is not the one of this number, or was written without the key.
    """
    digest, _, text = line.partition(b" ")
    if not compare_digest(digest, _digest(key, number, text)):
        raise ValueError("the line has another number or another author")
    return json.loads(text)


def _digest(key: bytes, number: int, text: bytes) -> bytes:
    return (
        blake2b(number.to_bytes(8, "little") + text, key=key, digest_size=_DIGEST_BYTES).hexdigest().encode()
    )


def encode_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as JSON that `decode_row` turns back into an equal one, tuples and key types included.

    Raises:
        TypeError: the row holds something else than text, numbers, truth values, None, lists, tuples, dicts.
    """
    plain = dict(row)
    try:
        if json.loads(json.dumps(plain)) == plain:
            return {"plain": plain}
    except (TypeError, ValueError):  # the walk below finds out what JSON could not write, and names it
        pass
    return {"named": _name(plain)}


def decode_row(value: Mapping[str, Any]) -> dict[str, Any]:
    """The row `encode_row` was given."""
    row: dict[str, Any] = value["plain"] if "plain" in value else _unname(value["named"])
    return row


def _name(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return ["dict", *([_name(key), _name(item)] for key, item in value.items())]
    if isinstance(value, list | tuple):
        return ["tuple" if isinstance(value, tuple) else "list", *(_name(item) for item in value)]
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__}")


def _unname(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    name, *items = value
    if name == "dict":
        return {_unname(key): _unname(item) for key, item in items}
    return tuple(_unname(item) for item in items) if name == "tuple" else [_unname(item) for item in items]
