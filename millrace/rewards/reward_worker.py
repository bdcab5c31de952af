"""The worker process of an isolated reward: scores completions one after another."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from millrace.observability.plain import plain_text
from millrace.processes.worker import START, limit_resources
from millrace.rewards.confinement import refuse_beyond, refuse_effects
from millrace.rewards.reward_errors import RewardError
from millrace.rewards.row_encoding import decode_row
from millrace.rewards.sandbox import Permissions
from millrace.rewards.verifiers import make_scoring_function, verdict

if TYPE_CHECKING:
    from millrace.processes.worker import WorkerChannel


def serve(channel: WorkerChannel, settings: dict[str, Any]) -> None:
    """Score completions, [place of the prompt, text] each, until the parent closes the channel.

    Lists of prompts arrive as messages without reply.
    """
    spec, permissions = settings["spec"], Permissions(**settings["permissions"])
    own_function = spec["kind"] == "function"
    if own_function:
        limit_resources(permissions.memory_bytes, permissions.file_bytes)
        refuse_beyond(permissions.writable, network=permissions.network)
    try:
        score = make_scoring_function(spec)
    except RewardError as error:
        channel.reply(START, plain_text(str(error), 2000).encode())
        return
    if not own_function:  # only now, since its libraries write caches where they are imported
        limit_resources(permissions.memory_bytes, permissions.file_bytes)
        refuse_effects()
    channel.reply(START, b"")
    prompts: list[tuple[str, str, dict[str, Any]]] = []
    for id, body in channel:
        message = json.loads(body)
        if isinstance(message, dict):
            prompts = [(text, answer, decode_row(row)) for text, answer, row in message["prompts"]]
        else:
            place, completion = message
            text, answer, row = prompts[place]
            channel.reply(id, json.dumps(verdict(score, text, completion, answer, row)).encode())
