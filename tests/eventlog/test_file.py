"""Events in columns: what was written is read, and whatever is changed in the file is found."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from millrace.eventlog.file import HEADER, blocks, decode, encode, read_log, whole_bytes
from millrace.eventlog.log import EventLog
from millrace.observability.files import FileError
from tests.event_logs import write_events

TEXTS = [
    "generated 3.0.24",
    "generated 3.1.25",
    "",
    "0",
    "00",
    "a\0b",
    "step-000001",
    "9" * 40,
    "\ud800 ä",
    "engine_lost e-2 1",
]


def value(draw: random.Random) -> Any:
    kind = draw.randrange(8)
    return [
        draw.randrange(-9, 9),
        10**30,
        draw.choice(TEXTS),
        draw.random() * 1e9,
        None,
        draw.random() < 0.5,
        [draw.choice(TEXTS) for _ in range(draw.randrange(3))],
        {"x": [[draw.randrange(5), draw.choice(TEXTS)]]},
    ][kind]


def event(draw: random.Random) -> dict[str, Any]:
    names = draw.sample(["number", "time_s", "events", "engine"], draw.randrange(5))
    found = {"kind": draw.choice(["a", "b"])} | {name: value(draw) for name in names}
    return found | ({"time_s": round(draw.random() * 1e5, 6)} if draw.random() < 0.7 else {})


@pytest.mark.parametrize("seed", range(3))
def test_what_was_written_is_read(seed):
    draw = random.Random(seed)
    for size in (0, 1, 2, 50, 300):
        events = [event(draw) for _ in range(size)]
        assert repr(decode(encode(events)[12:])) == repr(events)


def arrivals(count: int) -> list[dict[str, Any]]:
    return [
        {"kind": "completed", "time_s": i / 1000, "number": i // 8, "sample": i % 8, "engine": "engine-0"}
        for i in range(count)
    ]


def test_a_thousand_answers_take_few_bytes():
    results = [
        {"kind": "generate_result", "engine": "engine-0", "id": f"{i // 8}.{i % 8}.{i}"} for i in range(1024)
    ]
    assert len(encode([{"kind": "events_received", "events": results}, *arrivals(1024)])) < 600


def test_whatever_is_changed_or_cut_is_found(tmp_path: Path):
    path, draw = tmp_path / "events.log", random.Random(0)
    events = arrivals(60)
    write_events(path, events, block=20)
    content = path.read_bytes()
    for _ in range(300):
        changed, place = bytearray(content), draw.randrange(len(content))
        changed[place] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        try:
            found = list(read_log(path))
        except FileError as error:
            assert str(error).startswith(f"{path}")
            continue
        # A length that goes beyond the end is taken for the end of what was written.
        assert found == events[:40]
    for place in range(len(content)):
        path.write_bytes(content[:place])
        with closing(EventLog(path, lambda: 1.0)) as log:
            log.add("abort_in_flight")
        found = list(read_log(path))
        assert found[:-1] == events[: len(found) - 1] and found[-1]["kind"] == "abort_in_flight"
        assert len(found) - 1 == 20 * max(0, sum(1 for one in blocks(content[:place]) if one.events))


def test_after_a_damaged_block_the_next_is_read(tmp_path: Path):
    path, told = tmp_path / "events.log", list[str]()
    write_events(path, arrivals(30), block=10)
    content = bytearray(path.read_bytes())
    second = whole_bytes(HEADER + encode(arrivals(10)))
    content[second + 1] ^= 1
    path.write_bytes(content)
    assert list(read_log(path, warn=told.append)) == [*arrivals(30)[:10], *arrivals(30)[20:]]
    assert told == [f"{path}: block 2 is damaged; left out"]
    # A run that goes on keeps what is whole after it.
    EventLog(path, lambda: 0.0).close()
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (
            b"millrace event log 5\nxyz",
            "is an event log of version 5, and this millrace reads version 4; use",
        ),
        (
            b"millrace event log 2\nxyz",
            "is an event log of version 2, and this millrace reads version 4; use",
        ),
        (b'{"kind": "begin"}\n', "is an event log of version 1, and this millrace reads version 4; use the"),
        (b"what is this" * 9, "is damaged: it does not begin as an event log; restore it from a copy"),
    ],
)
def test_a_file_of_another_version_is_refused_by_name(tmp_path: Path, content: bytes, why: str):
    path = tmp_path / "events.log"
    path.write_bytes(content)
    for use in (lambda: list(read_log(path)), lambda: EventLog(path, lambda: 0.0)):
        with pytest.raises(FileError, match=why):
            use()
    assert path.read_bytes() == content
    path.rename(tmp_path / "events.jsonl")
    if content.startswith(b"{"):
        with pytest.raises(FileError, match=r"events\.jsonl is an event log of version 1"):
            EventLog(path, lambda: 0.0)


@pytest.mark.parametrize(
    "payload", [b"", b"x", encode([])[12:-1], encode([{"kind": "abort_in_flight"}])[12:] + b"x"]
)
def test_what_is_no_payload_is_a_value_error(payload: bytes):
    with pytest.raises(ValueError, match="no block of events"):
        decode(payload)
