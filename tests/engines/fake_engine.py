"""A process that stands in for an engine's and starts at once. A file `manner` says how it behaves.

`late PATH` starts once there is such a file, `until PATH` draws then.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from millrace.engines.wire import ORDERS, Channel, drawn_as_frame, draws_of
from millrace.types import Completion

TOKENS = (3, 1, 2)


def completion(version: int) -> Completion:
    return Completion(TOKENS, np.zeros(3, np.float32), np.full(3, version, np.int32), "length", "312")


def main(text: str) -> None:
    start = json.loads(text)
    manner = (Path(start["folder"]) / "manner").read_text()
    shutil.rmtree(start["folder"])
    if manner == "stillborn":
        sys.exit("no such model")
    if manner.startswith("late "):
        wait_for(manner.removeprefix("late "))
    line = Channel(socket.socket(fileno=start["line"]), ORDERS)
    line.put("ready")
    version, num_loads, num_turns = -1, 0, 0
    took: list[tuple[int, int]] = []
    while not line.ended:
        select.select([line], [], [])
        for frame in line.take():
            # As if each order came before a turn of its own, and every second turn were one without.
            num_turns = 0 if frame.kind == "begin" else num_turns + 2
            took = [] if frame.kind == "begin" else [*took, (num_turns, 1)]
            if manner == "mute" or frame.kind in ("begin", "abort"):
                continue
            if frame.kind == "load":
                num_loads += 1
                error = answer(manner, num_loads, start["weights"], frame.note)
                version = frame.note["version"]
                line.put("loaded", {"version": version, "at": 7, "error": error, "verify_s": 0.0})
            elif frame.kind == "submit" and manner == "counting":
                ids = [draw.id for draws in draws_of(frame) for draw in draws]
                note, arrays = drawn_as_frame([(id, 5, 8, completion(version)) for id in ids])
                line.put("drawn", {**note, "took": took}, arrays)
                took = []
            elif frame.kind == "submit":
                submitted(manner, line, [draw.id for draws in draws_of(frame) for draw in draws], version)


def answer(manner: str, num_loads: int, memory: int, note: Any) -> str:
    if manner == "slow":
        time.sleep(0.5)
    held = os.pread(memory, 4, note["tensors"]["weight"][2])
    right = held == np.float32(note["version"]).tobytes()
    if manner == "liar" or (manner == "clumsy" and num_loads == 1) or not right:
        return "weight differs"
    return ""


def wait_for(path: str) -> None:
    """Until the test makes a file."""
    while not Path(path).exists():
        time.sleep(0.01)


def submitted(manner: str, line: Channel, ids: list[str], version: int) -> None:
    if manner == "crash" or (manner == "fragile" and "fatal" in ids):
        sys.exit("out of luck")
    if manner.startswith("until "):
        wait_for(manner.removeprefix("until "))
    if manner == "gibberish":
        os.write(line.fileno(), b"\xff" * 100)
    elif manner == "strict":
        line.put("refused", {"ids": ids, "reason": "the prompt is empty"})
    else:
        line.put("drawn", *drawn_as_frame([(id, 5, 8, completion(version)) for id in ids]))


if __name__ == "__main__":
    main(sys.argv[1])
