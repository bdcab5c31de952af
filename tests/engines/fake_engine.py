"""A process that stands in for an engine's and starts at once. A file `manner` says how it behaves.

`late PATH` starts once there is such a file, `until PATH` draws then.
"""

from __future__ import annotations

import os
import select
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from millrace.engines.wire import COMMANDS, Channel
from millrace.processes.worker import WorkerChannel
from millrace.rollout.serialization import pack_results, unpack_requests
from millrace.types import Completion

TOKENS = (3, 1, 2)
# Of an engine with workers, the manner `divided`.
COUNTERS = {"prompt_tokens_computed": 10, "workers_lost": 1, "imported_fraction": 0.5}


def completion(version: int) -> Completion:
    return Completion(TOKENS, np.zeros(3, np.float32), np.full(3, version, np.int32), "length", "312")


def serve(worker: WorkerChannel, settings: dict[str, Any]) -> None:
    manner = (Path(settings["folder"]) / "manner").read_text()
    shutil.rmtree(settings["folder"])
    if manner == "stillborn":
        sys.exit("no such model")
    if manner.startswith("late "):
        wait_for(manner.removeprefix("late "))
    channel = Channel(worker.connection, worker.key, COMMANDS)
    channel.send("ready")
    version, num_loads, num_turns = -1, 0, 0
    started: list[tuple[int, list[str]]] = []
    while not channel.ended:
        select.select([channel], [], [])
        for frame in channel.receive():
            # As if each order came before a turn of its own, and every second turn were one without.
            restarts = frame.kind == "restart_turns"
            num_turns = 0 if restarts else num_turns + 2
            started = [] if restarts else [*started, (num_turns, [frame.kind])]
            if manner == "mute" or restarts or frame.kind == "abort":
                continue
            if frame.kind == "update_weights":
                num_loads += 1
                error = answer(manner, num_loads, settings["weights"], frame.metadata)
                version = frame.metadata["version"]
                channel.send("weights_loaded", {"version": version, "at": 7, "error": error, "verify_s": 0.0})
            elif manner == "counting":
                ids = [request.id for requests in frame.unpack(unpack_requests) for request in requests]
                metadata, arrays = pack_results([(id, 5, 8, completion(version)) for id in ids])
                channel.send("completed", {**metadata, "commands_started": started}, arrays)
                started = []
            else:
                submitted(
                    manner,
                    channel,
                    [request.id for requests in frame.unpack(unpack_requests) for request in requests],
                    version,
                )


def answer(manner: str, num_loads: int, memory: int, metadata: Any) -> str:
    if manner == "slow":
        time.sleep(0.5)
    value = os.pread(memory, 4, metadata["tensors"]["weight"][2])
    right = value == np.float32(metadata["version"]).tobytes()
    if manner == "liar" or (manner == "clumsy" and num_loads == 1) or not right:
        return "weight differs"
    return ""


def wait_for(path: str) -> None:
    """Until the test makes a file."""
    while not Path(path).exists():
        time.sleep(0.01)


def submitted(manner: str, channel: Channel, ids: list[str], version: int) -> None:
    if manner == "crash" or (manner == "fragile" and "fatal" in ids):
        sys.exit("out of luck")
    if manner.startswith("until "):
        wait_for(manner.removeprefix("until "))
    if manner == "gibberish":
        os.write(channel.fileno(), b"\xff" * 100)
    elif manner == "strict":
        channel.send("refused", {"ids": ids, "reason": "the prompt is empty"})
    else:
        metadata, arrays = pack_results([(id, 5, 8, completion(version)) for id in ids])
        counted = COUNTERS if manner == "divided" else {}
        channel.send("completed", {**metadata, "counters": counted}, arrays)
