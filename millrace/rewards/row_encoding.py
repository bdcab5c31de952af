"""The protocol between a reward worker process and its parent: one JSON value per line, ASCII only.

Messages of the worker are numbered and authenticated with a shared key, because code that the worker runs
could write to the same pipe.

JSON converts tuples to lists and numeric keys to text, but some reasoning-gym tasks compare tuples. A row
that JSON would change is therefore encoded with tagged containers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from hmac import compare_digest
from typing import Any

_DIGEST_BYTES = 16


def encode_line(value: Any) -> bytes:
    """Encode a value as one line of the protocol; line breaks inside text are escaped."""
    return json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n"


def seal(key: bytes, number: int, value: Any) -> bytes:
    """Encode the message of a sequence number, from 0, as a line authenticated with the shared key."""
    line = encode_line(value)
    return _digest(key, number, line[:-1]) + b" " + line


def unseal(key: bytes, number: int, line: bytes) -> Any:
    """Decode a line of `seal` without its line break; ValueError for another number, or another key."""
    digest, _, text = line.partition(b" ")
    if not compare_digest(digest, _digest(key, number, text)):
        raise ValueError("the line has another number or another author")
    return json.loads(text)


def _digest(key: bytes, number: int, text: bytes) -> bytes:
    return (
        blake2b(number.to_bytes(8, "little") + text, key=key, digest_size=_DIGEST_BYTES).hexdigest().encode()
    )


def encode_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Encode a row as JSON so that `decode_row` restores it, including tuples and key types.

    Raises:
        TypeError: the row holds something else than text, numbers, booleans, None, lists, tuples, dicts.
    """
    plain = dict(row)
    try:
        if json.loads(json.dumps(plain)) == plain:
            return {"plain": plain}
    except (TypeError, ValueError):  # `_name` below raises with the type that JSON could not encode
        pass
    return {"named": _name(plain)}


def decode_row(value: Mapping[str, Any]) -> dict[str, Any]:
    """Decode the row from the result of `encode_row`."""
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
