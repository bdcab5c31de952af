"""Failures of environments on purpose, to try what they cost a run. No torch."""

from __future__ import annotations

import hashlib

from millrace.environments.reply_tokens import ReplyEncoder, Tools
from millrace.environments.running_episodes import EnvironmentReply, StepEnvironment
from millrace.types import Action, Prompt, Reply

FAULT = "failed on purpose (environment.fault)"


class FaultInjection:
    """A `ReplyEncoder` that lets a fraction of the episodes fail, each at one of its replies.

    Whether and where an episode fails depends on the seed and the episode alone, so a run is repeatable.
    """

    def __init__(self, encode: ReplyEncoder, fraction: float, seed: int) -> None:
        self._encode, self._fraction, self._seed = encode, fraction, seed

    @property
    def reads_calls(self) -> bool:
        """Whether actions have messages."""
        return self._encode.reads_calls

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the vocabulary."""
        return self._encode.num_tokens

    def __call__(self, step: StepEnvironment, reply: Reply, tools: Tools) -> EnvironmentReply:
        """Return the reply in tokens, or a failure."""
        digest = hashlib.blake2b(f"{self._seed} {step.episode}".encode(), digest_size=16).digest()
        chance, place = (int.from_bytes(part, "little") for part in (digest[:8], digest[8:]))
        # Where it ends before its place, it fails at its end.
        is_place = reply.done or len(step.actions) == place % (step.task.max_turns + 1)
        if is_place and chance < self._fraction * 2**64:
            return EnvironmentReply(step.id, failure=FAULT)
        return self._encode(step, reply, tools)

    def read(self, action: Action, prompt: Prompt, tools: Tools) -> Action:
        """Return an action with its message."""
        return self._encode.read(action, prompt, tools)
