"""The file format of `events.log`: compressed columnar blocks of events with checksums. No torch.

The file begins with `HEADER`. A block is `MARK`, then the length and the CRC-32 of its payload (four bytes
each, little endian), then the payload: JSON, compressed by zlib. A block that a killed process left half
written does not count. Events with the same kind and fields form one table, and slowly growing columns are
delta-encoded, so that the events of ten thousand tokens take a few hundred bytes.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, groupby, islice, repeat
from operator import sub
from pathlib import Path
from typing import Any

from millrace.observability.files import RESTORE, FileError, parse_json, read_bytes, shown

VERSION = 4
HEADER = b"millrace event log 4\n"
# The file name of version 1 of the log: JSON lines.
OLD_NAME = "events.jsonl"
MARK = b"\xf5MEV"
# Bytes of mark, length and checksum.
_HEAD = 12
# A block has a few thousand events; a larger one is damaged.
MAX_BLOCK_BYTES = 1 << 30
# An integer inside text, in Python's notation.
_NUMBER = re.compile(r"((?<![0-9])(?:0|[1-9][0-9]{0,14})(?![0-9]))")
_MICRO = 1_000_000
_ERRORS = (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, MemoryError)

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Block:
    """A block of an event log file.

    Attributes:
        number: of the block, from 1.
        events: in order; None if the block is damaged.
        cut: whether it is truncated by the end of the file, because its writer was killed.
    """

    number: int
    events: list[Event] | None
    cut: bool


def encode(events: Sequence[Event]) -> bytes:
    """Encode events as a block; an event is a JSON object."""
    text = json.dumps(_pack_rows(events), separators=(",", ":"), allow_nan=False)
    payload = zlib.compress(text.encode(), 6)
    return MARK + len(payload).to_bytes(4, "little") + zlib.crc32(payload).to_bytes(4, "little") + payload


def decode(payload: bytes) -> list[Event]:
    """Decode the events of a block's payload.

    Raises:
        ValueError: the payload is invalid.
    """
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(payload, MAX_BLOCK_BYTES)
        if not unpacker.eof or unpacker.unused_data:
            raise ValueError("it is too large")
        return _unpack_rows(*parse_json(text))
    except (*_ERRORS, zlib.error, StopIteration) as error:
        raise ValueError(f"no block of events: {error}") from None


def blocks(content: bytes) -> Iterator[Block]:
    """Yield the blocks after the header; invalid bytes up to the next block count as a damaged block."""
    at, number = len(HEADER), 0
    while at < len(content):
        end, number = _end(content, at), number + 1
        events, cut = None, False
        if end is None:
            end = _next_whole(content, at + 1)
            cut = end == len(content) and _is_cut(content[at:])
        else:
            with suppress(ValueError):
                events = decode(content[at + _HEAD : end])
        yield Block(number, events, cut)
        at = end


def whole_bytes(content: bytes) -> int:
    """Return the offset of the end of the last whole block; later bytes were truncated by a kill."""
    last = at = len(HEADER) if content.startswith(HEADER) else 0
    while at < len(content):
        end = _end(content, at)
        if end is None:
            at = _next_whole(content, at + 1)
        else:
            last = at = end
    return last


def check_header(path: Path, content: bytes) -> None:
    """Reject a file of another format version, or without the header of an event log.

    Raises:
        FileError: it is one; the message has the version.
    """
    if HEADER.startswith(content[: len(HEADER)]):
        return
    found = re.match(rb"millrace event log ([0-9]{1,9})\n", content)
    if found or content.startswith(b'{"kind"'):
        raise FileError(_other_version(path, int(found[1]) if found else 1))
    raise FileError(f"{shown(path)} is damaged: it does not begin as an event log; {RESTORE}")


def check_old(path: Path) -> None:
    """Reject a run whose log has the file name of version 1.

    Raises:
        FileError: it has that name.
    """
    old = path.with_name(OLD_NAME)
    if not path.exists() and old.is_file() and old.stat().st_size:
        raise FileError(_other_version(old, 1))


def read_log(
    path: Path,
    check: Callable[[Event], str | None] = lambda event: None,
    *,
    warn: Callable[[str], None] | None = None,
) -> Iterator[Event]:
    """Yield the events of a log, without a truncated last block.

    Args:
        path: of the log.
        check: returns the defect of an event, or None.
        warn: callback for a message about damaged parts, which are skipped; without it they are an error.

    Raises:
        FileError: the file is unreadable or of another version, or a part is damaged and `warn` is None.
    """
    check_old(path)
    content = read_bytes(path)
    check_header(path, content)
    number, damaged, cut = 0, [], False
    for block in blocks(content):
        if block.events is None:
            cut = block.cut
            if not cut:
                damaged.append(f"block {block.number} is damaged")
        for event in block.events or ():
            number += 1
            wrong = check(event)
            if wrong is None:
                yield event
            else:
                damaged.append(f"event {number} is damaged: {wrong}")
        if damaged and warn is None:
            raise FileError(f"{shown(path)}: {damaged[0]}; {RESTORE}")
    if warn is not None and damaged:
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        warn(f"{shown(path)}: {damaged[0]}{more}; left out")
    if warn is not None and cut:
        warn(f"{shown(path)}: the last block is not whole; left out")


def _other_version(path: Path, version: int) -> str:
    return (
        f"{shown(path)} is an event log of version {version}, and this millrace reads version {VERSION}; use "
        "the millrace that wrote it, or start a new run"
    )


def _is_cut(rest: bytes) -> bool:
    if len(rest) < _HEAD:
        return MARK.startswith(rest[:4])
    return rest.startswith(MARK) and _HEAD + int.from_bytes(rest[4:8], "little") > len(rest)


def _end(content: bytes, at: int) -> int | None:
    """Return the end offset of the block at `at`; None if there is none or its checksum is wrong."""
    if content[at : at + 4] != MARK or at + _HEAD > len(content):
        return None
    length, checksum = (int.from_bytes(content[at + i : at + i + 4], "little") for i in (4, 8))
    payload = content[at + _HEAD : at + _HEAD + length]
    if len(payload) != length or zlib.crc32(payload) != checksum:
        return None
    return at + _HEAD + length


def _next_whole(content: bytes, at: int) -> int:
    """Return the offset of the next whole block, else the end of the file."""
    while (at := content.find(MARK, at)) >= 0:
        if _end(content, at) is not None:
            return at
        at += 1
    return len(content)


def _pack_rows(rows: Sequence[Event]) -> list[Any]:
    """Encode dictionaries as the order of their tables, and one table of columns for each kind and fields."""
    tables: dict[tuple[str, ...], list[Event]] = {}
    order: list[list[int]] = []
    numbers: dict[tuple[str, ...], int] = {}
    for shape, run in groupby(rows, lambda row: (str(row.get("kind")), *row)):
        alike = list(run)
        tables.setdefault(shape, []).extend(alike)
        order.append([numbers.setdefault(shape, len(numbers)), len(alike)])
    packed = [
        [list(shape[1:]), [_pack([row[name] for row in alike], name) for name in shape[1:]]]
        for shape, alike in tables.items()
    ]
    return [order, packed]


def _unpack_rows(order: list[list[int]], packed: list[Any]) -> list[Event]:
    tables = [iter(list(_rows(names, [_unpack(column) for column in columns]))) for names, columns in packed]
    return [next(tables[number]) for number, count in order for _ in range(count)]


def _rows(names: list[str], columns: list[list[Any]]) -> Iterator[Event]:
    return (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))


def _pack(column: list[Any], name: str = "") -> list[Any]:
    """Encode a column of values as JSON: a letter for the encoding, and its data for `_unpack`."""
    kinds = set(map(type, column))
    if kinds in ({int}, {str}) and column.count(column[0]) == len(column):
        return ["s", len(column), column[0]]
    if kinds == {int}:
        return ["i", _steps(column)]
    if kinds == {str}:
        return _pack_texts(column)
    if kinds == {list}:
        return ["l", _steps(list(map(len, column))), _pack([one for row in column for one in row])]
    if kinds == {dict} and all(column):
        return ["d", *_pack_rows(column)]
    if name == "time_s" and kinds == {float}:
        ticks = [round(value * _MICRO) for value in column]
        if [tick / _MICRO for tick in ticks] == column:
            return ["t", _steps(ticks)]
    return ["j", column]


def _unpack(packed: list[Any]) -> list[Any]:
    how, *rest = packed
    match how:
        case "i":
            return _sums(*rest)
        case "t":
            return [tick / _MICRO for tick in _sums(*rest)]
        case "s":
            count, value = rest
            return [value] * count
        case "x":
            return _unpack_texts(*rest)
        case "l":
            lengths, values = _sums(rest[0]), iter(_unpack(rest[1]))
            return [list(islice(values, length)) for length in lengths]
        case "d":
            return _unpack_rows(*rest)
        case "j":
            return list(*rest)
    raise ValueError(f"a column is kept as {how!r}")


def _pack_texts(column: list[str]) -> list[Any]:
    r"""Encode texts as templates and their integers: `scored 3.0.24` is `scored \0.\0.\0` and 3, 0, 24."""
    if any("\0" in text for text in column):
        return ["j", column]
    known: dict[str, int] = {}
    which: list[int] = []
    rows: list[list[list[str]]] = []
    for text in column:
        parts = _NUMBER.split(text)
        number = known.setdefault("\0".join(parts[::2]), len(known))
        if number == len(rows):
            rows.append([])
        which.append(number)
        rows[number].append(parts[1::2])
    numbers = [[_steps(list(map(int, values))) for values in zip(*each, strict=True)] for each in rows]
    return ["x", list(known), _steps(which), numbers]


def _unpack_texts(known: list[str], which: list[int], numbers: list[list[list[int]]]) -> list[str]:
    rows = [_texts(text.split("\0"), columns) for text, columns in zip(known, numbers, strict=True)]
    return [next(rows[number]) for number in _sums(which)]


def _texts(parts: list[str], columns: list[list[int]]) -> Iterator[str]:
    if len(parts) != len(columns) + 1:
        raise ValueError("a text has other numbers than places for them")
    values = zip(*map(_sums, columns), strict=True) if columns else repeat(())
    for row in values:
        yield parts[0] + "".join(f"{number}{part}" for number, part in zip(row, parts[1:], strict=True))


def _steps(values: list[int]) -> list[int]:
    """Delta-encode: each value minus the one before it."""
    return list(map(sub, values, [0, *values[:-1]]))


def _sums(steps: list[int]) -> list[int]:
    return list(accumulate(steps))
