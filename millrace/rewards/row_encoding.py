"""Rows of data as JSON that restores tuples and key types.

JSON converts tuples to lists and numeric keys to text, but some reasoning-gym tasks compare tuples. A row
that JSON would change is therefore encoded with tagged containers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


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
