"""Functions that the tests' children run."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from typing import Any

from millrace.processes.worker import KEY_BYTES, WorkerChannel, to_header


def echo(channel: WorkerChannel, settings: dict[str, Any]) -> None:
    """Reply to each request with its body; some are orders."""
    channel.started()
    for id, body in channel:
        if body == b"die":
            sys.stderr.write("last words")
            sys.stderr.flush()
            os._exit(3)
        if body == b"hang":
            time.sleep(600)
        while body == b"print":
            os.write(1, b"x" * (1 << 16))
        if body == b"flood":
            sys.stdout.write("x" * (1 << 20))
        if body == b"twice":
            channel.reply(id, body)
        if body.startswith(b"long"):
            body = b"x" * int(body.split()[1])
        channel.reply(id, body)


def reverse(channel: WorkerChannel, settings: dict[str, Any]) -> None:
    """Keep requests until "go", then reply to all, the last one first. "cancelled" asks for ids, at once."""
    channel.started()
    kept: dict[int, bytes] = {}
    cancelled: list[int] = []
    for id, body in channel:
        if not body:
            cancelled.append(id)
        elif body == b"cancelled":
            channel.reply(id, str(cancelled).encode())
        else:
            kept[id] = body
        if body == b"go":
            for one in sorted(kept, reverse=True):
                channel.reply(one, kept.pop(one))


def forge(channel: WorkerChannel, settings: dict[str, Any]) -> None:
    """Answer the first request, and write a frame of another key for the second."""
    channel.started()
    for id, body in channel:
        if body == b"forge":
            channel.connection.sendall(to_header(bytes(KEY_BYTES), id, b"forged") + b"forged")
        channel.reply(id, body)


def collect(channel: WorkerChannel, settings: dict[str, Any]) -> None:
    """Reply with the number of objects that are left out of garbage collection, and of others."""
    channel.started()
    for id, _ in channel:
        found = [gc.isenabled(), gc.get_freeze_count(), len(gc.get_objects())]
        channel.reply(id, json.dumps(found).encode())


def refuse(channel: WorkerChannel, settings: dict[str, Any]) -> None:
    """Give a reason for not starting."""
    channel.refuse(settings["reason"])


def start_later(channel: WorkerChannel, settings: dict[str, Any]) -> None:
    """Die at the start as long as a folder holds fewer files than it needs."""
    names = os.listdir(settings["folder"])
    with open(os.path.join(settings["folder"], str(len(names))), "w"):
        pass
    if len(names) < settings["deaths"]:
        sys.exit(f"start {len(names)}")
    echo(channel, settings)
