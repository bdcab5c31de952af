"""How the two sides of a judge process write to each other: one JSON value a line, ASCII only.

JSON alone would turn tuples into lists and number keys into text, and some reasoning-gym tasks compare
tuples. So a row that JSON changes travels with its containers named.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def encode_line(value: Any) -> bytes:
    """One line of the protocol; a line break inside a text is escaped."""
    return json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n"


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
