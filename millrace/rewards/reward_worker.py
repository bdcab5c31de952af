"""The worker process of an isolated reward: reads requests, scores them sequentially, writes results.

`rewards.process.RewardWorker` starts this file as a script. Only the standard library is imported until the
parent has sent the module search path.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import BinaryIO

PR_SET_DUMPABLE = 4


def main() -> None:
    """Score requests until the parent closes its end of the pipe."""
    requests, replies = _take_channel()
    import json

    hello = json.loads(requests.readline())
    sys.path[:] = hello["path"]
    from millrace.observability.plain import plain_text
    from millrace.rewards.confinement import limit_resources, refuse_beyond, refuse_effects
    from millrace.rewards.reward_errors import RewardError
    from millrace.rewards.sandbox import Permissions
    from millrace.rewards.verifiers import make_scoring_function, verdict
    from millrace.rewards.worker_wire import decode_row, seal

    key, num_written = bytes.fromhex(hello["key"]), 0

    def reply(value: object) -> None:
        nonlocal num_written
        replies.write(seal(key, num_written, value))
        replies.flush()
        num_written += 1

    permissions = Permissions(**hello["permissions"])
    own_function = hello["spec"]["kind"] == "function"
    if own_function:
        limit_resources(permissions.memory_bytes, permissions.file_bytes)
        refuse_beyond(permissions.writable, network=permissions.network)
    try:
        score = make_scoring_function(hello["spec"])
    except RewardError as error:
        reply({"error": plain_text(str(error), 2000)})
        return
    if not own_function:  # only now, since its libraries write caches where they are imported
        limit_resources(permissions.memory_bytes, permissions.file_bytes)
        refuse_effects()
    reply({"ready": True})
    for line in requests:
        message = json.loads(line)
        prompts = [(text, answer, decode_row(row)) for text, answer, row in message["prompts"]]
        for number, completion in message["items"]:
            text, answer, row = prompts[number]
            reply(verdict(score, text, completion, answer, row))


def _take_channel() -> tuple[BinaryIO, BinaryIO]:
    """Move the protocol's pipes off descriptors 0 and 1, so that `print` and `input` do not use them.

    Programs that a reward starts do not inherit the pipes and cannot open them through /proc either.
    """
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    return requests, replies


if __name__ == "__main__":
    main()
