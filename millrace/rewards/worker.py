"""The child process of an isolated reward: reads questions, judges them one by one, writes verdicts.

Started as a file by `process.JudgeProcess`, with the number of the lifeline's descriptor. Nothing but the
standard library is imported before the parent has said where modules are looked up.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from typing import BinaryIO


def main(lifeline: int) -> None:
    """Judge until the parent closes its end.

    Args:
        lifeline: read end of a pipe that carries nothing; its other end closes when the parent is gone.
    """
    die_with_parent(lifeline)
    requests, replies = _take_channel()
    import json

    hello = json.loads(requests.readline())
    sys.path[:] = hello["path"]
    from millrace.rewards.confinement import limit_resources, refuse_effects
    from millrace.rewards.errors import RewardError
    from millrace.rewards.judges import make_judge, verdict
    from millrace.rewards.wire import decode_row, encode_line

    def reply(value: object) -> None:
        replies.write(encode_line(value))
        replies.flush()

    try:
        judge = make_judge(hello["spec"])
    except RewardError as error:
        reply({"error": str(error)})
        return
    if hello["spec"]["kind"] != "function":
        limit_resources()
        refuse_effects()
    reply({"ready": True})
    for line in requests:
        message = json.loads(line)
        prompts = [(text, answer, decode_row(row)) for text, answer, row in message["prompts"]]
        for number, completion in message["items"]:
            text, answer, row = prompts[number]
            reply(verdict(judge, text, completion, answer, row))


def die_with_parent(lifeline: int) -> None:
    """Have this process group killed when the lifeline's other end closes.

    The kernel does it, since a judge that hangs inside C code would never get to look at a closed pipe.
    """
    signal.signal(signal.SIGIO, lambda *_: os.killpg(0, signal.SIGKILL))
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    if hasattr(fcntl, "F_SETSIG"):  # Linux; elsewhere SIGIO comes, and the handler above
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC | os.O_NONBLOCK)
    try:
        os.read(lifeline, 1)
    except BlockingIOError:
        return
    sys.exit(0)  # the parent was gone before the signal was asked for


def _take_channel() -> tuple[BinaryIO, BinaryIO]:
    """The protocol's two ends, moved off descriptors 0 and 1 so that no `print` or `input` reaches them."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


if __name__ == "__main__":
    main(int(sys.argv[1]))
