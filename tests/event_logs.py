"""Event logs as tests write and change them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from millrace.eventlog.file import HEADER, encode, read_log

Events = list[dict[str, Any]]


def write_events(path: Path, events: Iterable[dict[str, Any]], *, block: int = 1000) -> None:
    """Write events as a run does, `block` of them at a time, whatever they say."""
    rows = list(events)
    blocks = [encode(rows[i : i + block]) for i in range(0, len(rows), block)]
    path.write_bytes(HEADER + b"".join(blocks) if blocks else b"")


def change_events(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    """Change a log's events as lines of JSON, and write them as a run does."""
    lines = [json.dumps(event) + "\n" for event in read_log(path)]
    write_events(path, map(json.loads, change(lines)))
