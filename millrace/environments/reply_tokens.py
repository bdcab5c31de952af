"""From an environment's reply to the tokens that the policy reads next. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from millrace.environments.running_episodes import EnvironmentReply, StepEnvironment
from millrace.types import Reply

if TYPE_CHECKING:
    from millrace.data.tokenizers import Tokenizer

# Turns the reply to a step into tokens.
ReplyEncoder = Callable[[StepEnvironment, Reply], EnvironmentReply]
# A tokenizer makes at least one token of so many characters in practice; longer texts end the episode anyway.
CHARACTERS_PER_TOKEN = 32


class PlainReplies:
    """Encodes replies as text without a template; the first one is the row's prompt unless it has a text."""

    def __init__(self, tokenizer: Tokenizer, *, max_tokens: int) -> None:
        """Take the tokenizer, and the most tokens that an episode may have: longer replies are cut there."""
        self._tokenizer, self._max_tokens = tokenizer, max_tokens

    def __call__(self, step: StepEnvironment, reply: Reply) -> EnvironmentReply:
        """Return the reply in tokens; one token more than the limit stands for any longer text."""
        if reply.text is None and not step.actions:
            token_ids = step.prompt.token_ids
        else:
            text = (reply.text or "")[: self._max_tokens * CHARACTERS_PER_TOKEN]
            text = text.encode("utf-8", "replace").decode("utf-8")
            found = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            token_ids = tuple(found[: self._max_tokens + 1])
        if not token_ids and not step.actions:
            return EnvironmentReply(step.id, failure="began with an empty prompt")
        return EnvironmentReply(step.id, token_ids, reply.reward, reply.state, reply.done, reply.score)
